"""`python -m ndtrain.data prepare` makes the tokens that training on the corpus reads, whatever happens on the way."""

import io
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rich.console import Console

from ndtrain.config import Config, ConfigError, DataConfig, to_config
from ndtrain.data import __main__ as command
from ndtrain.data import open_data, progress, tokenizer
from ndtrain.data import prepare as prepare_module
from ndtrain.data.cache import sampled_digest
from ndtrain.data.claims import Claims
from ndtrain.data.corpora import open_corpus
from ndtrain.data.manifest import Manifest, Plan, open_manifest, read_plan, write_json
from ndtrain.data.prepare import prepare
from ndtrain.data.progress import ProgressDisplay, TextProgress
from ndtrain.data.shards import Shard, partition
from ndtrain.data.store import content_hash
from ndtrain.data.workers import WorkerDied
from ndtrain.device.process_owner import Owner
from tests.lib import helpers, ranks
from tests.lib.helpers import WORDS, flip, one_error, processes, started, wait_for

FULL = pytest.mark.full
SHARD_BYTES = 3000  # a dozen shards or more in each corpus here
UNIT_BYTES = 1000


@pytest.fixture(scope="module", autouse=True)
def _server():
    """The server that all tests of a session fork from, loaded with what the others need, too."""
    assert ranks
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    """Shards of a few units."""
    monkeypatch.setattr(prepare_module, "UNIT_BYTES", UNIT_BYTES)


def config(tmp_path: Path, **data) -> Config:
    data = {"cache": str(tmp_path / "cache"), "tokenizer": "byte", "validation": 0.2, "vocab_size": 400, **data}
    return to_config(OmegaConf.create({"data": data, "model": {"vocab_size": 100_000}, "train": {"seq_len": 16}}))


def text(rng: random.Random, words: int) -> str:
    return " ".join(
        rng.choices([*WORDS, "<|endoftext|>", "Ünal", "狐", "def f(x):\n    return", "x_1 +=", "\r\n"], k=words)
    )


def write_files(root: Path, suffix: str, count: int = 60) -> Path:
    """A tree of small texts, of which some are empty and one is as large as several parts."""
    rng = random.Random(suffix)
    for n in range(count):
        path = root / "abc"[n % 3] / f"{n:03}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if n % 11 == 5 else text(rng, 3000 if n == 7 else rng.randrange(1, 200)), "utf-8")
    return root


def write_lines(root: Path) -> Path:
    """A JSONL file of many parts and two small ones. Lines are empty, blank, long, end in CRLF or not at all."""
    rng = random.Random(0)
    root.mkdir()
    lines = [json.dumps({"id": n, "body": text(rng, rng.randrange(80))}, ensure_ascii=n % 2 == 0) for n in range(150)]
    lines[20:20] = ["", "   ", json.dumps({"body": ""}), json.dumps({"body": text(rng, 4000)}) + "\r"]
    (root / "big.jsonl").write_text("\n".join(lines), "utf-8")
    (root / "a.jsonl").write_text("\n".join(lines[:3]) + "\n", "utf-8")
    (root / "z.jsonl").write_text("\n\n" + lines[4], "utf-8")
    return root


def python_tree(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources that stand in for the standard library's."""
    write_files(root, ".py")
    (root / "latin.py").write_bytes("# é".encode("latin-1"))
    (root / "site-packages").mkdir()
    (root / "site-packages" / "installed.py").write_text("left out")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})


@pytest.fixture(params=["text", "jsonl", "python"])
def cfg(request, tmp_path, monkeypatch) -> Config:
    """A configuration for each kind of corpus."""
    root = tmp_path / "corpus"
    if request.param == "text":
        return config(tmp_path, name="text", path=str(write_files(root, ".txt")))
    if request.param == "jsonl":
        return config(tmp_path, name="jsonl", path=str(write_lines(root)), text_key="body")
    python_tree(root, monkeypatch)
    return config(tmp_path, name="python")


@pytest.fixture
def texts(tmp_path) -> Config:
    return config(tmp_path, name="text", path=str(write_files(tmp_path / "corpus", ".txt")))


def content(out: Path) -> dict[str, bytes]:
    """Every file of a prepared folder but the lock."""
    return {p.name: p.read_bytes() for p in out.iterdir() if p.name != ".lock"}


def tokens_of(manifest: Manifest) -> dict[str, bytes]:
    """The tokens of each split, whatever its shards."""
    return {split: b"".join(path.read_bytes() for path in manifest.paths(split)) for split in manifest.files}


def shards_of(cfg: Config) -> list[Shard]:
    return partition(open_corpus(cfg.data), Plan("", "", UNIT_BYTES, SHARD_BYTES))


