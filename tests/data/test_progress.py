"""Progress while a corpus is tokenised: a bar on a terminal, plain lines anywhere else."""

import io
import re
import time
from contextlib import contextmanager

import pytest
from rich.console import Console

from ndtrain.data import open_data, progress, tokenizer
from ndtrain.data.corpora import open_corpus
from ndtrain.data.progress import TextProgress, progress_on_stderr
from tests.data.test_data import config
from tests.lib.helpers import wait_for

LINE = r"tokenising  \d+\.\d of \d+\.\d MB(  [\d,]+ tokens  [\d,]+ tokens/s)?(  left \d:\d\d:\d\d)?"


@pytest.fixture
def corpus(tmp_path):
    """Settings of a corpus of 200 kB of non-ASCII text, in which a JSON line has more bytes than its text."""
    lines = ['{"id": 1, "text": "Ünal \\u72d0 jumps over"}\n'] * 5000
    (tmp_path / "a.jsonl").write_text("".join(lines), "utf-8")
    return {"name": "jsonl", "path": str(tmp_path / "a.jsonl")}


def test_tokenising_prints_plain_lines(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    open_data(config(corpus, tmp_path))
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert len(lines) > 2 and all(re.fullmatch(LINE, line) for line in lines) and shown.out == ""
    assert lines[0].startswith("tokenising  0.0 of 0.2 MB") and lines[-1].startswith("tokenising  0.2 of 0.2 MB")
    open_data(config(corpus, tmp_path))
    assert capsys.readouterr().err == "", "a corpus in the cache is not tokenised again"


def test_a_short_piece_of_work_prints_nothing(corpus, tmp_path, capsys):
    open_data(config({**corpus, "tokenizer": "bpe"}, tmp_path))
    assert capsys.readouterr() == ("", "")


def test_chunk_sizes_add_up_to_corpus_size(corpus, tmp_path):
    files = open_corpus(config(corpus, tmp_path).data)
    assert sum(chunk.size for chunk in files.chunks()) == files.size() == (tmp_path / "a.jsonl").stat().st_size


def test_tokenising_on_a_terminal_shows_a_bar(monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100, legacy_windows=False)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    with progress_on_stderr("tokenising", 3_000_000) as advance:
        advance(1_000_000, 250_000)
        advance(1_000_000, 250_000)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert "tokenising  0.0 of 3.0 MB" in shown
    assert re.search(r"tokenising  2\.0 of 2\.0 MB ━+ 500,000 tokens  [\d,]+ tokens/s  left 0:00:00", shown)


def test_a_terminal_that_was_closed_does_not_end_the_work(monkeypatch):
    def closed(*args, **kwargs):
        raise OSError("Input/output error")

    monkeypatch.setattr(progress.ProgressDisplay, "note", closed)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with progress_on_stderr("tokenising", 10) as advance:
        advance(10, 3)


def test_time_left_ignores_reused_work():
    state = TextProgress(total=100, done=60, reused=40, started=time.monotonic() - 10)
    assert state.seconds_left == pytest.approx(20, rel=0.01)  # 20 bytes took 10 s, 40 are left
    assert TextProgress(total=100, done=40, reused=40).seconds_left is None


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (90, "tokenising  10.0 of 40.0 MB|1,000,000 tokens  100,000 tokens/s  left 0:00:30"),
        (70, "tokenising  10.0 of 40.0 MB|100,000 tokens/s  left 0:00:30"),
        (50, "tokenising  10.0 of 40.0 MB|left 0:00:30"),
        (40, "tokenising  25 %|left 0:00:30"),
        (25, "tokenising  25 %|"),
        (10, "25 %|"),
    ],
)
def test_narrow_terminal_keeps_time_left(width, line, monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 110.0)  # a loaded machine must not change the rate
    state = TextProgress(40_000_000, 10_000_000, 0, 1_000_000, started=100.0)
    before, behind = state.fitting("tokenising  ", width)
    assert f"{before}|{behind}" == line


def test_the_bar_is_one_line_of_a_narrow_terminal(monkeypatch):
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=50, legacy_windows=False)
    monkeypatch.setattr(progress, "Console", lambda stderr: terminal)
    with progress_on_stderr("training the tokenizer", 31_500_000) as advance:
        advance(10_000_000, 0)
        advance(10_000_000, 0)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue()).replace("\r", "\n")
    assert "…" not in shown and "left 0:00:00" in shown
    assert all(len(line) <= 50 for line in shown.splitlines())


def test_work_of_unknown_length_prints_elapsed_time(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.01)
    with progress.elapsed_on_stderr("building 300 tokens") as begin:
        assert capsys.readouterr().err == ""
        begin()
        wait_for(lambda: re.fullmatch(r"building 300 tokens: 0 s so far\n", capsys.readouterr().err), "the line")
    with progress.elapsed_on_stderr("never begun"):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_tokenizer_training_prints_elapsed_time(corpus, tmp_path, monkeypatch):
    begun = []

    @contextmanager
    def elapsed(title):
        yield lambda: begun.append(title)

    monkeypatch.setattr(tokenizer, "elapsed_on_stderr", elapsed)
    open_data(config({**corpus, "tokenizer": "bpe", "vocab_size": 300}, tmp_path))
    assert begun == ["training the tokenizer: building 300 tokens"]
