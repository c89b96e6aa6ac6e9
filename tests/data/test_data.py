"""Corpora, tokenizers, the cache, and the batch as a pure function of (seed, step)."""

import fcntl
import io
import itertools
import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from ndtrain.config import ConfigError, to_config
from ndtrain.config.batch_sizes import BatchSizes
from ndtrain.data import (
    Batch,
    Prefetcher,
    Sequences,
    cache,
    corpora,
    microbatches,
    open_data,
    rows_of,
    store,
    tokenizer,
)
from ndtrain.data.documents import text_chunks
from ndtrain.data.token_array import Packing
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.sequence_sharding import BALANCES, SequenceSharding
from ndtrain.model.vocabulary import IGNORE
from ndtrain.train import main
from tests.lib.helpers import arguments

TEXT = "The quick brown fox, who is called Ünal 狐, jumps over\n\n    the lazy dog's 1234 bones.\n"


def config(data: dict, tmp_path: Path, vocab_size: int = 300, seq_len: int = 16):
    return to_config(
        OmegaConf.create(
            {
                "data": {"cache": str(tmp_path / "cache"), "tokenizer": "byte", "validation": 0.0, **data},
                "model": {"vocab_size": vocab_size},
                "train": {"seq_len": seq_len},
            }
        )
    )


@pytest.fixture
def folder(tmp_path):
    """A corpus of 60 small files in two folders, and files that are to be left out."""
    root = tmp_path / "corpus"
    for n in range(60):
        path = root / ("ab"[n % 2]) / f"{n:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Document {n}. " + TEXT * (1 + n % 3), encoding="utf-8")
    (root / "empty.txt").touch()
    (root / ".hidden").write_bytes(b"\xff")
    return root


@pytest.fixture
def builds(caplog):
    """A function that counts how often this process has tokenised a corpus."""
    caplog.set_level(logging.INFO, store.__name__)
    return lambda: sum(r.message.startswith("tokenising") for r in caplog.records)


def documents(data) -> list[str]:
    """The texts of the training split, divided at the end-of-text token."""
    ids = np.split(data.train[0], np.flatnonzero(data.train[0] == data.tokenizer.eos_id) + 1)
    assert ids.pop().size == 0  # the last document ends, too
    return [data.tokenizer.decode(doc[:-1].tolist()) for doc in ids]


# ---------------------------------------------------------------------------------------------------------- sequences


def sequences(count=10, seq_len=4, global_batch=6, seed=0, shuffle=True) -> Sequences:
    return Sequences(np.arange(count * seq_len + 1), seq_len, BatchSizes(global_batch), seed, shuffle)


@given(count=st.integers(1, 3000), epoch=st.integers(0, 10**6), seed=st.integers(0, 2**63))
@settings(max_examples=100)
def test_each_epoch_visits_each_sequence_once(count, epoch, seed):
    sampled = sequences(count, seq_len=1, global_batch=count, seed=seed)
    visited = sampled.tokens(epoch, range(count))[:, 0]
    assert np.array_equal(np.sort(visited), np.arange(count))


def test_shuffle_differs_between_epochs_and_seeds():
    orders = {
        tuple(sequences(50, 1, 50, seed).tokens(epoch, range(50))[:, 0]) for seed in range(20) for epoch in range(20)
    }
    assert len(orders) == 400


def test_shuffle_is_uniform_over_positions():
    sampled = sequences(7, seq_len=1, global_batch=7)
    orders = np.stack([sampled.tokens(epoch, range(7))[:, 0] for epoch in range(3500)])
    hits = np.stack([np.bincount(column, minlength=7) for column in orders.T])
    assert abs(hits - 500).max() < 5 * np.sqrt(500)


def test_shuffle_needs_no_index_of_a_huge_corpus():
    tokens = np.broadcast_to(np.uint16(7), (10**15,))
    sampled = Sequences(tokens, seq_len=1, batch_sizes=BatchSizes(8), seed=3, shuffle=True)
    assert sampled.count == 10**15 - 1
    assert len({sampled.index(10**12, i) for i in range(8)}) == 8


