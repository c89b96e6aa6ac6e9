"""Token files of other programs, written byte by byte: what is read, held out, packed, mixed, resumed and refused."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from ndtrain.config import AXES, ConfigError, load_config
from ndtrain.config.data_checks import check_data
from ndtrain.data import open_data, token_files
from ndtrain.data.token_array import TokenArray
from ndtrain.data.validation import ValidationSet
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.train import main
from tests.data.formats.writers import random_documents, write, write_datatrove, write_llmc, write_megatron
from tests.data.test_data import config
from tests.data.test_mixture import digests, source_of, spelled
from tests.lib.helpers import checkpoint_of, tensor_bytes
from tests.lib.helpers import rows as metrics_of

FORMATS = ["megatron", "llmc", "datatrove"]


def whole(tokens) -> list[int]:
    return tokens[0 : len(tokens)].tolist()


def split_documents(tokens, eos: int = 0) -> list[tuple[int, ...]]:
    ids = tokens[0 : len(tokens)]
    return [tuple(part.tolist()) for part in np.split(ids, np.flatnonzero(ids == eos) + 1) if len(part)]


# ------------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("name", FORMATS)
def test_open_data_reads_tokens_in_file_order(name, dtype, tmp_path):
    documents = random_documents(60, vocab=70_000 if dtype == "<u4" else 300)
    path = write(name, tmp_path / "corpus.v1", documents, dtype)
    data = open_data(config({"name": name, "path": path, "eos_id": 0}, tmp_path, vocab_size=70_000))
    expected = np.concatenate(documents)
    assert whole(data.train[0]) == expected.tolist() and not data.validation
    assert data.vocab_size == expected.max() + 1
    assert not list((tmp_path / "cache").glob("*.bin")), "the tokens were copied"
    read = data.sequences(config({}, tmp_path), None, 0, None)
    for row, start in zip(read.tokens(0, range(4)), [read.index(0, i) * 16 for i in range(4)], strict=True):
        assert row.tolist() == expected[start : start + 17].tolist()


@pytest.mark.parametrize("dtype", ["<u1", "<i2", "<i4", "<i8", "<u2"])
def test_megatron_reader_accepts_every_id_dtype(dtype, tmp_path):
    documents = random_documents(20, vocab=120)
    write_megatron(tmp_path / "corpus", documents, dtype)
    data = open_data(config({"name": "megatron", "path": str(tmp_path / "corpus")}, tmp_path))
    assert whole(data.train[0]) == np.concatenate(documents).tolist() and data.eos_id == 0


SPELLINGS = {
    "a prefix": ("a.part", "a"),
    "a .bin": ("a.part.bin", "a"),
    "an .idx": ("a.part.idx", "a"),
    "a folder": ("", "ab"),
    "a glob": ("*part*", "ab"),
    "a glob of .bin": ("*.bin", "ab"),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_megatron_path_may_be_prefix_file_or_folder(case, tmp_path):
    written, expected = SPELLINGS[case]
    (tmp_path / "in").mkdir()
    parts = {letter: random_documents(9, seed=n) for n, letter in enumerate("ab")}
    for letter, documents in parts.items():
        write_megatron(tmp_path / "in" / f"{letter}.part", documents)
    data = open_data(config({"name": "megatron", "path": f"{tmp_path}/in/{written}"}, tmp_path))
    assert whole(data.train[0]) == np.concatenate([x for letter in expected for x in parts[letter]]).tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_data_paths_are_joined_in_given_order(name, tmp_path):
    parts = [random_documents(30, seed=n) for n in range(3)]
    paths = [write(name, tmp_path / letter, documents) for letter, documents in zip("cab", parts, strict=True)]
    data = open_data(config({"name": name, "paths": paths, "eos_id": 0}, tmp_path))
    flat = np.concatenate([np.concatenate(documents) for documents in parts])
    assert whole(data.train[0]) == flat.tolist()
    cfg = config({"shuffle": False}, tmp_path)
    cfg.train.global_batch = 8
    read = data.sequences(cfg, None, 0, None)  # sequences lie across the files
    rows = np.concatenate([read.tokens(step, range(8)) for step in range(len(flat) // 128)])
    assert all(row.tolist() == flat[16 * n : 16 * n + 17].tolist() for n, row in enumerate(rows))


def test_token_array_equals_concatenated_runs():
    rng = np.random.default_rng(0)
    files = [rng.integers(0, 1000, n).astype(dtype) for n, dtype in ((50, "<u2"), (1, "<u4"), (99, "<u2"))]
    runs = np.array([[0, 2, 1, 2, 0], [10, 0, 0, 90, 49], [20, 33, 1, 9, 1]])
    expected = np.concatenate([files[f][s : s + n] for f, s, n in runs.T])
    array = TokenArray(files, runs)
    assert len(array) == len(expected) == 64
    for start in range(65):
        for stop in range(65):
            assert np.array_equal(array[start:stop], expected[start:stop])
    assert np.array_equal(array[:-1], expected[:-1])


# ---------------------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("name", FORMATS)
def test_validation_split_holds_out_whole_documents(name, tmp_path):
    documents = random_documents(400)
    path = write(name, tmp_path / "corpus", documents)
    data = {"name": name, "path": path, "eos_id": 0, "validation": 0.2}
    opened = open_data(config(data, tmp_path))
    kept, held = split_documents(opened.train[0]), split_documents(opened.validation[0])
    assert 40 < len(held) < 120
    numbers = {tuple(document.tolist()): n for n, document in enumerate(documents) if len(document) > 1}
    order = [numbers[d] for d in kept if len(d) > 1], [numbers[d] for d in held if len(d) > 1]
    assert order[0] == sorted(order[0]) and order[1] == sorted(order[1]), "the order of the documents changed"
    assert sorted(kept + held) == sorted(tuple(document.tolist()) for document in documents)
    again = open_data(config({**data, "cache": str(tmp_path / "other")}, tmp_path))
    assert whole(again.validation[0]) == whole(opened.validation[0]) and again.fingerprint == opened.fingerprint
    assert open_data(config({**data, "validation": 0.1}, tmp_path)).fingerprint != opened.fingerprint


def test_validation_split_is_stable_when_file_grows(tmp_path):
    documents = random_documents(300)
    splits = []
    for count in (200, 300):
        path = write_megatron(tmp_path / "corpus", documents[:count])
        opened = open_data(config({"name": "megatron", "path": str(path), "validation": 0.3}, tmp_path))
        splits.append(whole(opened.validation[0]))
    assert splits[1][: len(splits[0])] == splits[0] and len(splits[1]) > len(splits[0])


@pytest.mark.parametrize("name", FORMATS)
def test_validation_path_is_whole_validation_split(name, tmp_path):
    documents, other = random_documents(60), random_documents(20, seed=1)
    paths = [write(name, tmp_path / stem, d) for stem, d in (("train", documents), ("val", other))]
    data = {"name": name, "path": paths[0], "validation_path": paths[1], "validation": 0.5, "eos_id": 0}
    opened = open_data(config(data, tmp_path))
    assert whole(opened.train[0]) == np.concatenate(documents).tolist()
    (held,) = opened.validation
    assert whole(held) == np.concatenate(other).tolist()
    every = ValidationSet([held], 16, 4)
    rows = np.concatenate([every.tokens(step, range(4)) for step in range(every.passes)])
    labels = rows[:, 1:][rows[:, 1:] >= 0]
    assert labels.tolist() == np.concatenate(other)[1:].tolist(), "not exactly the whole split"


@pytest.mark.parametrize("parts", [1, 3])
def test_megatron_document_of_several_sequences_stays_whole(parts, tmp_path):
    """Documents come from the document table, and may span several sequences."""
    documents = [document for document in random_documents(100) if len(document) >= 3]
    write_megatron(tmp_path / "corpus", documents, parts=parts)
    opened = open_data(config({"name": "megatron", "path": f"{tmp_path}/corpus", "validation": 0.2}, tmp_path))
    assert opened.eos_id == 0
    held = split_documents(opened.validation[0])
    assert held and set(held) <= {tuple(document.tolist()) for document in documents}


ENDS = {  # documents -> the token that ends each of them and stands nowhere else
    "one end": ([[5, 6, 1], [7, 1], [1]], 1),
    "an empty document": ([[5, 6, 1], [], [7, 1]], 1),
    "two ends": ([[5, 6, 1], [7, 2]], None),
    "an end that is also within": ([[5, 1, 6, 1], [7, 1]], None),
}


@pytest.mark.parametrize("name", ["megatron", "datatrove"])
@pytest.mark.parametrize("case", ENDS)
def test_eos_id_is_inferred_from_ends_of_indexed_documents(case, name, tmp_path):
    documents, eos = ENDS[case]
    path = write(name, tmp_path / "corpus", [np.array(document, np.int64) for document in documents])
    assert open_data(config({"name": name, "path": path}, tmp_path, seq_len=2)).eos_id == eos


@pytest.mark.parametrize(("dtype", "eos"), [("<u2", 50256), ("<u4", 128000)])
def test_llmc_documents_are_split_at_end_of_text(dtype, eos, tmp_path):
    texts = random_documents(50, eos=None)
    path = write_llmc(tmp_path / "shard.bin", np.concatenate([np.append(eos, text) for text in texts]), dtype)
    data = {"name": "llmc", "path": str(path), "validation": 0.3, "pack": True}
    opened = open_data(config(data, tmp_path, vocab_size=eos + 1))
    assert opened.eos_id == eos and opened.validation
    without = write_llmc(tmp_path / "other.bin", np.concatenate(texts), dtype)
    assert open_data(config({"name": "llmc", "path": str(without)}, tmp_path)).eos_id is None


def test_document_scan_is_cached(tmp_path, monkeypatch):
    path = write_megatron(tmp_path / "corpus", random_documents(50))
    cfg = config({"name": "megatron", "path": str(path), "validation": 0.2}, tmp_path)
    first = open_data(cfg)
    monkeypatch.setattr(token_files, "_build", lambda *args: pytest.fail("built anew"))
    assert whole(open_data(cfg).train[0]) == whole(first.train[0])


# -------------------------------------------------------------------------------------------------------------- mixing


@pytest.fixture
def blend(tmp_path):
    """Entries of a Megatron prefix and a folder of texts, as bytes that end with token 256."""
    rng = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for n in range(40):
        (tmp_path / "texts" / f"{n}.txt").write_text("abcdefgh" * int(rng.integers(5, 30)))
    documents = [np.append(rng.integers(128, 200, rng.integers(5, 200)), 256) for _ in range(80)]
    write_megatron(tmp_path / "corpus", documents)
    return [
        {"name": "megatron", "path": str(tmp_path / "corpus"), "weight": 0.7},
        {"name": "text", "path": str(tmp_path / "texts"), "weight": 0.3},
    ]


def test_blend_with_megatron_is_same_on_four_meshes(tmp_path, blend):
    cfg = config({"name": "blend", "blend": blend, "validation": 0.1}, tmp_path)
    cfg.train.global_batch, cfg.train.micro_batch = 8, 2
    meshes = [(1, 1, 1, 1, 1), (1, 2, 1, 1, 1), (1, 1, 2, 2, 1), (2, 1, 2, 1, 2)]
    steps = [0, 1, 5, 123]
    orders = [digests(cfg, MeshSpec(AXES, sizes), steps) for sizes in meshes]
    expected = [
        hashlib.sha256(np.stack([x[:, :-1], x[:, 1:]], axis=-1).tobytes()).hexdigest()
        for x in (source_of(cfg).tokens(step, range(8)) for step in steps)
    ]
    assert orders == [expected] * 4 and len(set(expected)) == 4
    tokens = np.concatenate([source_of(cfg).tokens(step, range(8)) for step in range(20)])
    of_megatron = (tokens[:, :-1] >= 128).mean(axis=1) > 0.5
    assert of_megatron.sum() == 112, "not 0.7 of the sequences"


@pytest.mark.parametrize("name", FORMATS)
def test_blend_accepts_every_token_format(name, tmp_path, blend):
    path = write(name, tmp_path / "mine", random_documents(50, eos=256))
    entry = {"name": name, "paths": [path], "eos_id": 256, "validation": 0.0, "weight": 2}
    data = open_data(config({"name": "blend", "blend": [entry, blend[1]], "path": "unused/", "pack": True}, tmp_path))
    assert data.eos_id == 256 and whole(data.corpora[0].train) == np.concatenate(random_documents(50, eos=256)).tolist()


@pytest.mark.full
def test_a_run_on_a_blend_resumes_bit_for_bit(tmp_path, blend):
    make = lambda name, *more: [
        "recipe=llama_debug", "logger=jsonl", "data=blend", spelled(blend), "data.tokenizer=byte", "data.pack=true",
        "data.validation=0.2", "train.steps=4", "train.seq_len=32", "optim.warmup=0", "train.eval_every=2",
        "hardware.device=cpu", "hardware.peak_tflops=0.1", f"data.cache={tmp_path}/cache",
        f"run.dir={tmp_path / name}", *more,
    ]  # fmt: skip
    assert main(make("whole")) == 0
    assert main(make("parts", "train.stop_at=2")) == 0 and main(make("parts", "resume=auto")) == 0
    assert [r["loss"] for r in metrics_of(tmp_path / "parts")] == [r["loss"] for r in metrics_of(tmp_path / "whole")]
    one, other = (tensor_bytes(checkpoint_of(tmp_path / name, 4)) for name in ("whole", "parts"))
    assert one == other


# ------------------------------------------------------------------------------------------------------------ refused


def cut(path: str, size: int) -> None:
    """Removes the last `size` bytes of a file."""
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:-size])


def extend(path: str) -> None:
    """Adds two bytes at the end of a file."""
    Path(path).write_bytes(Path(path).read_bytes() + b"ab")


def patch(path: str, at: int, new: bytes) -> None:
    data = bytearray(Path(path).read_bytes())
    data[at : at + len(new)] = new
    Path(path).write_bytes(bytes(data))


DAMAGE = {  # format, what is done to the files, what the message says
    "no file": ("megatron", lambda p: [Path(f"{p}.{s}").unlink() for s in ("bin", "idx")], "there is no PREFIX.idx"),
    "no .bin": ("megatron", lambda p: Path(f"{p}.bin").unlink(), "corpus.bin is missing"),
    "no .idx": ("megatron", lambda p: Path(f"{p}.idx").unlink(), "corpus.idx is missing"),
    "a short .bin": ("megatron", lambda p: cut(f"{p}.bin", 8), "corpus.bin is cut short: .* but corpus.idx counts"),
    "a .bin that ends in an id": ("megatron", lambda p: cut(f"{p}.bin", 1), "a multiple of 2: the file is cut short"),
    "a longer .bin": ("megatron", lambda p: extend(f"{p}.bin"), "corpus.bin holds more"),
    "a short .idx": ("megatron", lambda p: cut(f"{p}.idx", 3), "corpus.idx is cut short: .* its header counts"),
    "a header alone": ("megatron", lambda p: Path(f"{p}.idx").write_bytes(b"MMIDIDX\0\0"), "cut short: 9 bytes"),
    "another magic": ("megatron", lambda p: patch(f"{p}.idx", 0, b"TNTIDX"), "corpus.idx is not an index of Megatron"),
    "another version": ("megatron", lambda p: patch(f"{p}.idx", 9, b"\2"), "has version 2: only version 1"),
    "floats": ("megatron", lambda p: patch(f"{p}.idx", 17, b"\7"), "holds float32, not token ids"),
    "an unknown type": ("megatron", lambda p: patch(f"{p}.idx", 17, b"\x2a"), "unknown token id type .42"),
    "lengths that lie": ("megatron", lambda p: patch(f"{p}.idx", 34, b"\x07"), "but corpus.idx counts"),
    "offsets that lie": ("megatron", lambda p: patch(f"{p}.idx", 34 + 80 + 8, b"\x07"), "1 starts at byte 7, not"),
    "documents that lie": ("megatron", lambda p: patch(f"{p}.idx", 34 + 240 + 8, b"\x63"), "do not match its 20"),
    "a short shard": ("llmc", lambda p: cut(p, 2), "corpus.bin is cut short: .* its header counts"),
    "a longer shard": ("llmc", lambda p: extend(p), "corpus.bin is damaged"),
    "a shard's header alone": ("llmc", lambda p: Path(p).write_bytes(b"abcd"), "corpus.bin is cut short: 4 bytes"),
    "flat tokens": ("llmc", lambda p: np.arange(900, dtype="<u2").tofile(p), "is not an llm.c shard: it begins with"),
    "a later version": ("llmc", lambda p: patch(p, 4, b"\2"), "begins with 20240520 and version 2, not 20240520 with"),
    "a short .ds": ("datatrove", lambda p: cut(p, 2), "corpus.ds is cut short: .* but corpus.ds.metadata counts"),
    "a .ds without metadata": (
        "datatrove", lambda p: (cut(p, 2), Path(f"{p}.metadata").unlink()), "neither 2 nor 4 for each of the",
    ),
    "a short index": ("datatrove", lambda p: cut(f"{p}.index", 8), "but corpus.ds.index counts"),
    "a cut index": ("datatrove", lambda p: cut(f"{p}.index", 3), "corpus.ds.index is cut short"),
    "an index that goes back": ("datatrove", lambda p: patch(f"{p}.index", 8, bytes(8)), "document 1 ends before"),
    "metadata of nothing": ("datatrove", lambda p: Path(f"{p}.metadata").write_text("gpt2"), "metadata is damaged"),
    "tokens of 8 bytes": ("datatrove", lambda p: Path(f"{p}.metadata").write_text("x|8\n1"), "tokens of 8 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_token_file_is_one_line_error(case, tmp_path):
    name, spoil, message = DAMAGE[case]
    path = write(name, tmp_path / "corpus", [document + 1 for document in random_documents(20, seed=3)])
    open_data(config({"name": name, "path": path}, tmp_path))  # the cache does not hide the damage
    spoil(path)
    with pytest.raises(ConfigError, match=message) as caught:
        open_data(config({"name": name, "path": path}, tmp_path))
    line = str(caught.value)
    assert "\n" not in line and line.startswith(f"data.path={path}: "), line


@pytest.mark.parametrize("name", FORMATS)
def test_token_id_beyond_vocab_size_is_refused(name, tmp_path):
    documents = [np.array([5, 6, 0]), np.array([7, 250, 300, 0])]
    paths = [write(name, tmp_path / "a", documents[:1] * 9), write(name, tmp_path / "b", documents)]
    message = (
        r"token id 300 at offset 5 of .*/b\..* is outside model.vocab_size=299: set model.vocab_size to at least 301"
    )
    with pytest.raises(ConfigError, match=message):
        open_data(config({"name": name, "paths": paths}, tmp_path, vocab_size=299, seq_len=4))


SETTINGS = {
    "no path": ({"name": "megatron"}, "data.path is missing: data=megatron needs it, e.g. data.path=corpus_text_doc"),
    "both": ({"name": "llmc", "path": "a", "paths": ["b"]}, "data.path=a and data.paths=.*: data=llmc reads only one"),
    "paths of text": ({"name": "text", "path": "a", "paths": ["b"]}, "only data=megatron, data=llmc, data=datatrove"),
    "a type": ({"name": "megatron", "path": "a", "dtype": "uint32"}, "reads the dtype from its files"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_contradicting_settings_are_refused(case, tmp_path):
    data, message = SETTINGS[case]
    with pytest.raises(ConfigError, match=message):
        check_data(config(data, tmp_path).data)


MISTAKES = {
    "no files": ({"path": "none*"}, "there is no PREFIX.idx: give the prefix"),
    "a near miss": ({"path": "bookz"}, "there is no PREFIX.idx: did you mean 'books'"),
    "twice": ({"paths": ["a", "a.bin"]}, "lists .*/a.bin twice: list each file once"),
    "an end that is nowhere": (
        {"path": "a", "pack": True, "eos_id": 250},
        "data.eos_id=250: data.path=.* does not contain this token, so no document ends",
    ),
    "all held out": ({"path": "a", "validation": 0.999999}, "every document is in the validation split"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_bad_megatron_path_is_one_line_error(case, tmp_path, monkeypatch):
    settings, message = MISTAKES[case]
    write_megatron(tmp_path / "a", random_documents(20))
    write_megatron(tmp_path / "books", random_documents(20))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        open_data(config({"name": "megatron", **settings}, tmp_path))
    assert "\n" not in str(caught.value)


NEAR = {
    "source": ("data=megatronn", "data=megatronn: no such data; did you mean 'megatron'"),
    "key": ("data.pathss=[a]", "data.pathss: no such key; did you mean 'data.paths'"),
}


@pytest.mark.parametrize("case", NEAR)
def test_misspelt_name_error_suggests_near_miss(case):
    with pytest.raises(ConfigError, match=NEAR[case][1]):
        load_config(["data=megatron", NEAR[case][0]] if case == "key" else [NEAR[case][0]])


def test_data_paths_is_a_list_on_command_line():
    cfg = load_config(["data=datatrove", "data.paths=[a.ds,b/]"])
    assert (cfg.data.name, cfg.data.paths) == ("datatrove", ["a.ds", "b/"])


@pytest.mark.parametrize("known_by", ["index", "metadata", "dtype"])
def test_datatrove_token_size_comes_from_index_metadata_or_dtype(known_by, tmp_path):
    documents = random_documents(40)
    path = write_datatrove(tmp_path / "a.ds", documents, "<u4", known_by == "index", known_by == "metadata")
    dtype = "uint32" if known_by == "dtype" else "uint16"
    data = config({"name": "datatrove", "path": str(path), "dtype": dtype}, tmp_path)
    assert whole(open_data(data).train[0]) == np.concatenate(documents).tolist()
