"""Packed documents of token files are separated by an end token or by the index of their file."""

import numpy as np
import pytest
import torch

from ndtrain.config import Config, ConfigError
from ndtrain.data import Batch, microbatches, open_data
from ndtrain.data.batches import positions_of
from ndtrain.data.token_array import Packing
from ndtrain.data.validation import ValidationSet
from ndtrain.engine.validation import packing_of
from ndtrain.model.vocabulary import IGNORE
from tests.data.formats.writers import random_documents, write, write_datatrove, write_megatron
from tests.data.test_data import config


def packed(cfg: Config, count: int = 8) -> Batch:
    data = open_data(cfg)
    source = data.sequences(cfg, None, 0, None)
    (batch,) = microbatches(source, 0, range(count), count, packing=packing_of(cfg, data))
    return batch


@pytest.mark.parametrize("name", ["megatron", "llmc", "datatrove"])
def test_packed_rows_start_documents_where_file_does(name, tmp_path):
    documents = random_documents(100)
    path = write(name, tmp_path / "corpus", documents)
    cfg = config({"name": name, "path": path, "pack": True, "shuffle": False, "eos_id": 0}, tmp_path, seq_len=64)
    starts = {int(start) for start in np.cumsum([len(document) for document in documents])}
    for row, begins in enumerate(packed(cfg).documents):
        assert {64 * row + begin for begin in begins[1:]} == {s for s in starts if 64 * row < s < 64 * (row + 1)}


@pytest.mark.parametrize("name", ["megatron", "datatrove"])
def test_index_packs_documents_without_end_token(name, tmp_path):
    documents = random_documents(100, eos=None)
    path = write(name, tmp_path / "corpus", documents)
    settings = {"name": name, "path": path, "pack": True, "shuffle": False}
    batch = packed(config(settings, tmp_path, seq_len=64))
    starts = {int(start) for start in np.cumsum([len(document) for document in documents])}
    tokens = np.concatenate(documents)
    for row, begins in enumerate(batch.documents):
        inside = {s for s in starts if 64 * row < s < 64 * (row + 1)}
        assert {64 * row + begin for begin in begins[1:]} == inside and len(begins) == 1 + len(inside)
        last_of_document = [t for t in range(64) if 64 * row + t + 1 in starts]
        assert np.flatnonzero(batch.labels[row] == IGNORE).tolist() == last_of_document
        assert batch.positions[row].tolist() == positions_of(begins, 64).tolist()
        assert batch.tokens[row].tolist() == tokens[64 * row : 64 * row + 64].tolist()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", ["megatron", "datatrove"])
def test_packing_by_index_equals_packing_by_end_token(name, shuffle, tmp_path):
    """Two files, documents held out, a shuffled order: the same batches and the same validation either way."""
    paths = [write(name, tmp_path / f"part{n}", random_documents(100, seed=n)) for n in range(2)]
    settings = {"name": name, "paths": paths, "pack": True, "shuffle": shuffle, "validation": 0.3}
    configs = [config(settings | end, tmp_path, seq_len=16) for end in ({}, {"eos_id": 0})]
    by_index, by_token = (packed(cfg, 16) for cfg in configs)
    assert by_index.documents == by_token.documents and max(map(len, by_index.documents)) > 2
    assert torch.equal(by_index.labels, by_token.labels) and torch.equal(by_index.positions, by_token.positions)
    indexed, plain = (open_data(cfg) for cfg in configs)
    assert indexed.validation[0].document_starts is not None and plain.validation[0].document_starts is None
    held = [ValidationSet(data.validation, 16, 1000) for data in (indexed, plain)]
    rules = (Packing(None), Packing(0))
    batches = [microbatches(h, 0, range(1000), 1000, packing=p)[0] for h, p in zip(held, rules, strict=True)]
    whole = held[0].count - 1  # sequences without padding
    assert torch.equal(batches[0].labels, batches[1].labels)
    assert batches[0].documents[:whole] == batches[1].documents[:whole]
    (unpacked,) = microbatches(held[0], 0, range(1000), 1000)
    assert int((batches[0].labels != IGNORE).sum()) < int((unpacked.labels != IGNORE).sum())


def test_packed_blend_mixes_index_and_end_token(tmp_path):
    """The bytes of the texts end with token 256, the documents of the index with none."""
    (tmp_path / "texts").mkdir()
    for n in range(40):
        (tmp_path / "texts" / f"{n}.txt").write_text("abcdefgh" * (5 + n % 7))
    documents = random_documents(80, vocab=250, eos=None)
    write_megatron(tmp_path / "bare", documents)
    paths = {"megatron": tmp_path / "bare", "text": tmp_path / "texts"}
    entries = [{"name": name, "path": str(path), "weight": 0.5} for name, path in paths.items()]
    settings = {"name": "blend", "blend": entries, "pack": True, "shuffle": False, "validation": 0}
    cfg = config(settings, tmp_path, vocab_size=257, seq_len=32)
    cfg.train.global_batch = 8
    batch = packed(cfg)
    starts = {int(start) for start in np.cumsum([len(document) for document in documents])}
    sequence = 0
    for row, begins in zip(batch.tokens.tolist(), batch.documents, strict=True):
        if set(row) <= {*b"abcdefgh", 256}:
            assert list(begins[1:]) == [t + 1 for t in range(31) if row[t] == 256]
        else:
            assert {32 * sequence + begin for begin in begins[1:]} == {s for s in starts if 0 < s - 32 * sequence < 32}
            sequence += 1
    assert 2 < sequence < 6


def test_packing_without_index_requires_eos_id(tmp_path):
    path = write_datatrove(tmp_path / "a.ds", random_documents(40, eos=None), index=False)
    with pytest.raises(ConfigError, match=r"has no index of its documents and no .* set data.eos_id"):
        open_data(config({"name": "datatrove", "path": str(path), "pack": True}, tmp_path))
