"""Pages name files that exist, link to pages that exist, and their commands are configurations that resolve."""

import re
import shlex
from pathlib import Path

import pytest

import ndtrain
from ndtrain.config import load_config, resolve

ROOT = Path(ndtrain.__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("concepts/*.md"), *DOCS.glob("howto/*.md"), DOCS / "parallelism.md", DOCS / "glossary.md"])
NAMED = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
WRITTEN = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
COMMANDS = re.findall(r"--nproc-per-node (\d+) -m ndtrain.train (.*)", (DOCS / "parallelism.md").read_text())


@NAMED
def test_files_named_on_a_page_exist(page: Path):
    text = page.read_text()
    missing = [
        path
        for path in re.findall(r"`((?:ndtrain|conf|recipes|tests)/[\w/.-]+)`", text)
        if not (ROOT / path).exists() and "NAME" not in path
    ]
    assert not missing


@NAMED
def test_links_and_anchors_of_page_exist(page: Path):
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text())
    for path, anchor in links:
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: no {path}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in heads}, anchor


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_of_page_are_closed(page: Path):
    """A fence that closes a block of code names no language, and each block is closed; no mark of a merge is left."""
    fences = [line.strip() for line in page.read_text().splitlines() if line.lstrip().startswith("```")]
    opening, closing = fences[::2], fences[1::2]
    assert len(opening) == len(closing) and set(closing) <= {"```"}, fences
    assert not re.search(r"^(<{7}|={7}|>{7})( |$)", page.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(("ranks", "overrides"), COMMANDS, ids=lambda value: value)
def test_a_command_of_the_parallelism_page_resolves(ranks: str, overrides: str):
    resolve(load_config(shlex.split(overrides)), int(ranks))
