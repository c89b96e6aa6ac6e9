"""Corpora that other programs have written, compared element by element with what their own readers return.

These tests need `megatron-core` and `datatrove`, which the extra `dev` installs.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ndtrain.data import microbatches, open_data
from ndtrain.data.batches import positions_of
from ndtrain.data.formats import FORMATS
from ndtrain.engine.validation import packing_of
from tests.data.formats.test_formats import whole
from tests.data.formats.writers import random_documents, write_datatrove, write_megatron
from tests.data.test_data import config

pytestmark = pytest.mark.full  # the imports take seconds


@pytest.fixture(scope="module")
def megatron() -> Any:
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")


@pytest.fixture(scope="module")
def datatrove() -> Any:
    pytest.importorskip("datatrove.utils.dataset", reason="datatrove is not installed")
    from datatrove.pipeline.tokens import megatron_tokenizer, tokenizer
    from datatrove.utils import dataset

    class Names:
        TokenizedFile, MegatronTokenizedFile = tokenizer.TokenizedFile, megatron_tokenizer.MegatronTokenizedFile
        DatatroveFileDataset = dataset.DatatroveFileDataset

    return Names


def build(megatron: Any, prefix: Path, documents, dtype, parts: int) -> None:
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for document in documents:
        lengths = [len(part) for part in np.array_split(document, parts)]
        builder.add_document(document, lengths)
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_our_reader_equals_megatron_on_megatron_files(megatron, dtype, parts, tmp_path):
    vocab = 70_000 if np.dtype(dtype).itemsize > 2 else 200
    for stem, seed in (("a", 0), ("b", 1)):
        build(megatron, tmp_path / stem, random_documents(200, vocab, seed=seed), dtype, parts)
    theirs = [megatron.IndexedDataset(f"{tmp_path}/{stem}") for stem in "ab"]
    paths = [f"{tmp_path}/a", f"{tmp_path}/b.bin"]
    data = open_data(config({"name": "megatron", "paths": paths}, tmp_path, vocab_size=vocab))
    ours, at = data.train[0], 0
    for dataset in theirs:
        for number in range(len(dataset)):
            sequence = dataset[number]
            assert ours[at : at + len(sequence)].tolist() == sequence.tolist()
            at += len(sequence)
    assert at == len(ours) and data.eos_id == 0
    for path, dataset in zip(paths, theirs, strict=True):
        (file,) = FORMATS["megatron"].files(path, "data.path")
        ends = FORMATS["megatron"].open(file, config({}, tmp_path).data).document_ends()
        lengths = np.concatenate([[0], np.cumsum(dataset.sequence_lengths)])
        assert ends.tolist() == lengths[dataset.document_indices[1:]].tolist()


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_megatron_reads_files_of_test_writer(megatron, dtype, tmp_path):
    documents = random_documents(50)
    write_megatron(tmp_path / "a", documents, dtype)
    theirs = megatron.IndexedDataset(f"{tmp_path}/a")
    assert [theirs[n].tolist() for n in range(len(theirs))] == [document.tolist() for document in documents]


def test_merged_megatron_dataset_equals_its_parts(megatron, tmp_path):
    for stem, seed in (("a", 0), ("b", 1)):
        build(megatron, tmp_path / stem, random_documents(40, seed=seed), np.uint16, 1)
    builder = megatron.IndexedDatasetBuilder(f"{tmp_path}/ab.bin", np.uint16)
    for stem in "ab":
        builder.add_index(f"{tmp_path}/{stem}")
    builder.finalize(f"{tmp_path}/ab.idx")
    one = open_data(config({"name": "megatron", "path": f"{tmp_path}/ab"}, tmp_path))
    two = open_data(config({"name": "megatron", "paths": [f"{tmp_path}/a", f"{tmp_path}/b"]}, tmp_path))
    assert whole(one.train[0]) == whole(two.train[0])


@pytest.mark.parametrize("size", [2, 4])
def test_our_reader_equals_datatrove_on_datatrove_files(datatrove, size, tmp_path):
    documents = random_documents(300, 200 if size == 2 else 70_000)
    file = datatrove.TokenizedFile(
        str(tmp_path), "00000.ds", save_final_metadata=True, token_size=size, tokenizer_name_or_path="me/mine"
    )
    for document in documents:
        file.write(document.tolist(), None)
    file.close()
    cfg = config({"name": "datatrove", "path": str(tmp_path), "pack": True, "shuffle": False}, tmp_path, 70_000, 63)
    data = open_data(cfg)
    assert data.eos_id == 0
    theirs = datatrove.DatatroveFileDataset(f"{tmp_path}/00000.ds", 63, token_size=size, return_positions=True)
    assert len(theirs) > 50
    ours = data.train[0]
    for number in range(len(theirs)):
        row = theirs[number]
        tokens = ours[64 * number : 64 * number + 64]
        assert tokens.tolist() == row["input_ids"].tolist()
        starts = [0, *(np.flatnonzero(tokens[:-1] == data.eos_id) + 1)]
        assert positions_of(starts, 64).tolist() == row["positions"].tolist()
    (batch,) = microbatches(data.sequences(cfg, None, 0, None), 0, range(8), 8, packing=packing_of(cfg, data))
    assert batch.positions[0].tolist() == theirs[0]["positions"][:63].tolist()


@pytest.mark.parametrize("chunk", [None, 50])
def test_shuffled_datatrove_file_is_read_in_its_order(datatrove, chunk, tmp_path):
    documents = random_documents(100)
    first = datatrove.TokenizedFile(str(tmp_path / "in"), "a.ds", save_final_metadata=False)
    for document in documents:
        first.write(document.tolist(), None)
    first.close()
    boundaries = None
    if chunk:
        from datatrove.utils.tokenization import chunk_doc_ends

        boundaries = chunk_doc_ends(first.doc_ends, chunk)
    order = np.random.default_rng(0).permutation(len(boundaries or documents))
    file = first.copy("a", order, new_output_folder=first.output_folder, boundaries=boundaries)
    data = open_data(config({"name": "datatrove", "path": f"{tmp_path}/in/{file.filename}"}, tmp_path))
    flat = np.concatenate(documents)
    pieces = [flat[n * chunk : (n + 1) * chunk] for n in order] if chunk else [documents[n] for n in order]
    assert whole(data.train[0]) == np.concatenate(pieces).tolist()


def test_datatrove_reads_files_of_test_writer(datatrove, tmp_path):
    documents = random_documents(50)
    path = write_datatrove(tmp_path / "a.ds", documents, "<u4")
    theirs = datatrove.DatatroveFileDataset(str(path), 15, token_size=4)
    assert np.concatenate([theirs[n]["input_ids"] for n in range(len(theirs))]).tolist() == (
        np.concatenate(documents)[: 16 * len(theirs)].tolist()
    )


def test_megatron_file_of_datatrove_is_read(datatrove, tmp_path):
    documents = [document.tolist() for document in random_documents(80)]
    file = datatrove.MegatronTokenizedFile(str(tmp_path), "a", token_size=4)
    for document in documents:
        file.write(document)
    file.close()
    data = open_data(config({"name": "megatron", "path": f"{tmp_path}/a"}, tmp_path))
    assert whole(data.train[0]) == [token for document in documents for token in document] and data.eos_id == 0