@given(
    step=st.integers(0, 10**9),
    rows=st.lists(st.integers(0, 5), min_size=1),
    seed=st.integers(0, 99),
    flag=st.booleans(),
)
def test_rows_depend_only_on_seed_and_step(step, rows, seed, flag):
    whole = sequences(seed=seed, shuffle=flag).tokens(step, range(6))
    other = sequences(seed=seed, shuffle=flag)
    other.tokens(step // 2, range(3))  # what was asked before plays no part
    assert np.array_equal(other.tokens(step, rows), whole[rows])
    assert [other.index(step, i) for i in rows] == list(whole[rows, 0] // 4)


@given(
    replicas=st.sampled_from([1, 2, 3, 4, 6, 12]), micro=st.sampled_from([1, 2, 3, 4, 6, 12]), step=st.integers(0, 99)
)
def test_replicas_and_microbatches_make_up_the_global_batch(replicas, micro, step):
    sampled = sequences(count=31, global_batch=12)
    per_replica = 12 // replicas
    if per_replica % micro:
        with pytest.raises(ValueError, match="do not divide"):
            microbatches(sampled, step, rows_of(0, replicas, 12), micro)
        return
    batches = [b for r in range(replicas) for b in microbatches(sampled, step, rows_of(r, replicas, 12), micro)]
    assert {tuple(b.tokens.shape) for b in batches} == {(micro, 4)}
    whole = sampled.tokens(step, range(12))
    assert torch.equal(torch.cat([b.tokens for b in batches]), torch.from_numpy(whole[:, :-1]))
    assert torch.equal(torch.cat([b.labels for b in batches]), torch.from_numpy(whole[:, 1:]))


def test_rows_of_refuses_indivisible_or_outside_rows():
    with pytest.raises(ValueError, match="not a multiple of 4 replicas"):
        rows_of(0, 4, 6)
    with pytest.raises(IndexError):
        sequences().tokens(0, [6])
    with pytest.raises(ValueError, match="fewer than one sequence"):
        Sequences(np.arange(4), 4, BatchSizes(1), 0, False)
    assert [Sequences(np.arange(n), 4, BatchSizes(1), 0, False).count for n in (5, 8, 9)] == [1, 1, 2]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_file_without_shuffle_has_the_documented_layout(tmp_path, dtype):
    length, batch, count = 8, 3, 7
    ids = np.random.default_rng(0).integers(0, 300, count * length + 5)  # 5: a rest too short for a sequence
    ids.astype("<u2" if dtype == "uint16" else "<u4").tofile(tmp_path / "tokens.bin")
    data = open_data(config({"name": "bin", "path": str(tmp_path / "tokens.bin"), "dtype": dtype}, tmp_path))
    assert np.array_equal(data.train[0], ids) and not data.validation
    assert data.tokenizer is None and data.vocab_size == ids.max() + 1
    sampled = Sequences(data.train[0], length, BatchSizes(batch), seed=5, shuffle=False)
    assert sampled.count == count
    for step in range(8):  # more than three epochs
        for i, row in enumerate(sampled.tokens(step, range(batch))):
            k = (step * batch + i) % count
            assert row.tolist() == ids[k * length : k * length + length + 1].tolist()


# ------------------------------------------------------------------------------------------------ packing and sharding

EOS = 0


SHARDINGS = [
    SequenceSharding(12, ring, ulysses, balance)
    for balance in BALANCES
    for ring, ulysses in [(1, 1), (2, 1), (3, 1), (1, 2), (1, 6), (2, 2), (2, 3), (3, 2)]
]


def concatenated(batches: list[Batch]) -> Batch:
    """One batch with all rows."""
    for b in batches:
        assert b.labels.shape == b.tokens.shape
        assert b.positions is None or b.positions.shape in (b.tokens.shape, b.tokens.shape[1:])
        assert b.documents is None or len(b.documents) == len(b.tokens)
    join = lambda name: torch.cat([getattr(b, name) for b in batches])
    rows = None if batches[0].documents is None else sum((b.documents for b in batches), ())
    same = batches[0].positions is None or batches[0].positions.dim() == 1
    return Batch(join("tokens"), join("labels"), batches[0].positions if same else join("positions"), rows)


def put_together(parts: list[Batch], indices: list[np.ndarray]) -> Batch:
    """The whole batch from the batches of all parts of a sharding."""
    order = torch.from_numpy(np.argsort(np.concatenate(indices)))
    join = lambda name: torch.cat([getattr(b, name) for b in parts], dim=-1)[..., order]
    assert len({b.documents for b in parts}) == 1
    return Batch(join("tokens"), join("labels"), join("positions"), parts[0].documents)


def assert_equal(one: Batch, other: Batch) -> None:
    for name in ("tokens", "labels", "positions"):
        a, b = getattr(one, name), getattr(other, name)
        assert a is b is None or (a.dtype == b.dtype == torch.int64 and torch.equal(a, b)), name
    assert one.documents == other.documents


packed_tokens = st.integers(1, 4).flatmap(
    lambda rows: st.integers(1, 12).flatmap(
        lambda length: st.tuples(
            st.just(length), st.lists(st.integers(0, 3), min_size=rows * length + 1, max_size=rows * length + 1)
        )
    )
)


def test_packed_rows_equal_worked_example():
    ids = np.array([5, 0, 3, 4, 0, 0, 7, 8, 0, 6, 6, 6, 6, 6, 6, 6, 0, 9, 9, 9, 9, 9, 9, 9, 9])
    (batch,) = microbatches(Sequences(ids, 8, BatchSizes(3), 0, False), 0, range(3), 3, packing=Packing(0))
    assert batch.tokens.tolist() == [ids[i : i + 8].tolist() for i in (0, 8, 16)]
    assert batch.documents == ((0, 2, 5, 6), (0, 1), (0, 1))
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 5, 6]]
    x = IGNORE
    assert batch.labels.tolist() == [[0, x, 4, 0, x, x, 8, 0], [x, 6, 6, 6, 6, 6, 6, 0], [x, 9, 9, 9, 9, 9, 9, 9]]


@given(packed_tokens, st.booleans(), st.integers(0, 9))
def test_packing_restarts_positions_and_ignores_the_label_across_a_boundary(tokens, shuffle, step):
    length, ids = tokens
    count = (len(ids) - 1) // length
    sampled = Sequences(np.array(ids, np.uint16), length, BatchSizes(count), 7, shuffle)
    packed = concatenated(microbatches(sampled, step, range(count), 1, packing=Packing(EOS)))
    for i, row in enumerate(sampled.tokens(step, range(count)).tolist()):
        starts, place = [0], 0
        for t in range(length):
            if t and row[t - 1] == EOS:
                starts.append(t)
                place = 0
            assert packed.positions[i, t] == place
            assert packed.labels[i, t] == (IGNORE if row[t] == EOS else row[t + 1])
            place += 1
        assert packed.documents[i] == tuple(starts)
        assert all(type(start) is int for start in packed.documents[i])


