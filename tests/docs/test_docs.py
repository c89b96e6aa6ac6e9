"""The documentation: its generated pages are current, its links lead to files, and the README's program runs."""

import ast
import importlib.util
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from ndtrain.config import Config, load_config
from tests.lib.helpers import write_corpus
from tests.lib.ranks import run_ranks

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text()


def load_script(name: str) -> ModuleType:
    """Import a script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(ROOT / "docs"), *sys.path]):  # as if Python ran it
        spec.loader.exec_module(module)
    return module


generate, results = load_script("generate"), load_script("results")
generate.read_source = cache(generate.read_source)  # else it parses a module again for each section


def without_code(text: str) -> str:
    """Markdown without its fenced blocks and code spans, which hold brackets that are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE))


def targets(text: str) -> list[str]:
    """The relative targets of a page's links and images, without their anchors."""
    text = without_code(text)
    targets = re.findall(r"\]\(([^)\s]+)", text) + re.findall(r'(?:src|href|srcset)="([^"\s]+)"', text)
    return [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]


def check_the_page() -> int:
    return generate.main(["--check"])


def test_the_configuration_page_is_current():
    """The check runs in a process without plugins."""
    assert run_ranks(check_the_page, 1) == [0]


def test_a_changed_figure_makes_the_results_page_stale(monkeypatch, tmp_path, capsys):
    shutil.copytree(results.BENCHMARKS, tmp_path / "benchmarks")
    monkeypatch.setattr(results, "BENCHMARKS", tmp_path / "benchmarks")
    assert results.main(["--check"]) == 0
    changed = tmp_path / "benchmarks" / "peers-cpu-dp-2.json"
    changed.write_text(re.sub(r'"median": [\d.]+', '"median": 3.0', changed.read_text(), count=1))
    assert results.main(["--check"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_benchmark_is_on_the_results_page():
    page = results.PAGE.read_text()
    unnamed = [path.name for path in results.BENCHMARKS.glob("*.json") if f"`{path.name}`" not in page]
    assert not unnamed


def test_the_readmes_ratios_are_on_the_results_page():
    rows = re.findall(r"^\| .* \| (\d) \| ([\d.]+) \| ([\d.]+) \|$", README, flags=re.MULTILINE)
    assert len(rows) >= 4
    page = [line for line in results.PAGE.read_text().splitlines() if line.startswith("|")]
    for ranks, *ratios in rows:
        found = [line for line in page if f"| {ranks} |" in line and all(f"| {r} (" in line for r in ratios)]
        assert found, f"{ratios} on {ranks} ranks"


def test_stale_page_check_prints_one_line_and_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(generate, "PAGE", tmp_path / "configuration.md")
    for text in (None, "# Configuration\n"):
        if text:
            generate.PAGE.write_text(text)
        assert generate.main(["--check"]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert generate.main([]) == 0 and generate.main(["--check"]) == 0


def test_every_key_is_on_the_configuration_page():
    page, keys = generate.PAGE.read_text(), []
    for section in fields(Config):
        inner = section.default_factory
        keys += [f"{section.name}.{f.name}" for f in fields(inner)] if is_dataclass(inner) else [section.name]
    assert len(keys) > 50
    assert not [key for key in keys if f"| `{key}` |" not in page]


def test_every_key_has_a_meaning():
    sections = {"": Config} | {f"{f.name}.": cls for f in fields(Config) if (cls := generate.section_of(f))}
    keys = [(prefix + key.name, key.meaning) for prefix, cls in sections.items() for key in generate.section_keys(cls)]
    assert len(keys) > 100
    assert not [name for name, meaning in keys if len(meaning) < 5]


def test_configuration_page_lists_registered_names():
    rows = generate.PAGE.read_text().splitlines()
    (logger,) = [row for row in rows if row.startswith("| `logger.name` |")]
    assert all(f"`{name}`" in logger for name in ("jsonl", "tensorboard", "wandb"))


@dataclass
class Example:
    """A section that declares keys in both ways: by metadata, and by comments."""

    # a comment above
    plain: int = 1  # and beside
    none: str | None = None
    declared: str = field(default="b", metadata={"choices": ("a", "b", None), "least": 0, "help": "from metadata"})
    listed: list[str] = field(default_factory=lambda: ["x"])  # a | <b>


def test_section_keys_reads_metadata_and_comments():
    plain, none, declared, listed = generate.section_keys(Example)
    assert (plain.type, plain.default, plain.allowed, plain.meaning) == ("int", "1", "", "a comment above and beside")
    assert (none.type, none.default, none.meaning) == ("str or null", "null", "")
    assert (declared.allowed, declared.meaning) == ("`a`, `b`, `null`; at least 0", "from metadata")
    assert (listed.default, listed.meaning) == ("[x]", "a | <b>")
    rows = generate.table([plain, listed], "example.").splitlines()
    assert rows[0] == "| key | type | default | meaning |"
    assert rows[3] == "| `example.listed` | list[str] | `[x]` | a &#124; &lt;b> |"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_to_files(page):
    missing = [t for t in targets(page.read_text()) if not (page.parent / t).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to {missing}"


def test_the_navigation_lists_every_page_once():
    entries = re.findall(r"^ *- .*?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = [p for p in PAGES if p.is_relative_to(ROOT / "docs") and p != results.TEXT]
    pages = [str(p.relative_to(ROOT / "docs")) for p in pages]
    assert sorted(entries) == sorted(pages)


def test_readme_has_at_most_150_lines():
    assert len(README.splitlines()) <= 150


def use_lines() -> list[list[str]]:
    """The commands of the README after its set-up, as words."""
    (block,) = re.findall(r"<!-- use -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    activate, *commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert activate == ["source", ".venv/bin/activate"] and len(commands) >= 4
    return commands


def test_readme_commands_use_different_run_folders():
    """The set-up command has made runs/llama_small."""
    folders = [Path("runs/llama_small")]
    for words in use_lines():
        overrides = [w for w in words if re.fullmatch(r"[\w.]+=[^,]*", w)]
        if "--cfg" not in words:
            folders.append(Path(load_config(overrides).run.dir))
    assert len(set(folders)) == len(folders), folders


@pytest.mark.full
def test_readme_commands_work_after_setup(tmp_path):
    made = tmp_path / "runs" / "llama_small"
    made.mkdir(parents=True)
    (made / "metrics.jsonl").write_text("{}\n")
    corpus = write_corpus(tmp_path / "corpus.txt")
    small = ["model=llama_debug", "data=text", f"data.path={corpus}", "data.tokenizer=byte", "train.steps=2",
             "optim.warmup=1", "logger=jsonl", "train.global_batch=4", "train.seq_len=32"]  # fmt: skip
    for words in use_lines():
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run([*words, *small], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_python_blocks_of_pages_parse():
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            ast.parse(block)


def said_by(program: Path) -> str:
    """Runs it in its folder, with torch loaded."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    os.environ["WANDB_MODE"] = "offline"
    os.chdir(program.parent)
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(program), run_name="__main__")
    return said.getvalue()


def test_the_readme_program_trains(tmp_path):
    (program,) = re.findall(r"<!-- python: train -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(program.splitlines()) <= 10
    (tmp_path / "program.py").write_text(program)
    (said,) = run_ranks(said_by, 1, tmp_path / "program.py", timeout=300)
    assert math.isfinite(float(said.split()[-1]))
    assert (tmp_path / "runs" / "llama_debug" / "metrics.jsonl").exists()
