"""The parts of a release agree: the version, the changelog, the package lists, and the inputs of a build."""

import re
import tomllib
from datetime import date
from pathlib import Path

import yaml

import ndtrain

ROOT = Path(ndtrain.__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
CONDA_NAMES = {"pytorch": "torch"}  # conda's name -> the package index's name


def requirements(lines: list[str]) -> dict[str, str]:
    """The version bounds by package name."""
    split = [re.fullmatch(r"([\w-]+)((?:[<>=]=?[\d.]+,?)*)", line) for line in lines]
    assert all(split), lines
    return {match[1]: match[2] for match in split if match}


def headings() -> list[re.Match]:
    return list(re.finditer(r"^## \[(.*?)\](?: - (.*))?$", CHANGELOG, flags=re.MULTILINE))


def test_version_is_defined_once():
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    path = ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]
    assert re.findall(r'^__version__ = "(.*)"$', path.read_text(), flags=re.MULTILINE) == [ndtrain.__version__]


def test_the_readme_names_this_version():
    assert f"Version {ndtrain.__version__} ([changes]" in (ROOT / "README.md").read_text()


def test_the_changelog_begins_with_unreleased_and_this_version():
    first, second, *_ = headings()
    assert first[1] == "Unreleased"
    assert second[1] == ndtrain.__version__ and date.fromisoformat(second[2])


def test_changelog_uses_keep_a_changelog_groups():
    groups = set(re.findall(r"^### (.*)$", CHANGELOG, flags=re.MULTILINE))
    assert groups <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_changelog_of_release_is_short():
    """At most a page of short lines: what is longer is documentation."""
    for release in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        entries = re.findall(r"^- .*(?:\n  .*)*", release, flags=re.MULTILINE)
        assert len(release.splitlines()) <= 160
        assert not [entry for entry in entries if len(entry.splitlines()) > 2]


def test_the_conda_environment_lists_the_dependencies():
    packages = [line for line in ENVIRONMENT["dependencies"] if isinstance(line, str) and line != "pip"]
    listed = {CONDA_NAMES.get(name, name): bounds for name, bounds in requirements(packages).items()}
    assert listed.pop("python") == PROJECT["requires-python"]
    assert listed == requirements(PROJECT["dependencies"])


def test_the_dockerfile_names_the_versions_of_the_dependencies():
    named = requirements(re.findall(r"\b([\w-]+[<>]=[\d.]+(?:,<[\d.]+)?)", DOCKERFILE))
    needed = requirements(PROJECT["dependencies"])
    assert named and named == {name: needed[name] for name in named}
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or later" in DOCKERFILE
    (extras,) = re.findall(r"'\.\[(.*?)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_dockerfile_copies_inputs_of_wheel():
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, flags=re.MULTILINE) for word in line.split()]
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    link = (ROOT / "conf" / "recipe").resolve().relative_to(ROOT)  # conf/ holds a link to it
    needed = {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], *wheel["packages"], str(link)}
    assert set(copied) == needed | set(wheel["force-include"])
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
    assert sorted(allowed) == sorted(copied)


def test_sdist_holds_inputs_of_wheel():
    targets = PYPROJECT["tool"]["hatch"]["build"]["targets"]
    needed = {
        PROJECT["readme"],
        *PROJECT["license-files"],
        *targets["wheel"]["packages"],
        *targets["wheel"]["force-include"],
    }
    assert needed <= set(targets["sdist"]["include"])
    missing = [name for name in targets["sdist"]["include"] if not (ROOT / name).exists()]
    assert not missing