@given(packed_tokens, st.booleans(), st.integers(0, 9))
def test_packing_changes_neither_tokens_nor_their_order(tokens, shuffle, step):
    length, ids = tokens
    count = (len(ids) - 1) // length
    make = partial(
        microbatches, Sequences(np.array(ids), length, BatchSizes(count), 7, shuffle), step, range(count), count
    )
    (plain,), (packed,) = make(), make(packing=Packing(EOS))
    assert plain.positions is None and plain.documents is None
    assert torch.equal(plain.tokens, packed.tokens)
    assert torch.equal(plain.labels.masked_fill(plain.tokens == EOS, IGNORE), packed.labels)


@given(
    sharding=st.sampled_from(SHARDINGS),
    micro=st.sampled_from([1, 2, 4]),
    packing=st.sampled_from([None, Packing(EOS)]),
    seed=st.integers(0, 99),
)
def test_the_parts_of_a_sharding_make_up_the_batch(sharding, micro, packing, seed):
    ids = np.random.default_rng(seed).integers(0, 4, 5 * 12 + 1)
    make = partial(microbatches, Sequences(ids, 12, BatchSizes(4), seed, True), seed, range(4), micro, packing=packing)
    parts = range(sharding.parts)
    got = [make(sharding=sharding, part=p) for p in parts]
    assert {b.tokens.shape for batches in got for b in batches} == {(micro, 12 // sharding.parts)}
    assert all(x.is_contiguous() for batches in got for b in batches for x in (b.tokens, b.labels))
    whole = concatenated(make())
    if sharding.parts == 1:  # nothing is sharded
        assert_equal(concatenated(got[0]), whole)
        return
    if packing is None:
        whole = replace(whole, positions=torch.arange(12))
    assert_equal(put_together([concatenated(b) for b in got], [sharding.index(p) for p in parts]), whole)


def test_a_sharding_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a sharding of 8 tokens does not fit sequences of 4"):
        microbatches(sequences(seq_len=4), 0, range(2), 1, SequenceSharding(8, 2), 0)


@pytest.mark.parametrize("change", [lambda b: b.to(torch.device("meta")), Batch.pin])
def test_moved_batch_keeps_every_field(change, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x.to("meta"))  # pinning needs a GPU
    ones = torch.ones(2, 4, dtype=torch.long)
    moved = change(Batch(ones, ones, ones[0], ((0,), (0, 2))))
    assert [x.device.type for x in (moved.tokens, moved.labels, moved.positions)] == ["meta"] * 3
    assert moved.positions.shape == (4,) and moved.documents == ((0,), (0, 2))
    assert change(Batch(ones, ones)).positions is None


def test_packing_splits_a_text_corpus_at_its_documents(folder, tmp_path):
    settings = {"name": "text", "path": str(folder)}
    plain, data = (open_data(config({**settings, "pack": pack}, tmp_path)) for pack in (False, True))
    assert data.eos_id == data.tokenizer.eos_id == plain.eos_id == 256
    assert data.fingerprint == plain.fingerprint and np.array_equal(data.train[0], plain.train[0])
    length = len(data.train[0]) - 1
    (batch,) = microbatches(
        Sequences(data.train[0], length, BatchSizes(1), 0, False), 0, [0], 1, packing=Packing(data.eos_id)
    )
    ids_by_document = np.split(batch.tokens[0].numpy(), batch.documents[0][1:])
    texts = [data.tokenizer.decode(ids.tolist()) for ids in ids_by_document]
    assert [t.removesuffix("<|endoftext|>") for t in texts] == documents(data)


@pytest.mark.parametrize("pack", [False, True])
def test_bin_file_is_split_at_its_eos_id(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(store, "_SCAN_TOKENS", 7)
    path = tmp_path / "a.bin"
    np.arange(40, dtype="<u2").tofile(path)
    settings = {"name": "bin", "path": str(path), "pack": pack}
    assert [open_data(config({**settings, "eos_id": eos}, tmp_path)).eos_id for eos in (0, 7, 39)] == [0, 7, 39]
    if not pack:
        # not looked for where nothing is split
        assert open_data(config({**settings, "eos_id": 40}, tmp_path)).eos_id == 40
        assert open_data(config(settings, tmp_path)).eos_id is None


@pytest.mark.parametrize("pack", [False, True])
def test_run_trains_on_packed_batches_and_logs_changed_packing(tmp_path, monkeypatch, pack):
    corpus, folder = tmp_path / "corpus", tmp_path / "run"
    corpus.mkdir()
    for n in range(40):
        (corpus / f"{n:02}.txt").write_text(TEXT[: 10 + n])
    seen = []
    step = TrainingStep.forward_backward
    monkeypatch.setattr(
        TrainingStep,
        "forward_backward",
        lambda self, n, batches, *rest: seen.extend(batches) or step(self, n, batches, *rest),
    )
    make = partial(arguments, folder, corpus, "train.steps=3", "train.seq_len=64")
    assert main([*make("train.stop_at=1"), f"data.pack={pack}".lower()]) == 0
    for batch in seen:
        assert (batch.documents is not None and any(len(d) > 1 for d in batch.documents)) == pack
    assert main([*make("train.stop_at=2", "resume=auto"), f"data.pack={pack}".lower()]) == 0
    log = folder / "logs" / "rank-0.log"
    assert "changed since" not in log.read_text()
    assert main([*make("resume=auto"), f"data.pack={not pack}".lower()]) == 0
    assert "data.pack changed since the checkpoint" in log.read_text()


# -------------------------------------------------------------------------------------------------------- prefetching


def test_prefetcher_keeps_at_most_depth_items_ready():
    made = []
    ahead = Prefetcher(lambda step: made.append(step) or step * 10, start=5, stop=20, depth=3)
    for step in range(5, 20):
        item, waited = ahead.get(step)
        assert item == step * 10 and waited >= 0
        time.sleep(0.01)
        assert len(made) <= step - 4 + 3
    with pytest.raises(ValueError, match=r"\(end: "):
        ahead.get(20)
    assert made == list(range(5, 20))
    ahead.close()


def test_prefetcher_measures_wait_and_refuses_other_order():
    ahead = Prefetcher(lambda step: time.sleep(0.2), 0, 2, depth=1)
    assert ahead.get(0)[1] > 0.1
    with pytest.raises(ValueError, match="the next step is 1 "):
        ahead.get(0)
    ahead.close()


def test_prefetcher_raises_error_of_make_at_its_step():
    def make(step):
        if step == 2:
            raise OSError("disk gone")
        return step

    ahead = Prefetcher(make, 0, 9, depth=4)
    assert [ahead.get(0)[0], ahead.get(1)[0]] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            ahead.get(2)
    ahead.close()


def test_prefetcher_closes_promptly_even_while_someone_waits():
    release = threading.Event()
    full = Prefetcher(lambda step: step, 0, 9, depth=1)
    stuck = Prefetcher(lambda step: release.wait(), 0, 9, depth=1)
    threading.Timer(0.1, stuck.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        stuck.get(0)
    began = time.perf_counter()
    full.close()
    assert time.perf_counter() - began < 0.5
    release.set()
    deadline = time.monotonic() + 5
    while any(t.name == "prefetch" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prefetcher_copies_batch_to_device():
    here = torch.device("cuda", torch.cuda.current_device())
    batch = Batch(torch.ones(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.long))
    ahead = Prefetcher(lambda step: [batch], 0, 1, depth=1, device=here)
    ((copied,), _) = ahead.get(0)
    assert copied.tokens.device == copied.labels.device == here and torch.equal(copied.tokens.cpu(), batch.tokens)
    ahead.close()


# ------------------------------------------------------------------------------------------------------------ corpora


def test_text_path_may_be_folder_file_or_glob(folder, tmp_path):
    everything = documents(open_data(config({"name": "text", "path": str(folder)}, tmp_path)))
    names = sorted(folder.rglob("*.txt"), key=lambda p: p.relative_to(folder).as_posix())
    assert everything == [text for p in names if (text := p.read_text("utf-8"))]
    one = documents(open_data(config({"name": "text", "path": str(folder / "a" / "00.txt")}, tmp_path)))
    assert one == everything[:1]
    some = documents(open_data(config({"name": "text", "path": str(folder / "**" / "0[13].txt")}, tmp_path)))
    assert some == [(folder / "b" / f"0{n}.txt").read_text("utf-8") for n in (1, 3)]


def test_validation_split_of_files_is_stable_when_files_added(folder, tmp_path):
    cfg = config({"name": "text", "path": str(folder), "validation": 0.3}, tmp_path)
    before, whole = open_data(cfg), open_data(config({"name": "text", "path": str(folder)}, tmp_path))
    assert len(before.train[0]) + len(before.validation[0]) == len(whole.train[0])
    assert 0.1 < len(before.validation[0]) / len(whole.train[0]) < 0.5
    for n in range(20):
        (folder / f"new{n}.txt").write_text(f"new {n}")
    after = open_data(cfg)
    assert set(documents(before)) == {d for d in documents(after) if not d.startswith("new")}
    assert len(after.validation[0]) > len(before.validation[0])


def test_jsonl_corpus_reads_text_key_of_each_line(tmp_path):
    lines = [json.dumps({"body": f"{n} {TEXT}", "id": n}) for n in range(40)]
    (tmp_path / "d.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    data = open_data(config({"name": "jsonl", "path": str(tmp_path), "text_key": "body"}, tmp_path))
    assert documents(data) == [f"{n} {TEXT}" for n in range(40)]
    split = open_data(config({"name": "jsonl", "path": str(tmp_path), "text_key": "body", "validation": 0.4}, tmp_path))
    assert 0 < len(split.validation[0]) < len(data.train[0])


@given(st.text(alphabet="ab1_'. \n\r狐\t", max_size=200), st.integers(4, 40))
def test_text_chunks_keep_text_of_long_documents(text, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ndtrain.data.documents.CHUNK_CHARACTERS", size)
        chunks = list(text_chunks(io.StringIO(text, newline="").read))
    assert "".join(chunks) == text and all(0 < len(c) <= size for c in chunks)


@pytest.mark.parametrize("size", [400, 555, 1000])
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_long_documents_in_chunks_keep_their_tokens(tmp_path, monkeypatch, kind, size):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {n} of_it ends.\r\nAnd {n}\n" + TEXT for n in range(100)), "utf-8", newline="")
    settings = {"name": "text", "path": str(path), "tokenizer": kind}
    whole = open_data(config(settings, tmp_path, vocab_size=500))
    monkeypatch.setattr("ndtrain.data.documents.CHUNK_CHARACTERS", size)
    monkeypatch.setattr(store, "_BATCH_CHARACTERS", 3 * size)
    chunked = open_data(config({**settings, "cache": str(tmp_path / "other")}, tmp_path, vocab_size=500))
    assert np.array_equal(chunked.train[0], whole.train[0]) and chunked.fingerprint == whole.fingerprint
    assert (whole.train[0] == whole.tokenizer.eos_id).sum() == 1


def test_literal_end_of_text_in_a_document_does_not_end_it(tmp_path):
    (tmp_path / "x.txt").write_text("before <|endoftext|> after")
    data = open_data(config({"name": "text", "path": str(tmp_path / "x.txt")}, tmp_path))
    assert (data.train[0] == data.tokenizer.eos_id).sum() == 1
    assert documents(data) == ["before <|endoftext|> after"]


@pytest.mark.full
def test_python_corpus_opens_and_is_cached(tmp_path, builds, record_property):
    cfg = config({"name": "python", "tokenizer": "bpe", "validation": 0.02}, tmp_path, vocab_size=4096)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        data = open_data(cfg)
        times.append(time.perf_counter() - began)
    record_property("tokens", len(data.train[0]))
    record_property("seconds", times)
    assert builds() == 1 and times[1] < times[0]
    assert data.vocab_size == 4096 and data.train[0].dtype == np.uint16 and len(data.train[0]) > 10**6
    assert 0.005 < len(data.validation[0]) / len(data.train[0]) < 0.06
    assert "def " in data.tokenizer.decode(data.train[0][:5000].tolist())
    files = corpora.open_corpus(cfg.data).files
    assert list(files) == sorted(files) and not [f for f in files if "site-packages" in f]


# --------------------------------------------------------------------------------------------------------- tokenizers


@lru_cache
def byte_tokenizer() -> tokenizer.Tokenizer:
    return tokenizer.load_tokenizer(config({}, Path()).data, list, Path())


@given(st.text(), st.text())
def test_byte_tokenizer_is_utf8(a, b):
    byte = byte_tokenizer()
    assert byte.encode_batch([a, b]) == [list(a.encode()), list(b.encode())]
    assert byte.decode(byte.encode_batch([a])[0]) == a
    assert (byte.vocab_size, byte.eos_id) == (257, 256)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_saved_tokenizer_opens_in_transformers(folder, tmp_path, kind, model_type):
    transformers = pytest.importorskip("transformers")
    data = open_data(config({"name": "text", "path": str(folder), "tokenizer": kind}, tmp_path))
    out = tmp_path / "checkpoint"
    out.mkdir()
    data.tokenizer.save(out)
    (out / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 300}))
    # For qwen2 alone, transformers 5 puts its own rules of splitting in place of what any AutoTokenizer folder says.
    opener = transformers.PreTrainedTokenizerFast if model_type == "qwen2" else transformers.AutoTokenizer
    theirs = opener.from_pretrained(out)
    text = TEXT + "\t def f(x):\r\n  return  x  # 狐\n"
    (ids,) = data.tokenizer.encode_batch([text])
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids) == text == data.tokenizer.decode(ids)
    assert theirs.eos_token_id == data.tokenizer.eos_id and len(theirs) == data.vocab_size
    again = open_data(config({"name": "text", "path": str(folder), "tokenizer": str(out)}, tmp_path))
    assert again.fingerprint == data.fingerprint and again.tokenizer.eos_id == data.tokenizer.eos_id


@pytest.fixture
def given_tokenizer(folder, tmp_path):
    """A Hugging Face folder with a byte tokenizer whose end-of-text token is `<stop>`, with padding enabled."""
    root = tmp_path / "hf"
    root.mkdir()
    backend = tokenizer._byte_level(tokenizer._byte_vocab())
    backend.add_special_tokens(["<stop>"])
    backend.enable_truncation(5)
    backend.enable_padding()
    backend.save(str(root / "tokenizer.json"))
    return root


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": "<stop>"}},
        {"tokenizer_config.json": {"eos_token": {"content": "<stop>", "lstrip": False}}},
        {"tokenizer_config.json": {"x": 1}, "special_tokens_map.json": {"eos_token": "<stop>"}},
        {"config.json": {"eos_token_id": 257}},
        {"config.json": {"eos_token_id": [257, 256]}},
    ],
)
def test_given_tokenizer_folder_is_read_and_saved(folder, tmp_path, given_tokenizer, files):
    for name, content in files.items():
        (given_tokenizer / name).write_text(json.dumps(content))
    data = open_data(config({"name": "text", "path": str(folder), "tokenizer": str(given_tokenizer)}, tmp_path))
    assert data.tokenizer.eos_id == 257 and data.vocab_size == 258
    assert len(documents(data)) == 60 and all(re.fullmatch(rf"Document \d+. ({TEXT})+", d) for d in documents(data))
    out = tmp_path / "out"
    out.mkdir()
    data.tokenizer.save(out)
    for path in given_tokenizer.iterdir():
        assert path.name == "config.json" or (out / path.name).read_bytes() == path.read_bytes()
    assert json.loads((out / "tokenizer_config.json").read_text()).get("eos_token", "<stop>")
    assert not (out / "config.json").exists()


def test_tokenizer_file_without_config_uses_common_eos_name(folder, tmp_path, given_tokenizer):
    path = given_tokenizer / "tokenizer.json"
    data = open_data(config({"name": "text", "path": str(folder), "tokenizer": str(path)}, tmp_path))
    assert data.tokenizer.eos_id == 256


# -------------------------------------------------------------------------------------------------------------- cache


def test_second_open_neither_trains_nor_tokenises(folder, tmp_path, monkeypatch, builds):
    cfg = config({"name": "text", "path": str(folder), "tokenizer": "bpe"}, tmp_path)
    first = open_data(cfg)
    monkeypatch.setattr(tokenizer, "_train", pytest.fail)
    assert open_data(cfg).fingerprint == first.fingerprint
    assert builds() == 1


def test_each_vocabulary_size_has_its_own_bpe(folder, tmp_path):
    sizes = [280, 300]
    configs = [
        config({"name": "text", "path": str(folder), "tokenizer": "bpe", "vocab_size": n}, tmp_path) for n in sizes
    ]
    assert [open_data(cfg).vocab_size for cfg in configs] == sizes


def test_atomic_write_replaces_file_only_when_whole(tmp_path):
    path = tmp_path / "entry"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), cache.atomic_write(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]
    with cache.atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"new"]


