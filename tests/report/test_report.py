"""The report of runs: what it reads, how curves are reduced, and the page and SVG that it writes."""

import csv
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from ndtrain.report import ReportError, find_runs, render_page, render_svg
from ndtrain.report.__main__ import main
from ndtrain.report.curves import reduce_curve, thin
from ndtrain.report.page import COLOURS, page_data
from ndtrain.report.picture import short_number, ticks
from ndtrain.report.runs import METRICS, differences, read_runs

CONFIG = "run: {{name: {name}, dir: x}}\noptim: {{lr: {lr}, betas: [0.9, 0.95]}}\nmodel: {{rope_scaling: {{}}}}\n"


def make_run(folder: Path, steps: int = 5, lr: float | None = 0.1, tail: str = "", **changes: dict) -> Path:
    """A run folder. `changes`: step_N=dict changes the row of step N."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 8 - step / 4, "lr": 0.1, "grad_norm": 1.5, "tokens": 100 * step, "mfu": 0.25}
        row |= {"tokens_per_s": 1e4, "peak_memory_bytes": 2**30, "data_wait_s": 0.002, "skipped_steps": 0}
        lines.append(json.dumps(row | changes.get(f"step_{step}", {})) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines) + tail)
    if lr is not None:
        (folder / "config.yaml").write_text(CONFIG.format(name=folder.name, lr=lr))
    return folder


def runs_of(*folders: Path):
    return read_runs(find_runs(list(folders)))


# ------------------------------------------------------------------------------------------------------------ reading


def test_run_has_rows_marks_and_units(tmp_path):
    folder = make_run(
        tmp_path / "a", step_2={"loss": None, "skipped_steps": 1}, step_3={"skipped_steps": 1},
        step_4={"skipped_steps": 1, "resumed_step": 3, "eval_loss": 7.5}, step_5={"skipped_steps": 1},
    )  # fmt: skip
    (folder / "exit.json").write_text('{"why": "finished"}')
    (run,) = runs_of(folder)
    assert run.steps.tolist() == [1, 2, 3, 4, 5] and run.tokens == 500 and run.ended == "finished"
    assert run.skipped == [2] and run.restarts == [3]
    assert np.isnan(run.values["loss"][1]) and run.values["loss"][2] == 7.25
    assert [run.values[k][0] for k in ("mfu", "peak_memory_bytes", "data_wait_s")] == [25, 1, 2]
    assert run.config["optim.lr"] == 0.1 and run.config["model.rope_scaling"] == {}


@pytest.mark.parametrize("tail", ['{"step": 6, "lo', "\n\n", "[]\n", '{"loss": 1}\n', "\x00\x00"])
def test_incomplete_lines_are_left_out(tmp_path, tail):
    (run,) = runs_of(make_run(tmp_path / "a", tail=tail))
    assert run.steps.tolist() == [1, 2, 3, 4, 5]


def test_run_without_config_evaluation_or_exit_is_read(tmp_path):
    (run,) = runs_of(make_run(tmp_path / "a", lr=None))
    assert run.config == {} and run.ended == "unknown" and run.name == "a"
    assert "eval_loss" not in [m["key"] for m in page_data([run])["metrics"]]
    assert "No readable config.yaml: a" in render_page([run])
    (tmp_path / "a" / "config.yaml").write_text("{unclosed: [")
    (tmp_path / "a" / "exit.json").write_text('{"why": "running"}')
    (run,) = runs_of(tmp_path / "a")
    assert run.config == {} and run.ended == "running, or killed"


def test_find_runs_expands_folder_of_runs(tmp_path):
    for name in ("lr=2", "lr=1"):
        make_run(tmp_path / "sweep" / name)
    assert [p.name for p in find_runs([tmp_path / "sweep", tmp_path / "sweep" / "lr=1"])] == ["lr=1", "lr=2"]


def test_runs_with_same_name_are_named_by_folder(tmp_path):
    for name in ("a", "b"):
        (make_run(tmp_path / name / "run") / "config.yaml").write_text("run: {name: run}")
    assert [run.name for run in runs_of(tmp_path / "a" / "run", tmp_path / "b" / "run")] == ["a/run", "b/run"]


def test_differences_lists_keys_that_differ(tmp_path):
    runs = runs_of(
        make_run(tmp_path / "a", lr=0.1), make_run(tmp_path / "b", lr=0.2), make_run(tmp_path / "c", lr=None)
    )
    assert differences(runs) == ["optim.lr"]
    assert differences(runs[:1]) == []
    for run in runs[:2]:
        run.config["logger.tags"] = [run.name]  # names the job of a sweep
    assert differences(runs) == ["optim.lr"]


# ------------------------------------------------------------------------------------------------------------ curves


def test_reduce_curve_keeps_extremes_and_means():
    steps, values = np.arange(1, 100_001), np.sin(np.arange(100_000) / 3e4)
    values[54_321], values[70_000], values[7] = 50.0, -50.0, math.nan
    curve = reduce_curve(steps, values, 1000)
    assert len(curve.x) == 1000 and curve.x[0] == 1 and (np.diff(curve.x) > 0).all()
    assert curve.high.max() == 50 and curve.low.min() == -50
    at = int(np.argmax(curve.high))
    assert curve.x[at] <= 54_322 < curve.x[at + 1]
    last = steps >= curve.x[-1]
    assert curve.mean[-1] == pytest.approx(values[last].mean())
    assert (curve.low <= curve.mean).all() and (curve.mean <= curve.high).all()


def test_reduce_curve_leaves_short_curve_unchanged():
    curve = reduce_curve(np.arange(4), np.array([1.0, math.nan, 3.0, 2.0]), 10)
    assert curve.x.tolist() == [0, 2, 3] and curve.mean.tolist() == [1, 3, 2]
    assert thin([1, 2, 3], 3) == [1, 2, 3] and thin(list(range(100)), 3) == [0, 49, 99]


def test_ticks_are_round_and_within_range():
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.1, 1.9, 4) == pytest.approx([1.2, 1.4, 1.6, 1.8])


def test_short_number_abbreviates_axis_numbers():
    numbers = {123_400: "123.4k", 8_000: "8000", 2.5e6: "2.5M", 1e10: "10G", 5e-4: "0.0005", -20_000: "-20k", 0: "0"}
    assert {value: short_number(value) for value in numbers} == numbers


# -------------------------------------------------------------------------------------------------------- page and SVG


class Page(HTMLParser):
    """The links of a page to elsewhere, the text of its scripts by type, and the cells of its tables."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.scripts, self.cells, self.opened, self._in = [], {}, [], [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.links += [v for k, v in attributes if k in ("src", "href", "srcset") or (v and "url(" in v)]
        self.opened.append(tag)
        self._in = given.get("type", "script") if tag == "script" else tag
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.opened and self.opened[-1] == "script" and self._in:
            self.scripts[self._in] = self.scripts.get(self._in, "") + data
        elif self.cells and self._in in ("td", "th", "i"):
            self.cells[-1] += data

    def handle_endtag(self, tag):
        self._in = None if tag in ("script", "td", "th", "style") else self._in


def test_the_page_has_all_runs_and_needs_no_other_file(tmp_path):
    evil = make_run(tmp_path / "b", lr=0.2, step_3={"eval_loss": 7.0})
    (evil / "config.yaml").write_text("run: {name: '</script><b>'}\noptim: {lr: 0.2}\n")
    text = render_page(runs_of(make_run(tmp_path / "a"), evil))
    page = Page(text)
    assert page.links == [] and "@import" not in text and "url(" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "[[" not in re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.DOTALL)
    data = json.loads(page.scripts["application/json"])
    assert [run["name"] for run in data["runs"]] == ["a", "</script><b>"]
    assert [m["key"] for m in data["metrics"]] == [m.key for m in METRICS]
    assert data["runs"][0]["curves"]["loss"] == {"x": [1, 2, 3, 4, 5], "mean": [7.75, 7.5, 7.25, 7.0, 6.75]}
    assert data["runs"][1]["curves"]["eval_loss"] == {"x": [3], "mean": [7.0]}
    assert {"optim.lr", "0.1", "0.2", "</script><b>", "7.0000 at step 3"} <= set(page.cells)