def open_prepared(tmp_path: Path, out: Path, **data):
    return open_data(config(tmp_path, name="bin", path=str(out), **data))


def assert_as_direct(cfg: Config, out: Path, tmp_path: Path) -> None:
    """`out` gives a training all that the corpus itself does."""
    direct, prepared = open_data(cfg), open_prepared(tmp_path, out)
    for ours, theirs in ((prepared.train, direct.train), (prepared.validation, direct.validation)):
        assert len(ours) == len(theirs) and all(np.array_equal(a[:], b[:]) for a, b in zip(ours, theirs, strict=True))
        assert all(len(a) == len(b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
    for name in ("fingerprint", "eos_id", "vocab_size"):
        assert getattr(prepared, name) == getattr(direct, name), name
    assert prepared.tokenizer.digest() == direct.tokenizer.digest()


# ----------------------------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_prepared_folder_equals_corpus_tokenised_directly(cfg, kind, tmp_path):
    cfg.data.tokenizer = kind
    out, states = tmp_path / "out", []
    manifest = prepare(
        cfg.data, out, workers=2, shard_bytes=SHARD_BYTES, on_progress=lambda state: states.append(replace(state))
    )
    assert_as_direct(cfg, out, tmp_path)
    data = open_prepared(tmp_path, out)
    assert len(data.train[0]) > 5000 and len(data.validation[0]) > 500
    for split, (array,) in {"train": data.train, "validation": data.validation}.items():
        assert manifest.tokens[split] == len(array)
        assert manifest.documents[split] == (array[:] == manifest.eos_id).sum()
    assert manifest.largest == max(data.train[0][:].max(), data.validation[0][:].max()) < manifest.vocab_size
    files = {"manifest.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(content(out)) - files == {path.name for s in ("train", "validation") for path in manifest.paths(s)}
    assert len(manifest.files["train"]) > 8 and files < set(content(out))
    assert len(states) > 10 and states[0].done == states[-1].reused == 0
    assert states[-1].done == states[-1].total == sum(shard.bytes for shard in shards_of(cfg))
    assert max(len(shard.units) for shard in shards_of(cfg)) > 2, "no shard has several units"
    assert states[-1].tokens == sum(manifest.tokens.values())


def test_prepared_tokens_do_not_depend_on_workers_or_parts(texts, tmp_path):
    whole = prepare(texts.data, tmp_path / "one", workers=1)
    for workers, shard_bytes in [(1, 500), (3, SHARD_BYTES)]:
        out = tmp_path / f"{workers}-{shard_bytes}"
        again = prepare(texts.data, out, workers, shard_bytes)
        assert again.fingerprint == whole.fingerprint and tokens_of(again) == tokens_of(whole)
    assert_as_direct(texts, out, tmp_path)


def test_a_large_vocabulary_takes_four_bytes_a_token(texts, tmp_path):
    vocab = tokenizer._byte_vocab()
    large = tokenizer._byte_level(vocab | {f"filler {n}": len(vocab) + n for n in range(1 << 16)})
    large.save(str(tmp_path / "tokenizer.json"))
    texts.data.tokenizer = str(tmp_path / "tokenizer.json")
    manifest = prepare(texts.data, tmp_path / "out", workers=2, shard_bytes=SHARD_BYTES)
    assert manifest.dtype == "uint32" and len(tokens_of(manifest)["train"]) == 4 * manifest.tokens["train"]
    assert_as_direct(texts, tmp_path / "out", tmp_path)


def test_without_held_out_documents_there_is_no_validation(texts, tmp_path):
    texts.data.validation = 0.0
    manifest = prepare(texts.data, tmp_path / "out", workers=2, shard_bytes=SHARD_BYTES)
    assert manifest.tokens["validation"] == 0 and open_prepared(tmp_path, tmp_path / "out").validation == ()
    assert_as_direct(texts, tmp_path / "out", tmp_path)


def test_prepare_uses_tokenizer_of_prepared_folder(texts, tmp_path):
    texts.data.tokenizer = "bpe"
    first = prepare(texts.data, tmp_path / "first", workers=2, shard_bytes=SHARD_BYTES)
    lines = config(tmp_path, name="jsonl", path=str(write_lines(tmp_path / "lines")), text_key="body")
    lines.data.tokenizer = str(tmp_path / "first")
    assert prepare(lines.data, tmp_path / "second", workers=2, shard_bytes=SHARD_BYTES).tokenizer == first.tokenizer
    assert_as_direct(lines, tmp_path / "second", tmp_path)


def test_prepare_reads_datasets_corpus(tmp_path):
    pytest.importorskip("datasets")
    root = write_lines(tmp_path / "corpus")
    cfg = config(tmp_path, name="hf", path=str(root / "a.jsonl"), text_key="body", validation=0.0)
    prepare(cfg.data, tmp_path / "out", workers=2, shard_bytes=100)
    assert_as_direct(cfg, tmp_path / "out", tmp_path)


LINE = st.one_of(
    st.just(""), st.just(" \t"), st.text(max_size=12).map(lambda s: json.dumps({"text": s}, ensure_ascii=False))
)


@given(st.lists(st.lists(LINE, max_size=12), min_size=1, max_size=4), st.booleans(), st.integers(1, 80))
@settings(max_examples=200)
def test_partition_chunks_equal_corpus_chunks(files, ended, size):
    with tempfile.TemporaryDirectory() as folder:
        for n, lines in enumerate(files):
            Path(folder, f"{n}.jsonl").write_bytes(("\n".join(lines) + "\n" * ended).encode("utf-8", "surrogatepass"))
        corpus = open_corpus(DataConfig(name="jsonl", path=folder, validation=0.4))
        partition = list(corpus.partition(size))
        assert sum(length for _, length in partition) == sum(p.stat().st_size for p in Path(folder).iterdir())
        chunks = [chunk for part, _ in pickle.loads(pickle.dumps(partition)) for chunk in part.chunks()]
        assert chunks == list(corpus.chunks())


# ----------------------------------------------------------------------------------------------- stopping and going on


def stop_after(parts: int):
    """An `on_progress` that stops the preparation once so many parts are made."""
    calls = itertools.count()

    def on_progress(state: TextProgress) -> None:
        if next(calls) == parts:
            raise KeyboardInterrupt

    return on_progress


def stopped(cfg: Config, out: Path, parts: int = 20) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(cfg.data, out, workers=2, shard_bytes=SHARD_BYTES, on_progress=stop_after(parts))
    assert not multiprocessing.active_children()


def finished(cfg: Config, out: Path) -> tuple[TextProgress, list[str]]:
    """The last progress of a preparation that goes to its end, and what it said."""
    states, notes = [], []
    prepare(cfg.data, out, workers=2, shard_bytes=SHARD_BYTES, on_progress=states.append, note=notes.append)
    return (states[-1] if states else None), notes


def records(out: Path) -> dict[Path, int]:
    """The records of shards that are made -> when they were written."""
    return {p: p.stat().st_mtime_ns for p in out.glob("work/*.json")}


def shards_made(out: Path) -> int:
    """As `records`, while another process adds and removes them."""
    try:
        return sum(name.endswith(".json") for name in os.listdir(out / "work"))
    except FileNotFoundError:
        return 0


def size_of_records(cfg: Config, out: Path, but: int | None = None) -> int:
    """Bytes of text in the shards that are made, but one."""
    sizes = [shard.bytes for shard in shards_of(cfg)]
    return sum(sizes[n] for n in {int(path.stem) for path in records(out)} - {but})


def test_stopped_preparation_resumes_where_it_stopped(cfg, tmp_path):
    prepare(cfg.data, tmp_path / "whole", workers=2, shard_bytes=SHARD_BYTES)
    out = tmp_path / "out"
    for parts in (2, 9):
        stopped(cfg, out, parts)
        with pytest.raises(ConfigError, match=r"data.path=.*/out: its preparation is not finished: run the same"):
            open_prepared(tmp_path, out)
    reused = size_of_records(cfg, out)
    state, notes = finished(cfg, out)
    assert 0 < state.reused == reused < state.total and state.tokens > 0
    assert notes[0] == f"out={out}: resuming where it stopped"
    assert content(out) == content(tmp_path / "whole")


def test_finished_folder_is_not_prepared_again(texts, tmp_path):
    out = tmp_path / "out"
    prepare(texts.data, out, workers=2, shard_bytes=SHARD_BYTES)
    times = {p: p.stat().st_mtime_ns for p in out.iterdir() if p.name != ".lock"}
    assert finished(texts, out) == (None, [f"out={out}: already prepared"])
    assert all(p.stat().st_mtime_ns == at for p, at in times.items())


def change_a_file(cfg: Config) -> None:
    path = next(Path(cfg.data.path).rglob("*.txt"))
    path.write_text("changed")


@pytest.mark.parametrize("was_finished", [False, True])
def test_changed_corpus_starts_preparation_over(was_finished, texts, tmp_path):
    out = tmp_path / "out"
    (finished if was_finished else stopped)(texts, out)
    change_a_file(texts)
    state, notes = finished(texts, out)
    assert notes[0] == f"out={out}: the corpus changed: starting over" and state.reused == 0
    assert_as_direct(texts, out, tmp_path)
    prepare(texts.data, tmp_path / "whole", workers=2, shard_bytes=SHARD_BYTES)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("was_finished", [False, True])
def test_folder_of_other_tokenizer_is_refused_and_unchanged(was_finished, texts, tmp_path):
    out = tmp_path / "out"
    (finished if was_finished else stopped)(texts, out)
    before = records(out) if not was_finished else content(out)
    texts.data.tokenizer = "bpe"
    held = r"[\d,]+ tokens of data.tokenizer=byte" if was_finished else r"\d+ shards? of an unfinished preparation"
    with pytest.raises(ConfigError, match=rf"out={out}: this folder holds {held}, made with another tokenizer: give"):
        finished(texts, out)
    assert before and before == (records(out) if not was_finished else content(out))
    shutil.rmtree(out)
    finished(texts, out)


def test_folder_being_prepared_again_is_not_opened(texts, tmp_path):
    out = tmp_path / "out"
    finished(texts, out)
    change_a_file(texts)
    stopped(texts, out)
    with pytest.raises(ConfigError, match="its preparation is not finished"):
        open_prepared(tmp_path, out)


def test_parts_of_earlier_plan_are_not_reused(texts, tmp_path):
    """A kill may come after the new plan is written and before the old parts are removed."""
    out = tmp_path / "out"
    stopped(texts, out)
    shutil.copytree(out / "work", tmp_path / "old")
    change_a_file(texts)
    stopped(texts, out, parts=0)
    shutil.rmtree(out / "work")
    (tmp_path / "old").rename(out / "work")
    state, notes = finished(texts, out)
    assert state.reused == 0 and notes[0].endswith("resuming where it stopped")
    assert_as_direct(texts, out, tmp_path)


def test_saving_a_tokenizer_removes_the_files_of_another(texts, tmp_path):
    out, given_folder = tmp_path / "out", tmp_path / "given"
    given_folder.mkdir()
    out.mkdir()
    tokenizer.load_tokenizer(texts.data, list, Path()).save(given_folder)
    (given_folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    texts.data.tokenizer = str(given_folder)
    tokenizer.load_tokenizer(texts.data, list, Path()).save(out)
    assert "special_tokens_map.json" in content(out)
    texts.data.tokenizer = "byte"
    tokenizer.load_tokenizer(texts.data, list, Path()).save(out)
    assert "special_tokens_map.json" not in content(out) and "tokenizer.json" in content(out)


def test_corpus_changed_during_preparation_is_not_published(texts, tmp_path):
    def on_progress(state: TextProgress) -> None:
        if state.done == state.total:
            change_a_file(texts)

    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"data.path=.*: the corpus changed while it was read: run the same command"):
        prepare(texts.data, out, workers=2, shard_bytes=SHARD_BYTES, on_progress=on_progress)
    assert not (out / "manifest.json").exists()
    assert finished(texts, out)[1][0].endswith("the corpus changed: starting over")
    assert_as_direct(texts, out, tmp_path)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [shorten, lambda path: flip(path, -9), Path.unlink], ids=["cut", "flipped", "gone"])
@pytest.mark.parametrize("file", ["train-*.bin", "work/*.json"])
def test_a_damaged_shard_is_made_again(damage, file, texts, tmp_path):
    out = tmp_path / "out"
    stopped(texts, out)
    path = next(p for p in sorted(out.glob(file)) if p.stat().st_size > 20)
    reused = size_of_records(texts, out, but=int(path.stem[-5:]))
    damage(path)
    assert finished(texts, out)[0].reused == reused > 0
    prepare(texts.data, tmp_path / "whole", workers=2, shard_bytes=SHARD_BYTES)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_damaged_folder_is_refused_and_made_again(split, texts, tmp_path):
    out = tmp_path / "out"
    file = prepare(texts.data, out, workers=2, shard_bytes=SHARD_BYTES).files[split][1].name
    sound = content(out)
    for damage, what in [
        (shorten, r"has \d+ bytes, not \d+"),
        (lambda path: flip(path, 100), "has changed since it was prepared"),
        (Path.unlink, "is missing"),
    ]:
        damage(out / file)
        with pytest.raises(ConfigError, match=rf"data.path=.*/out: {file} {what}: the folder is damaged, prepare"):
            open_prepared(tmp_path, out)
        assert re.search(f"{file} {what}: preparing it again", finished(texts, out)[1][0])
        assert content(out) == sound


@pytest.fixture
def slow(tmp_path, monkeypatch) -> tuple[list[str], Path]:
    """A command of some 150 parts that each wait for the disk, and its folder."""
    monkeypatch.setattr(helpers, "MODULE", ["-m", "ndtrain.data"])
    write_files(tmp_path / "corpus", ".txt", count=150)
    out = tmp_path / "out"
    return (
        [
            "prepare", f"out={out}", "data=text", f"data.path={tmp_path / 'corpus'}", "data.tokenizer=byte",
            "data.validation=0.1", f"data.cache={tmp_path / 'cache'}", "workers=2", "shard=1",
        ],
        out,
    )  # fmt: skip


@FULL
@pytest.mark.parametrize("kills", [2, 12])
def test_kills_at_random_moments_do_not_change_result(kills, slow, tmp_path):
    args, out = slow
    moments = random.Random(kills)
    undisturbed, in_time = tmp_path / "undisturbed", 0
    assert command.main([*args, f"out={undisturbed}"]) == 0
    for last in [*(moments.randrange(1, 120 // kills) for _ in range(kills)), None]:
        before = records(out)
        with started(args, tmp_path) as process:

            def due(last=last, before=before, process=process) -> bool:
                reached = (out / "manifest.json").exists() if last is None else shards_made(out) >= len(before) + last
                return reached or process.poll() is not None

            wait_for(due, "the moment to kill")
            time.sleep(0 if last is None else moments.uniform(0, 0.02))
            in_time += process.poll() is None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            wait_for(lambda: not processes(tmp_path), "the end of every process")
        if last is not None:
            assert before.items() <= records(out).items(), "a part that was whole was made again"
    assert in_time >= kills, "the kills came too late"
    assert command.main(args) == 0
    assert content(out) == content(undisturbed)


# the command on a host of this name, whose heartbeats other hosts watch for a second
ON_HOST = """
import sys
from ndtrain.device import heartbeat, process_owner
from ndtrain.data import claims
process_owner._machine = lambda: sys.argv[1]
heartbeat.BEAT_S, claims.DEAD_S, claims.POLL_S = 0.1, 1.0, 0.05
from ndtrain.data.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@contextmanager
def on_hosts(args: list[str], folders: list[Path], monkeypatch) -> Iterator[Callable[[Path], subprocess.Popen]]:
    """Yields a function that starts the command on the host of a folder."""
    monkeypatch.setattr(helpers, "MODULE", ["-c", ON_HOST])
    with ExitStack() as stack:
        for folder in folders:
            folder.mkdir()
        yield lambda folder: stack.enter_context(started([folder.name, *args], folder))


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=FULL), pytest.param(8, marks=FULL)])
def test_hosts_killed_at_random_make_bytes_of_one_host(workers, slow, tmp_path, monkeypatch):
    args, out = slow
    moments, undisturbed = random.Random(workers), tmp_path / "undisturbed"
    assert command.main([*args, f"out={undisturbed}", "workers=1"]) == 0
    hosts = [tmp_path / "a", tmp_path / "b"]
    running: dict[Path, subprocess.Popen] = {}
    with on_hosts([*args, f"workers={workers}"], hosts, monkeypatch) as start:
        for _ in range(6):
            running |= {host: start(host) for host in hosts if host not in running}
            due = shards_made(out) + moments.randrange(1, 25)
            wait_for(lambda due=due: shards_made(out) >= due, "the moment to kill")
            time.sleep(moments.uniform(0, 0.02))
            host = moments.choice(hosts)
            process = running.pop(host)
            assert process.poll() is None, "the kill came too late"
            os.killpg(process.pid, signal.SIGKILL)
            wait_for(lambda host=host: not processes(host), "the end of every process")
        running |= {host: start(host) for host in hosts if host not in running}
        said = [process.communicate(timeout=60) for process in running.values()]
    assert [process.returncode for process in running.values()] == [0, 0], said
    assert content(out) == content(undisturbed)


@FULL
def test_hosts_share_shards_and_both_return(slow, tmp_path, monkeypatch):
    args, out = slow
    (tmp_path / "corpus" / "c" / "last.txt").write_text("the quick brown fox\n" * 500_000)  # seconds
    hosts = [tmp_path / "a", tmp_path / "b"]
    with on_hosts(args, hosts, monkeypatch) as start:
        first = start(hosts[0])
        wait_for(lambda: shards_made(out) >= 5, "some shards")
        second = start(hosts[1])
        said = [process.communicate(timeout=60)[0].splitlines() for process in (first, second)]
    assert said[1][1].endswith("workers, shared with 1 other process") and "shared" not in said[0][0]
    assert said[0][-1].partition("; uint16")[0] == said[1][-1].partition("; uint16")[0]
    assert not (out / "work").exists() and not list(out.glob("*.tmp"))


def test_folder_prepared_by_live_process_is_not_started_over(texts, tmp_path):
    out = tmp_path / "out"
    stopped(texts, out)
    change_a_file(texts)
    with (
        Claims(out / "work"),
        pytest.raises(ConfigError, match=r"pid \d+ .* is preparing this folder from other inputs \(the corpus chan"),
    ):
        finished(texts, out)
    assert finished(texts, out)[1][0].endswith("the corpus changed: starting over")
    assert_as_direct(texts, out, tmp_path)


def test_process_whose_folder_was_started_over_writes_nothing_more(texts, tmp_path):
    """It was paused for so long that another one took the folder."""
    out = tmp_path / "out"

    def on_progress(state: TextProgress) -> None:
        if state.done and read_plan(out, "").corpus != "other":
            write_json(out / "plan.json", {**asdict(read_plan(out, "")), "corpus": "other"})

    with pytest.raises(ConfigError, match="another process has started this folder over"):
        prepare(texts.data, out, workers=2, shard_bytes=SHARD_BYTES, on_progress=on_progress)
    assert not list(out.glob("*.bin*")) and not records(out)


def test_process_that_wakes_when_another_has_finished_returns_the_manifest(texts, tmp_path):
    """It was paused in the middle of a shard, which the other one has made."""
    out, done = tmp_path / "out", []

    def on_progress(state: TextProgress) -> None:
        if state.done and not done:
            monkeypatch.setattr("ndtrain.data.claims.Claims._is_gone", lambda claims, token: True)
            done.append(prepare(texts.data, out, workers=1, shard_bytes=SHARD_BYTES))

    with pytest.MonkeyPatch.context() as monkeypatch:
        assert prepare(texts.data, out, workers=2, shard_bytes=SHARD_BYTES, on_progress=on_progress) == done[0]
    assert_as_direct(texts, out, tmp_path)
    assert not list(out.glob("*.tmp")) and not (out / "work").exists()


def test_folder_of_format_1_is_read_and_not_prepared_again(texts, tmp_path):
    out = tmp_path / "out"
    manifest = prepare(texts.data, out, workers=2, shard_bytes=SHARD_BYTES)
    record, files = json.loads((out / "manifest.json").read_text()), {}
    for split, tokens in tokens_of(manifest).items():
        for path in manifest.paths(split):
            path.unlink()
        (out / f"{split}.bin").write_bytes(tokens)
        spot = sampled_digest(out / f"{split}.bin")
        files[split] = {"blake2b": content_hash(tokens).hexdigest(), "spot": spot}
    old = {name: value for name, value in record.items() if name not in ("samples", "digest")}
    plan = {name: value for name, value in record["plan"].items() if name != "shard"}
    write_json(out / "manifest.json", old | {"format": 1, "files": files, "plan": plan | {"format": 1}})
    assert_as_direct(texts, out, tmp_path)
    assert finished(texts, out) == (None, [f"out={out}: already prepared"])
    flip(out / "train.bin", 100)
    assert "train.bin has changed since it was prepared: preparing it again" in finished(texts, out)[1][0]
    assert (
        tokens_of(open_manifest(DataConfig(name="bin", path=str(out)))) == tokens_of(manifest)
        and not (out / "train.bin").exists()
    )


def test_manifest_that_names_other_files_is_refused(texts, tmp_path):
    out = tmp_path / "out"
    prepare(texts.data, out, workers=2, shard_bytes=SHARD_BYTES)
    record = json.loads((out / "manifest.json").read_text())
    record["files"]["train"][0]["name"] = "../out/train-00000.bin"
    write_json(out / "manifest.json", {name: value for name, value in record.items() if name != "digest"})
    with pytest.raises(ConfigError, match=r"manifest.json there names a file '../out/train-00000.bin'"):
        open_prepared(tmp_path, out)


def test_workers_end_with_their_parent(slow, tmp_path):
    args, out = slow
    for n in range(2):  # two parts of many seconds
        (tmp_path / "corpus" / f"0{n}.txt").write_text("the quick brown fox\n" * 3_000_000)
    with started(args, tmp_path) as process:
        wait_for(lambda: list(out.glob("train-*.tmp")), "the workers to begin")
        assert len(processes(tmp_path)) >= 4  # the command, the server it forks from, two workers
        os.kill(process.pid, signal.SIGKILL)
        wait_for(lambda: not processes(tmp_path), "the end of every process", timeout=3)
    assert shards_made(out) == 0, "a shard was over before"


@pytest.mark.parametrize("parts", [pytest.param(0, marks=FULL), 20])
def test_ctrl_c_stops_preparation_which_then_resumes(parts, slow, tmp_path):
    args, out = slow
    with started(args, tmp_path) as process:
        wait_for(lambda: (out / "work").exists() and shards_made(out) >= parts, "some parts", pause=0)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to every process at once
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130
        assert re.fullmatch(
            rf"stopped( at .* of .* MB)?: {out} keeps the finished shards, run the same command again .*\n", said
        )
        assert not processes(tmp_path), "a process is left"
    assert shards_made(out) >= parts
    assert command.main(args) == 0
    corpus = config(tmp_path, name="text", path=str(tmp_path / "corpus"), validation=0.1)
    assert_as_direct(corpus, out, tmp_path)


@pytest.mark.parametrize("file", ["train-00009.bin.{}.tmp", "work/00009.json.{}.tmp", "manifest.json.tmp"])
def test_full_disk_is_one_line_error_and_keeps_shards(file, texts, tmp_path, monkeypatch, capsys):
    out, me = tmp_path / "out", replace(Owner.this_process(), token="a" * 32)
    monkeypatch.setattr(command, "parse", lambda args: command.Options(out, 2, SHARD_BYTES, texts.data))
    stopped(texts, out)
    full, show = out / file.format(me.token), ProgressDisplay.show

    def fill(display: ProgressDisplay, state: TextProgress) -> None:
        if not full.is_symlink():
            full.symlink_to("/dev/full")  # the kernel's own "no space left"
        show(display, state)

    done = shards_made(out)
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "this_process", lambda: me)
        patch.setattr(ProgressDisplay, "show", fill)
        assert command.main(["prepare"]) == 1
    said = one_error(capsys.readouterr().err)
    assert said == f"No space left on device: {out} keeps the finished shards, run the same command again to go on"
    assert shards_made(out) >= done and not multiprocessing.active_children()
    assert finished(texts, out)[0].reused > 0
    prepare(texts.data, tmp_path / "whole", workers=2, shard_bytes=SHARD_BYTES)
    assert content(out) == content(tmp_path / "whole")


def test_tokenizer_training_runs_outside_main_thread():
    assert prepare_module._interruptible(threading.current_thread) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        prepare_module._interruptible(lambda: 1 // 0)


def test_killed_worker_is_reported(texts, tmp_path):
    def on_progress(state: TextProgress) -> None:
        for process in multiprocessing.active_children():
            os.kill(process.pid, signal.SIGKILL)

    stopped(texts, tmp_path / "out")
    with pytest.raises(WorkerDied, match=r"a worker process ended by SIGKILL; if memory is short, give fewer workers"):
        prepare(texts.data, tmp_path / "out", workers=2, shard_bytes=SHARD_BYTES, on_progress=on_progress)
    assert not multiprocessing.active_children()
    assert finished(texts, tmp_path / "out")[0].reused > 0


# -------------------------------------------------------------------------------------------------------- the command


def test_prepare_command_prints_progress_and_result(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    args = [
        "prepare", f"out={tmp_path / 'out'}", "data=text", f"data.path={texts.data.path}", "data.tokenizer=bpe",
        "data.vocab_size=300", "data.validation=0.2", f"data.cache={tmp_path / 'cache'}", "workers=2",
        f"shard={SHARD_BYTES}",
    ]  # fmt: skip
    assert command.main(args) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    shards = shards_of(texts)
    units = sum(len(shard.units) for shard in shards)
    assert re.fullmatch(rf"data.path=.*: 60 files in .*: {units} units in {len(shards)} shards for 2 workers", first)
    assert len(lines) == units + 1
    assert re.fullmatch(r"0\.\d of 0\.\d MB  [\d,]+ tokens  [\d,]+ tokens/s  left 0:00:0\d", lines[-1])
    manifest = open_manifest(DataConfig(name="bin", path=str(tmp_path / "out")))
    words = rf".*/out: {manifest.tokens['train']:,} training tokens of {manifest.documents['train']} documents; "
    words += rf"{manifest.tokens['validation']:,} validation tokens of {manifest.documents['validation']} documents; "
    assert re.fullmatch(words + r"uint16, vocabulary 300; \d+\.\d s, [\d,]+ tokens/s", last)
    assert command.main(args) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[0].endswith("out: already prepared") and again[1] == last.rpartition(";")[0]


def test_progress_on_terminal_is_a_bar():
    screen = io.StringIO()
    display = ProgressDisplay(Console(file=screen, force_terminal=True, width=100, legacy_windows=False))
    state = TextProgress(total=2_000_000)
    display.show(state)
    state.done, state.tokens = 1_000_000, 250_000
    display.show(state)
    display.note("a line [with brackets]")
    display.close()
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert "1.0 of 2.0 MB ━" in shown and "250,000 tokens" in shown and "left 0:00:0" in shown
    assert "a line [with brackets]" in shown and display.location() == " at 1.0 of 2.0 MB"


def test_help_lists_every_key(capsys):
    assert command.main(["prepare", "--help"]) == 0 and command.main([]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {key}" in shown or f", {key}" in shown for key in command.KEYS)
    assert "(default: a 64th of the corpus, 256 KiB to 256 MiB" in shown and "(default: 0.02)" in shown


# command line, from the folder of `place` -> what it is refused with
REFUSALS = {
    "tokens/": "tokens/: arguments are key=value",
    "worker=2": "worker: no such key; did you mean 'workers'",
    "data.pth=x": "data.pth: no such key; did you mean 'data.path'",
    "data.shuffle=false": "data.shuffle: not used by prepare: give it to the training run; known: out",
    "data=python": "out is missing: give the folder to create",
    "out=s3://b/o": "out=s3://b/o: is not a folder of a file system: give one, and upload it",
    "out=o data=text data.path=s3://b/texts": "data.path=s3://b/texts: only prepared tokens are read from an object st",
    "out=o workers=0": "workers=0: must be a whole number, at least 1",
    "out=o workers=two": "workers=two: must be a whole number",
    "out=o shard=-1": "shard=-1: must be a whole number, at least 1",
    "out=o data=txt": "data=txt: no such data; did you mean 'text'",
    "out=o data=bin": "data=bin: cannot be prepared; supported: python, text",
    "out=o data=blend": "data=blend: cannot be prepared; supported: .*; prepare the corpora of a blend one at a time",
    "out=o data=text": "data.path is missing: data=text needs it",
    "out=o data=text data.path=no": "data.path=no: no such file or folder",
    "out=o data=text data.path=notes.txt data.tokenizer=no": "data.tokenizer=no: no such file",
    "out=o data=text data.path=notes.txt data.validation=2": r"data.validation=2.0: must be in \[0, 1\)",
    "out=notes.txt data=text data.path=notes.txt": r"out=notes.txt: cannot be written \(it is a file\): give a",
    "out=notes.txt/o data=text data.path=notes.txt": r"out=notes.txt/o: cannot be written \(Not a directory\)",
    "out=. data=text data.path=notes.txt": r"out=.: this folder holds other files \(app, bad.jsonl, empty and 1",
    "out=app data=text data.path=notes.txt": "out=app: manifest.json there is damaged or from another program",
    "out=o data=text data.path=empty": "data.path=empty: nothing to train on, no document has any text",
    "out=o data=text data.path=notes.txt data.validation=0.99999": "data.path=notes.txt: nothing to train on, every",
    "out=o data=jsonl data.path=bad.jsonl shard=100": "data.path: .*bad.jsonl:31: not a JSON object",
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The working directory, with files of the user's."""
    (tmp_path / "notes.txt").write_text("the user's")
    (tmp_path / "empty").touch()
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n' * 30 + '{"text": \n' + '{"text": "fine"}\n' * 30)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "an app"}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", REFUSALS)
def test_bad_arguments_are_refused_and_change_nothing(line, place, capsys):
    before = {p.name: p.read_bytes() for p in place.iterdir() if p.is_file()}
    code = command.main(["prepare", "data.tokenizer=byte", "workers=2", *line.split()])
    assert re.match(REFUSALS[line], one_error(capsys.readouterr().err)) and code == 2
    assert {p.name: p.read_bytes() for p in place.iterdir() if p.is_file()} == before
    assert not multiprocessing.active_children()


def test_unknown_command_names_near_miss(capsys):
    assert command.main(["prepar", "out=o"]) == 2
    assert one_error(capsys.readouterr().err).startswith("prepar: no such command; did you mean 'prepare'")


def test_open_prepared_refuses_keys_against_manifest(texts, tmp_path):
    out = tmp_path / "out"
    prepare(texts.data, out, workers=2, shard_bytes=SHARD_BYTES)
    assert open_prepared(tmp_path, out, eos_id=256, dtype="uint16").eos_id == 256
    for key, value, fact in [
        ("eos_id", 3, r"documents of .*/out end with 256 according to its manifest.json: set the key to null"),
        ("dtype", "uint32", r"the tokens of .*/out are uint16 according to its manifest.json: set the key to uint16"),
        ("validation_path", "x.bin", ".*/out has a validation split of its own according to .*: set the key to null"),
    ]:
        with pytest.raises(ConfigError, match=f"data.{key}={value}: {fact}"):
            open_prepared(tmp_path, out, **{key: value})
    flip(out / "manifest.json", 40)
    with pytest.raises(ConfigError, match=r"data.path=.*/out: manifest.json there is damaged or from another program"):
        open_prepared(tmp_path, out)


def test_command_and_workers_import_no_torch():
    code = "import sys, ndtrain.data.__main__, ndtrain.data.workers; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