def test_read_only_cache_serves_existing_entry(folder, tmp_path, monkeypatch):
    cfg = config({"name": "text", "path": str(folder), "tokenizer": "bpe"}, tmp_path)
    first = open_data(cfg)
    monkeypatch.setattr(fcntl, "flock", None)  # root may write anywhere, so watch for the lock instead
    assert open_data(cfg).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        lambda root, cfg: (root / "a" / "00.txt").write_text("changed"),
        lambda root, cfg: (root / "a" / "new.txt").write_text("new"),
        lambda root, cfg: (root / "a" / "00.txt").unlink(),
        lambda root, cfg: setattr(cfg.data, "validation", 0.5),
        lambda root, cfg: setattr(cfg.data, "tokenizer", "bpe"),
    ],
)
def test_changed_corpus_or_setting_rebuilds_entry(folder, tmp_path, builds, change):
    cfg = config({"name": "text", "path": str(folder)}, tmp_path)
    first = open_data(cfg)
    change(folder, cfg)
    assert open_data(cfg).fingerprint != first.fingerprint
    assert builds() == 2


def test_fingerprint_depends_on_content_not_path(folder, tmp_path):
    first = open_data(config({"name": "text", "path": str(folder)}, tmp_path))
    moved = folder.rename(tmp_path / "moved")
    os.utime(moved / "a" / "00.txt", (0, 0))
    assert open_data(config({"name": "text", "path": str(moved)}, tmp_path)).fingerprint == first.fingerprint


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