def test_colours_are_declared_for_light_and_dark(tmp_path):
    text = render_page(runs_of(make_run(tmp_path / "a")))
    light, dark = text.split("prefers-color-scheme: dark")
    for i in range(COLOURS):
        assert f"--c{i}: #" in light and f"--c{i}: #" in dark and f".c{i} {{" in dark
    assert f"const COLOURS = {COLOURS};" in text


def test_svg_is_valid_xml_with_all_labels(tmp_path):
    runs = runs_of(make_run(tmp_path / "a", step_3={"resumed_step": 2}), make_run(tmp_path / "b<", steps=900))
    root = ET.fromstring(render_svg(runs, "loss"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss", "a", "b<", "Step", "Loss (nats per token)"} <= set(texts)
    with pytest.raises(ReportError, match="metric=eval_loss"):
        render_svg(runs, "eval_loss")


def test_svg_of_single_step_run_is_valid(tmp_path):
    runs = runs_of(make_run(tmp_path / "a", steps=1))
    for metric in ("loss", "mfu", "lr"):
        ET.fromstring(render_svg(runs, metric))


# ----------------------------------------------------------------------------------------------------------- command


def test_report_command_writes_requested_files(tmp_path, capsys):
    make_run(tmp_path / "lr=1")
    page, picture = tmp_path / "page.html", tmp_path / "loss.svg"
    assert main([str(tmp_path / "lr=1"), f"out={page}", f"svg={picture}", "metric=lr"]) == 0
    assert page.read_text().startswith("<!doctype html>") and "Learning rate" in picture.read_text()
    assert re.match(
        r"1 run, 5 steps: wrote .*loss.svg \(\d+ KiB\) and .*page.html \(\d+ KiB\)\n$", capsys.readouterr().out
    )


def test_the_csv_has_every_value_of_metrics_jsonl(tmp_path, capsys):
    steps = {"step_2": {"loss": None, "mfu": 0.123456789}, "step_3": {"eval_loss": 7.5, "data_wait_s": 0.0023}}
    first = make_run(tmp_path / "a, b", steps=3, step_1={"peak_memory_bytes": 151_000_000_001}, **steps)
    (first / "config.yaml").write_text("run: {name: 'a, b'}\n")
    make_run(tmp_path / "c", steps=1200)
    target = tmp_path / "curves.csv"
    assert main([str(tmp_path / "a, b"), str(tmp_path / "c"), f"csv={target}"]) == 0
    assert re.match(r"2 runs, 1,203 steps: wrote .*curves.csv \(\d+ KiB\)\n$", capsys.readouterr().out)
    rows = list(csv.DictReader(target.open(newline="")))
    assert list(rows[0]) == ["run", "step", *(m.key for m in METRICS)]
    assert len(rows) == 1203 and [row["run"] for row in rows[2:4]] == ["a, b", "c"]
    assert (rows[0]["peak_memory_bytes"], rows[0]["eval_loss"], rows[0]["loss"]) == ("151000000001", "", "7.75")
    assert (rows[1]["loss"], rows[1]["mfu"]) == ("", "0.123456789")
    assert (rows[2]["eval_loss"], rows[2]["data_wait_s"], rows[2]["step"]) == ("7.5", "0.0023", "3")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "RUN is missing"),
        (["nowhere"], "nowhere: no such folder"),
        (["{tmp}"], "neither this folder nor a folder in it has a metrics.jsonl"),
        (["{tmp}/new"], "has no complete row yet"),
        (["{tmp}/new", "metric=los"], "los: no such metric; did you mean 'loss'?"),
        (["{tmp}/new", "ouT=a"], "did you mean 'out'?"),
        (["{tmp}/ok", "svg={tmp}/x.png"], "x.png: the output is SVG: give a name that ends in .svg"),
        (["{tmp}/ok", "csv={tmp}/x.tsv"], "x.tsv: the output is CSV: give a name that ends in .csv"),
        (["{tmp}/ok", "out={tmp}/x.png"], "x.png: the output is HTML: give a name that ends in .html"),
        (["{tmp}/ok", "out={tmp}/no/page.html"], "cannot be written"),
    ],
    ids=lambda value: None if isinstance(value, list) else value,
)
def test_bad_argument_is_one_line_error(tmp_path, capsys, args, said):
    if "new" in str(args) or "ok" in str(args):
        make_run(tmp_path / "new", steps=0)
        make_run(tmp_path / "ok")
    assert main([arg.format(tmp=tmp_path) for arg in args]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ") and output.err.count("\n") == 1 and said in output.err and not output.out


def test_run_without_rows_is_skipped(tmp_path, capsys):
    """A job of a sweep that has just started does not hide the others."""
    make_run(tmp_path / "sweep/new", steps=0)
    make_run(tmp_path / "sweep/ok")
    assert main([str(tmp_path / "sweep"), f"out={tmp_path / 'page.html'}"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("1 run, 5 steps") and re.match(r"skipped: .*/new/metrics.jsonl has no", output.err)


@pytest.mark.full
def test_pages_of_long_and_of_many_runs_are_small(tmp_path):
    generator = np.random.default_rng(0)
    for i in range(60):
        steps = 100_000 if i == 0 else 3000
        folder = tmp_path / f"run{i}"
        folder.mkdir()
        losses = generator.normal(3, 0.1, steps)
        lines = [
            f'{{"step": {n + 1}, "loss": {x}, "grad_norm": {x}, "lr": {x}, "mfu": {x}}}\n' for n, x in enumerate(losses)
        ]
        (folder / "metrics.jsonl").write_text("".join(lines))
    for chosen in ([tmp_path / "run0"], sorted(tmp_path.iterdir())):
        assert len(render_page(runs_of(*chosen)).encode()) < 5e6


@pytest.mark.full
def test_a_browser_draws_all_curves(tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium on this machine")
    page = tmp_path / "page.html"
    page.write_text(
        render_page(runs_of(make_run(tmp_path / "a", step_3={"resumed_step": 2}), make_run(tmp_path / "b", lr=0.2)))
    )
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([browser, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    drawn = len(page_data(runs_of(tmp_path / "a"))["metrics"])
    assert done.stdout.count("<figure>") == drawn
    assert len(re.findall(r'<path class="curve" d="M[0-9.]+ [0-9.]+L', done.stdout)) == 2 * drawn
    assert done.stdout.count('class="restart"') == drawn
    assert done.stdout.count(">Step</text>") == drawn
    for metric in METRICS:
        assert (f">{metric.axis}</text>" in done.stdout) == (metric.key != "eval_loss"), metric