ENTRY = "[0-9a-f]" * 32 + ".json"


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        *itertools.product([truncate, flip, Path.unlink], ["*.train.bin", "*.validation.bin", ENTRY]),
        *itertools.product([truncate, Path.unlink], ["bpe-*.json"]),
    ],
)
def test_damaged_cache_is_rebuilt(folder, tmp_path, damage, file):
    cfg = config({"name": "text", "path": str(folder), "tokenizer": "bpe", "validation": 0.3}, tmp_path)
    first = open_data(cfg)
    train = first.train[0].tolist()
    (path,) = (tmp_path / "cache").glob(file)
    sound = path.read_bytes()
    del first
    damage(path)
    again = open_data(cfg)
    assert again.train[0].tolist() == train and path.read_bytes() == sound


def _open_in_process(cfg, results) -> None:
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    store.log.addHandler(handler)
    store.log.setLevel(logging.INFO)
    slow = store.encode_chunks
    store.encode_chunks = lambda *args: (time.sleep(0.01) or pair for pair in slow(*args))
    results.put((open_data(cfg).fingerprint, len(records)))


def _build_and_hang(cfg, marker: Path) -> None:
    whole = store.encode_chunks

    def endless(*args):
        yield next(whole(*args))
        marker.touch()
        time.sleep(600)

    store.encode_chunks = endless
    open_data(cfg)


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ndtrain.train"])  # all that this file imports
    return context


def test_four_processes_build_one_cache_entry(folder, tmp_path, processes):
    cfg = config({"name": "text", "path": str(folder), "tokenizer": "bpe"}, tmp_path)
    results = processes.Queue()
    workers = [processes.Process(target=_open_in_process, args=(cfg, results), daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()
    builders = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(built for _, built in builders) == [0, 0, 0, 1]
    assert {fingerprint for fingerprint, _ in builders} == {open_data(cfg).fingerprint}


def test_killed_builder_leaves_neither_lock_nor_broken_entry(folder, tmp_path, processes, builds):
    cfg = config({"name": "text", "path": str(folder)}, tmp_path)
    marker = tmp_path / "marker"
    worker = processes.Process(target=_build_and_hang, args=(cfg, marker), daemon=True)
    worker.start()
    deadline = time.monotonic() + 60
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (lock,) = (tmp_path / "cache").glob("*.lock")
    with lock.open("w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was indeed in the middle of building
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    data = open_data(cfg)
    assert builds() == 1 and len(documents(data)) == 60
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_failed_build_leaves_no_files(folder, tmp_path):
    cfg = config({"name": "text", "path": str(folder)}, tmp_path)
    (folder / "z.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError):
        open_data(cfg)
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".lock"}


# ------------------------------------------------------------------------------------------------------------- errors


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


ERRORS = {
    "missing path": (
        lambda p: {"name": "text", "path": str(p / "no")},
        "data.path=.*/no: no such file or folder: give an existing one",
    ),
    "glob without a match": (
        lambda p: {"name": "text", "path": str(p / "*.no")},
        r"data.path=.*/\*.no: no file matches this glob",
    ),
    "folder without jsonl": (
        lambda p: {"name": "jsonl", "path": write(p / "a.txt", b"x") and str(p)},
        r"data.path=.*: no file \*.jsonl in this folder",
    ),
    "empty file": (
        lambda p: {"name": "text", "path": write(p / "a", b"")},
        "data.path=.*/a: nothing to train on, no document has any text",
    ),
    "everything held out": (
        lambda p: {"name": "text", "path": write(p / "a", b"text"), "validation": 0.999999},
        "nothing to train on, every document is in the validation split: .* data.validation=0",
    ),
    "shorter than a sequence": (
        lambda p: {"name": "text", "path": write(p / "a", b"fifteen letters")},
        "data=text: the training split holds 16 tokens, fewer than one sequence of train.seq_len . 1 = 17: lower",
    ),
    "not UTF-8": (
        lambda p: {"name": "text", "path": write(p / "a", b"fine\n\xff")},
        "data.path: .*/a is not UTF-8 text: convert it",
    ),
    "broken json": (
        lambda p: {"name": "jsonl", "path": write(p / "a.jsonl", b'{"text": "x"}\n\n{"text": \n')},
        "data.path: .*/a.jsonl:3: not a JSON object .*: correct or remove the line",
    ),
    "deep json": (
        lambda p: {"name": "jsonl", "path": write(p / "a.jsonl", b'{"text": "x"}\n' + b"[" * 200_000)},
        "data.path: .*/a.jsonl:2: not a JSON object .nested too deeply.: correct or remove the line",
    ),
    "json that is no object": (
        lambda p: {"name": "jsonl", "path": write(p / "a.jsonl", b'["text"]')},
        "data.path: .*/a.jsonl:1: not a JSON object but a list",
    ),
    "broken UTF-8 in json": (
        lambda p: {"name": "jsonl", "path": write(p / "a.jsonl", b'{"text": "\xff"}')},
        "data.path: .*/a.jsonl:1: not a JSON object",
    ),
    "no text key": (
        lambda p: {"name": "jsonl", "path": write(p / "a.jsonl", b'{"text": "x"}\n{"body": "x", "id": 1}')},
        r"/a.jsonl:2: no field 'text': set data.text_key to one of its fields \(body, id\)",
    ),
    "text is no string": (
        lambda p: {"name": "jsonl", "path": write(p / "a.jsonl", b'{"text": 3}')},
        "/a.jsonl:1: field 'text' is not a string: set data.text_key",
    ),
    "lone surrogate": (
        lambda p: {"name": "jsonl", "path": write(p / "a.jsonl", b'{"text": "\\ud800"}')},
        "/a.jsonl:1: field 'text' contains an unpaired surrogate",
    ),
    "empty bin": (
        lambda p: {"name": "bin", "path": write(p / "a.bin", b"")},
        "data.path=.*/a.bin: the file holds no tokens",
    ),
    "bin of odd size": (
        lambda p: {"name": "bin", "path": write(p / "a.bin", b"123"), "dtype": "uint16"},
        "data.path=.*: 3 bytes are not a multiple of the 2 of data.dtype=uint16",
    ),
    "short bin": (
        lambda p: {"name": "bin", "path": write(p / "a.bin", bytes(32))},
        "data=bin: the training split holds 16 tokens",
    ),
    "id beyond the vocabulary": (
        lambda p: {"name": "bin", "path": write(p / "a.bin", np.array([1] * 20 + [300, 9, 300], "<u2").tobytes())},
        "token id 300 at offset 20 is outside model.vocab_size=300: set model.vocab_size to at least 301",
    ),
    "two bins": (
        lambda p: {"name": "bin", "path": write(p / "a.bin", b"12") and write(p / "b.bin", b"12") and str(p)},
        "data=bin reads one file, but there are 2 here",
    ),
    "packing a bin without its end-of-text token": (
        lambda p: {"name": "bin", "path": write(p / "a.bin", bytes(64)), "pack": True},
        "data.eos_id is missing: with data=bin, data.pack=true needs",
    ),
    "end-of-text token beyond the vocabulary": (
        lambda p: {"name": "bin", "path": write(p / "a.bin", bytes(64)), "eos_id": 300},
        r"data.eos_id=300: must be in \[0, model.vocab_size=300\)",
    ),
    "negative end-of-text token": (
        lambda p: {"name": "bin", "path": write(p / "a.bin", bytes(64)), "eos_id": -1, "pack": True},
        r"data.eos_id=-1: must be in \[0, model.vocab_size=300\)",
    ),
    "end-of-text token that the bin does not hold": (
        lambda p: {"name": "bin", "path": write(p / "a.bin", bytes(64)), "eos_id": 9, "pack": True},
        "data.eos_id=9: data.path=.*/a.bin does not contain this token, so no document ends: .* data.pack=false",
    ),
    "end-of-text token of a text corpus": (
        lambda p: {"name": "text", "path": write(p / "a", TEXT.encode()), "eos_id": 256},
        "data.eos_id=256: data=text takes it from data.tokenizer, and only data=bin, .* use this key: set it to null",
    ),
    "missing tokenizer": (
        lambda p: {"name": "text", "path": write(p / "a", b"x"), "tokenizer": str(p / "no")},
        "data.tokenizer=.*/no: no such file: give byte, bpe, a tokenizer.json or a Hugging Face folder",
    ),
    "folder without tokenizer": (
        lambda p: {"name": "text", "path": write(p / "a", b"x"), "tokenizer": str(p)},
        "data.tokenizer=.*: this folder has no tokenizer.json: write one",
    ),
    "damaged tokenizer": (
        lambda p: {"name": "text", "path": write(p / "a", b"x"), "tokenizer": write(p / "tokenizer.json", b"{}")},
        "data.tokenizer=.*: .*tokenizer.json is not a tokenizer.json: ",
    ),
    "small vocabulary for bpe": (
        lambda p: {"name": "text", "path": write(p / "a", b"x"), "tokenizer": "bpe", "vocab_size": 256},
        r"data.vocab_size=256 is too small for data.tokenizer=bpe: set it \(or model.vocab_size\) to at least 257",
    ),
    "larger vocabulary than the model's": (
        lambda p: {"name": "text", "path": write(p / "a", TEXT.encode()), "tokenizer": "bpe", "vocab_size": 310},
        "model.vocab_size=300 is less than the 310 tokens of data.tokenizer=bpe: set model.vocab_size to at least 310",
    ),
    "cache is a file": (
        lambda p: {"name": "text", "path": write(p / "a", b"x"), "cache": write(p / "c", b"")},
        r"data.cache: cannot use .*/c \(.*\): set data.cache to a writable folder",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_corpus_or_tokenizer_is_one_line_error(case, tmp_path):
    place = tmp_path / "here"
    place.mkdir()
    data, message = ERRORS[case][0](place), ERRORS[case][1]
    with pytest.raises(ConfigError) as caught:
        open_data(config(data, tmp_path))
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def test_tokenizer_without_end_of_text_token_is_refused(folder, tmp_path, given_tokenizer):
    (given_tokenizer / "tokenizer_config.json").write_text('{"eos_token": "<none such>"}')
    cfg = config({"name": "text", "path": str(folder), "tokenizer": str(given_tokenizer)}, tmp_path)
    with pytest.raises(ConfigError, match=r"end-of-text token is unknown: set eos_token in .*config\.json"):
        open_data(cfg)
    (given_tokenizer / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*config\.json does not parse"):
        open_data(cfg)


NO_TOKENS = {  # files of a tokenizer's folder that name no token
    "a content that is no text": {"tokenizer_config.json": {"eos_token": {"content": ["x"]}}},
    "a token that is no text": {"special_tokens_map.json": {"eos_token": 7}},
    "an id beyond the library": {"config.json": {"eos_token_id": 10**12}},
    "an id below 0": {"config.json": {"eos_token_id": -1}},
    "an id in words": {"config.json": {"eos_token_id": "257"}},
    "true": {"config.json": {"eos_token_id": True}},
    "no ids": {"config.json": {"eos_token_id": []}},
}


@pytest.mark.parametrize("name", NO_TOKENS)
def test_eos_token_of_wrong_type_is_refused(name, folder, tmp_path, given_tokenizer):
    (given_tokenizer / "tokenizer_config.json").unlink(missing_ok=True)
    for file, content in NO_TOKENS[name].items():
        (given_tokenizer / file).write_text(json.dumps(content))
    cfg = config({"name": "text", "path": str(folder), "tokenizer": str(given_tokenizer)}, tmp_path)
    with pytest.raises(ConfigError, match="end-of-text token is unknown") as refused:
        open_data(cfg)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["[1]", "[" * 100_000], ids=["a list", "deep"])
def test_a_tokenizer_config_that_is_no_object_is_refused(content, folder, tmp_path, given_tokenizer):
    (given_tokenizer / "tokenizer_config.json").write_text(content)
    cfg = config({"name": "text", "path": str(folder), "tokenizer": str(given_tokenizer)}, tmp_path)
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*config\.json does not parse"):
        open_data(cfg)


def test_bin_scan_is_cached_and_redone_for_changed_file(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    np.arange(40, dtype="<u2").tofile(path)
    monkeypatch.setattr(store, "_SCAN_TOKENS", 7)
    cfg = config({"name": "bin", "path": str(path)}, tmp_path)
    first = open_data(cfg)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_scan", pytest.fail)
        assert open_data(cfg).fingerprint == first.fingerprint
    (np.arange(40, dtype="<u2") + 10).tofile(path)  # of the same size
    os.utime(path, (1, 1))
    assert open_data(cfg).vocab_size == 50
    assert open_data(cfg).fingerprint != first.fingerprint
    with pytest.raises(ConfigError, match="token id 49 at offset 39 "):
        open_data(config({"name": "bin", "path": str(path)}, tmp_path, vocab_size=49))
