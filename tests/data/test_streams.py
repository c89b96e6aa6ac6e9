"""Datasets of the library `datasets`: tokenised into the cache, or streamed while training."""

import itertools
import json
import logging
import pickle
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ndtrain.config import ConfigError, DataConfig
from ndtrain.data import Prefetcher, hf, open_data, rows_of, store, token_reader, tokenizer
from ndtrain.data.hf import open_dataset_corpus
from ndtrain.data.token_reader import TokenReader
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.train import main
from tests.data.test_data import config, documents
from tests.lib.helpers import checkpoint_of, tensor_bytes
from tests.lib.helpers import rows as metrics_of
from tests.lib.ranks import run_ranks

EOS = 256


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The library, with a cache of the test's own."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "library")
    return library


# ------------------------------------------------------------------------------ a streaming dataset without the library


class Shards:
    """The part of `datasets.IterableDataset` that a `TokenReader` uses.

    `states` says how its `state_dict` behaves: as it should ("good"); as in some versions, "frozen" where it was loaded
    or "ahead" of what was read; "refused" when it is loaded; "absent".
    """

    def __init__(self, shards: list[list], states: str = "good"):
        self.shards, self.states, self.num_shards = shards, states, len(shards)

    def shard(self, num_shards: int, index: int) -> "Shard":
        assert num_shards == self.num_shards
        return Shard(self.shards[index], self.states) if self.states != "absent" else Stateless(self.shards[index])


class Stateless:
    def __init__(self, texts: list):
        self.texts = texts

    def __iter__(self):
        for text in self.texts:
            yield {"text": text}


class Shard(Stateless):
    def __init__(self, texts: list, states: str):
        super().__init__(texts)
        self.states, self.at, self.loaded = states, 0, False

    def __iter__(self):
        for text in self.texts[self.at :]:
            self.at += not (self.states == "frozen" and self.loaded)
            yield {"text": text}

    def state_dict(self) -> dict:
        return {"at": self.at + (self.states == "ahead")}

    def load_state_dict(self, state: dict) -> None:
        if self.states == "refused":
            raise KeyError("from another version")
        self.at, self.loaded = state["at"], True


BYTE = tokenizer.load_tokenizer(DataConfig(tokenizer="byte"), list, Path())


def reader_of(shards: Shards, saved: dict | None = None, seed: int = 0, shuffle: bool = False) -> TokenReader:
    data = DataConfig(name="hf", path="here", shuffle=shuffle, tokenizer="byte", vocab_size=300)
    return TokenReader(shards, data, BYTE, seed, saved)


def read_tokens(reader: TokenReader, count: int) -> list[int]:
    return reader.read(count)[0][:-1].tolist()


def encoded(texts) -> list[int]:
    return [i for text in texts if text for i in (*text.encode(), EOS)]


texts = st.lists(st.lists(st.text("abcd", max_size=12), max_size=6), min_size=1, max_size=4).filter(
    lambda shards: any(text for shard in shards for text in shard)
)


@given(texts, st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_reader_repeats_documents_without_end(shards, counts):
    once = encoded(itertools.chain(*shards))
    expected = once * (sum(counts) // len(once) + 2)
    reader = reader_of(Shards(shards))
    for count in counts:
        tokens, names = reader.read(count)
        assert tokens.dtype == np.int32 and tokens.tolist() == expected[: count + 1]
        assert names[0][0] <= 0 and all(at <= count for at, _ in names)
        expected = expected[count:]


def assert_goes_on(make, count: int, steps: int) -> None:
    """A reader resumed from any of its states, or from a state of a resumed reader, continues as the original."""
    whole, expected, states = make(), [], []
    for _ in range(steps):
        states.append(json.dumps(whole.state()))
        expected.append(whole.read(count)[0].tolist())
    for start, state in enumerate(states):
        again = make(json.loads(state))
        for step in range(start, min(start + 3, steps)):
            if step > start:
                assert make(again.state()).read(count)[0].tolist() == expected[step]
            assert again.read(count)[0].tolist() == expected[step]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of three rows, and documents that come in several spans of tokens."""
    monkeypatch.setattr(token_reader, "BLOCK_ROWS", 3)
    monkeypatch.setattr("ndtrain.data.documents.CHUNK_CHARACTERS", 5)
    monkeypatch.setattr(token_reader, "_BATCH_CHARACTERS", 7)


@given(shards=texts, count=st.integers(1, 40), seed=st.integers(0, 2**40), shuffle=st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reader_resumes_from_any_state(small_blocks, shards, count, seed, shuffle):
    assert_goes_on(partial(reader_of, Shards(shards), seed=seed, shuffle=shuffle), count, 6)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("states", ["good", "frozen", "ahead", "refused", "absent"])
def test_reader_resumes_with_wrong_library_states(small_blocks, states, shuffle):
    shards = [[f"{c}{n}" * (1 + n % 3) for n in range(11)] for c in "ab"]
    assert_goes_on(partial(reader_of, Shards(shards, states), shuffle=shuffle), 23, 16)


def epochs(reader: TokenReader, length: int, count: int) -> list[list[int]]:
    """The documents of each of `count` epochs, all of `length` tokens, by their first token."""
    return [read_tokens(reader, length)[::2] for _ in range(count)]


def test_each_epoch_has_its_own_shuffle(monkeypatch):
    monkeypatch.setattr(token_reader, "BLOCK_ROWS", 6)
    shards = [[chr(65 + 10 * s + n) for n in range(10)] for s in range(6)]
    make = partial(reader_of, Shards(shards), shuffle=True)
    orders = epochs(make(), 120, 5)
    assert all(sorted(order) == list(range(65, 125)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5 and sorted(orders[0]) not in orders
    assert {order[0] // 10 for order in epochs(make(), 120, 30)} > {7, 9, 11}  # shards come in any order
    assert epochs(make(seed=1), 120, 5) != orders == epochs(make(), 120, 5)
    assert epochs(reader_of(Shards(shards)), 120, 2) == [list(range(65, 125))] * 2
    rows = (
        np.array(epochs(reader_of(Shards([list(itertools.chain(*shards))]), shuffle=True), 120, 3)) - 65
    )  # a shard of ten blocks
    assert (rows // 6 == np.repeat(np.arange(10), 6)).all() and len({tuple(b) for b in rows.reshape(30, 6) % 6}) > 20


@pytest.mark.parametrize("shards", [[], [[]], [["", ""], [None]]])
def test_a_streaming_dataset_without_text_is_an_error_not_a_loop(shards):
    with pytest.raises(ConfigError, match=r"data.path=here: the streaming dataset had no text in a whole epoch"):
        reader_of(Shards(shards)).read(4)


def test_block_ends_at_character_limit(monkeypatch):
    monkeypatch.setattr(token_reader, "BLOCK_CHARACTERS", 10)
    reader = reader_of(Shards([["x" * 6] * 9]))
    reader.read(6 * 7)
    assert reader.state()["row"] == 6


def test_changed_streaming_dataset_resumes_with_warning(caplog, monkeypatch):
    monkeypatch.setattr(token_reader, "BLOCK_ROWS", 2)
    first = reader_of(Shards([["aa", "bb", "cc", "dd", "ee"]]))
    first.read(9)  # into the last of four documents of three tokens
    again = reader_of(Shards([["AA", "BB", "CC", "DD", "EE"]]), first.state())
    assert read_tokens(again, 6) == encoded(["DD", "EE"])
    assert "has changed since the checkpoint: the streaming dataset resumes at row 2 of shard 0" in caplog.text
    short = reader_of(Shards([["aa", "bb"]]), first.state())
    assert read_tokens(short, 6) == encoded(["aa", "bb"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x", "id": 1}, r"no column 'text': set data.text_key to one of its columns \(body, id\)"),
        ({"text": 3}, "data.path=here: row 1: column 'text' is not a string: set data.text_key"),
    ],
)
def test_a_row_without_text_is_named(row, message, monkeypatch):
    monkeypatch.setattr(Stateless, "__iter__", lambda self: iter([{"text": "x"}, row]))
    with pytest.raises(ConfigError, match=message):
        reader_of(Shards([[]], "absent")).read(2)


# ---------------------------------------------------------------------------------------------- local data, tokenised

TEXTS = [f"Document {n}: " + "Ünal 狐 jumps\n" * (1 + n % 4) for n in range(50)]


def write_jsonl(path: Path, texts=TEXTS, key: str = "text") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({key: text, "n": n}) + "\n" for n, text in enumerate(texts)), encoding="utf-8")
    return str(path)


def write_kind(datasets, root: Path, kind: str) -> dict[str, str]:
    """The settings of a local dataset with TEXTS in split train, and the first ten of them in split held."""
    both = {name: datasets.Dataset.from_dict({"text": t}) for name, t in (("train", TEXTS), ("held", TEXTS[:10]))}
    if kind == "jsonl file":
        return {"path": write_jsonl(root / "a.jsonl")}
    if kind == "jsonl folder":
        write_jsonl(root / "train" / "a.jsonl", TEXTS[:20])
        write_jsonl(root / "train" / "b.jsonl", TEXTS[20:])
        return {"path": str(root)}
    if kind == "glob":
        return write_kind(datasets, root, "jsonl folder") | {"path": str(root / "train" / "*.jsonl")}
    if kind == "parquet":
        root.mkdir()
        both["train"].to_parquet(root / "train.parquet")
        return {"path": str(root)}
    if kind == "saved dataset":
        both["train"].save_to_disk(root)
    else:
        datasets.DatasetDict(both).save_to_disk(root)
    return {"path": str(root)}


KINDS = ["jsonl file", "jsonl folder", "glob", "parquet", "saved dataset", "saved splits"]


@pytest.mark.parametrize("kind", KINDS)
def test_local_dataset_equals_jsonl_of_same_texts(datasets, tmp_path, kind):
    plain = open_data(config({"name": "jsonl", "path": write_jsonl(tmp_path / "plain.jsonl")}, tmp_path))
    data = open_data(config({"name": "hf", **write_kind(datasets, tmp_path / "set", kind)}, tmp_path))
    assert np.array_equal(data.train[0], plain.train[0]) and data.fingerprint == plain.fingerprint
    assert data.validation == () and data.eos_id == plain.eos_id and documents(data) == TEXTS
    assert data.describe() == plain.describe() == f"{len(plain.train[0]):,} training tokens"


def test_a_bpe_is_trained_on_a_dataset(datasets, tmp_path):
    options = {"tokenizer": "bpe", "vocab_size": 290}
    data = open_data(config({"name": "hf", **write_kind(datasets, tmp_path / "set", "parquet"), **options}, tmp_path))
    plain = open_data(config({"name": "jsonl", "path": write_jsonl(tmp_path / "plain.jsonl"), **options}, tmp_path))
    assert data.vocab_size == 290 and np.array_equal(data.train[0], plain.train[0])


def test_eval_split_is_validation_split(datasets, tmp_path):
    settings = {"name": "hf", **write_kind(datasets, tmp_path / "set", "saved splits")}
    data = open_data(config({**settings, "eval_split": "held", "validation": 0.4}, tmp_path))
    assert documents(data) == TEXTS and data.validation[0].tolist() == encoded(TEXTS[:10])
    some = open_data(config({**settings, "validation": 0.4}, tmp_path))
    assert len(some.validation[0]) > 0 and len(some.train[0]) + len(some.validation[0]) == len(data.train[0])
    other = open_data(config({**settings, "split": "held"}, tmp_path))
    assert documents(other) == TEXTS[:10]


def test_dataset_is_tokenised_once_and_again_if_changed(datasets, tmp_path, caplog):
    caplog.set_level(logging.INFO, store.__name__)
    cfg = config({"name": "hf", "path": write_jsonl(tmp_path / "a.jsonl")}, tmp_path)
    first = open_data(cfg).fingerprint
    assert open_data(cfg).fingerprint == first and caplog.text.count("tokenising") == 1
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS[:-1], "another one"])
    assert open_data(cfg).fingerprint != first and caplog.text.count("tokenising") == 2


def test_rows_without_text_are_skipped(datasets, tmp_path):
    datasets.Dataset.from_dict({"text": ["one", None, "", "two" * 9]}).save_to_disk(tmp_path / "set")
    data = open_data(config({"name": "hf", "path": str(tmp_path / "set")}, tmp_path))
    assert documents(data) == ["one", "two" * 9]


@pytest.mark.parametrize("size", [1, 300, 10**6])
def test_parts_of_dataset_make_up_whole(datasets, tmp_path, size):
    for held_out in ({"eval_split": "held"}, {"validation": 0.4}):
        settings = {"name": "hf", **write_kind(datasets, tmp_path / next(iter(held_out)), "saved splits"), **held_out}
        whole = open_dataset_corpus(config(settings, tmp_path).data)
        parts = [pickle.loads(pickle.dumps(part)) for part, _ in whole.partition(size)]
        assert [chunk for part in parts for chunk in part.chunks()] == list(whole.chunks())
        splits = 1 + ("eval_split" in held_out)
        assert len(parts) == {1: 40 + 10 * splits, 10**6: splits}.get(size, len(parts)) and len(parts) >= splits


# ------------------------------------------------------------------------------------------------- errors of datasets

FAULTS = {
    "no such split": ({"split": "dev"}, "data.split=dev: data.path=.* has no such split: choose one of train, held"),
    "no such eval split": ({"eval_split": "dev"}, "data.eval_split=dev: .* choose one of train, held"),
    "no such column": ({"text_key": "body"}, r"no column 'body': set data.text_key to one of its columns \(text\)"),
    "no such folder": (
        {"path": "/no/such"},
        "data.path=/no/such: no such file or folder: give an existing one, or the",
    ),
    "no such file": ({"path": "none.parquet"}, "data.path=none.parquet: no such file or folder"),
    "nothing matches": ({"path": "/no/*.jsonl"}, "data.path=/no/.*: datasets cannot open it"),
    "end of text": ({"eos_id": 3}, "data.eos_id=3: data=hf takes it from data.tokenizer"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", FAULTS)
def test_dataset_that_cannot_be_opened_is_one_line_error(datasets, tmp_path, case, streaming):
    changes, message = FAULTS[case]
    settings = {"name": "hf", **write_kind(datasets, tmp_path / "set", "saved splits"), "streaming": streaming}
    with pytest.raises(ConfigError, match=message) as caught:
        open_data(config(settings | changes, tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_error_becomes_one_line(datasets, tmp_path, monkeypatch, streaming):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'some/set'\n on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError) as caught:
        open_data(config({"name": "hf", "path": "some/set", "streaming": streaming}, tmp_path))
    cause = "datasets cannot open it (ConnectionError: Couldn't reach 'some/set' on the Hub): give local files, or"
    assert str(caught.value).startswith(f"data.path=some/set: {cause}")


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_datasets_package_error_names_install_command(tmp_path, monkeypatch, streaming):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data=hf needs the package datasets: pip install 'ndtrain\[hf\]'"):
        open_data(config({"name": "hf", "path": "some/set", "streaming": streaming}, tmp_path))


def test_files_unfit_for_datasets_are_refused(datasets, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"data=hf reads files that end in .json, .* choose data=text for plain text"):
        open_data(config({"name": "hf", "path": str(tmp_path / "a.txt")}, tmp_path))
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": \n')
    for streaming in (False, True):
        with pytest.raises(ConfigError, match=r"data.path=.*a.jsonl: .*"):
            open_data(config({"name": "hf", "path": str(tmp_path / "a.jsonl"), "streaming": streaming}, tmp_path))
    (tmp_path / "b.jsonl").write_text('{"text": 1}\n')
    for streaming in (False, True):
        with pytest.raises(
            ConfigError, match=r"row 0.* is not a string: set data.text_key to the column with the text"
        ):
            open_data(config({"name": "hf", "path": str(tmp_path / "b.jsonl"), "streaming": streaming}, tmp_path))


# ------------------------------------------------------------------------------------------------------------ streaming

BATCH, LENGTH = 4, 8


def streaming_config(tmp_path: Path, dp: int = 1, **data):
    cfg = config({"name": "hf", "streaming": True, **data}, tmp_path, seq_len=LENGTH)
    cfg.train.global_batch, cfg.mesh.dp = BATCH, dp
    return cfg


def write_shards(root: Path) -> str:
    """Three files of a few short documents, one of which holds a document of five global batches."""
    write_jsonl(root / "a.jsonl", [f"a{n}" * (1 + n % 3) for n in range(9)])
    write_jsonl(root / "b.jsonl", ["short", "long" * (5 * BATCH * LENGTH // 4), "short again"])
    write_jsonl(root / "c.jsonl", [f"c{n}" for n in range(20)])
    return str(root)


def source_of(cfg, step: int = 0, saved: dict | None = None, data=None):
    mesh = Mesh(MeshSpec.of(cfg.mesh), *world(cfg))
    return (data or open_data(cfg)).sequences(cfg, mesh, step, saved)


def world(cfg):
    rank = torch.distributed.get_rank() if cfg.mesh.dp > 1 else 0
    return rank, torch.device("cpu")


def read(cfg, steps: range, saved: dict | None = None, data=None) -> tuple[list[np.ndarray], list[dict | None]]:
    """This rank's rows of each step, and the state before each, of a source that begins with the first of them."""
    source = source_of(cfg, steps.start, saved, data)
    rank, _ = world(cfg)
    batches, states = [], []
    for step in steps:
        states.append(json.loads(json.dumps(source.state(step))))
        batches.append(source.tokens(step, rows_of(rank, cfg.mesh.dp, BATCH)))
    source.close()
    return batches, states


def read_from_each(cfg, states: list[dict | None], count: int) -> list:
    """What `read` returns from each of the states on."""
    data = open_data(cfg)
    return [read(cfg, range(step, step + count), saved, data) for step, saved in enumerate(states)]


STEPS = 30  # of 32 tokens: more than two epochs


@pytest.mark.full
@pytest.mark.parametrize("shuffle", [False, True])
def test_stream_is_same_on_any_ranks_and_resumed_at_any_step(datasets, tmp_path, monkeypatch, shuffle):
    make = partial(streaming_config, tmp_path, path=write_shards(tmp_path / "set"), shuffle=shuffle)
    whole, states = read(make(), range(STEPS))
    if not shuffle:
        flat = np.concatenate([row[:-1] for step in whole for row in step]).tolist()
        once = encoded([json.loads(line)["text"] for p in "abc" for line in (tmp_path / f"set/{p}.jsonl").open()])
        assert flat == (once * 9)[: len(flat)] and len(flat) > 2 * len(once)
    for step in whole:
        assert all((step[1:, 0] == step[:-1, -1]).tolist())  # neighbours share a token
    assert states[0] is None and max(s["token"] for s in states[1:]) > LENGTH * BATCH and states[-1]["epoch"] >= 2

    for dp in (2, 4):
        ranks = run_ranks(read_from_each, dp, make(dp=dp), states, 3)
        for start in range(STEPS):
            for step in range(3):
                together = np.concatenate([results[start][0][step] for results in ranks])
                if start + step < STEPS:
                    assert np.array_equal(together, whole[start + step]), (dp, start, step)
            assert all(s is None for results in ranks[1:] for s in results[start][1])
            again = ranks[0][start][1]
            assert again[: STEPS - start] == states[start : start + 3]
    for start in range(0, STEPS, 4):  # and back to one
        batches, again = read(make(), range(start, min(start + 6, STEPS)), states[start])
        assert all(np.array_equal(*pair) for pair in zip(batches, whole[start:], strict=False))
        assert again == states[start : start + 6]


def test_resume_opens_library_at_saved_place(datasets, tmp_path, monkeypatch):
    monkeypatch.setattr(token_reader, "BLOCK_ROWS", 3)
    monkeypatch.setattr(hf, "_SHARDS", 4)  # of a saved dataset
    for kind in KINDS:
        cfg = streaming_config(tmp_path, **write_kind(datasets, tmp_path / kind, kind), shuffle=False)
        whole, states = read(cfg, range(60))
        at = max(step for step in range(1, 50) if states[step]["row"] > 3)
        with monkeypatch.context() as patch:
            tried, first = [], TokenReader._first_block
            patch.setattr(TokenReader, "_first_block", lambda *args: tried.append(args[-1]) or first(*args))  # noqa: B023
            batches, again = read(cfg, range(at, 60), states[at])
        assert tried == [states[at]["place"]] and tried != [None]
        assert np.array_equal(batches, whole[at:])
        for state, expected in zip(again, states[at:], strict=True):  # after which some versions' states are frozen
            assert state | {"place": None} == expected | {"place": None}


def test_prefetched_stream_knows_state_of_each_step(datasets, tmp_path):
    cfg = streaming_config(tmp_path, path=write_shards(tmp_path / "set"))
    whole, states = read(cfg, range(12))
    source = source_of(cfg)
    ahead = Prefetcher(lambda step: source.tokens(step, range(BATCH)), 0, 12, depth=4)
    for step in range(12):
        assert source.state(step) == states[step]
        assert np.array_equal(ahead.get(step)[0], whole[step])
    ahead.close()
    with pytest.raises(ValueError, match="before step 0 is not known: the next step is 40"):
        source = source_of(cfg, 0)
        for step in range(40):
            source.tokens(step, [0])
        source.state(0)
    with pytest.raises(ValueError, match="step 7 of a streaming dataset was requested, but the next step is 40"):
        source.tokens(7, [0])
    with pytest.raises(IndexError):
        source.tokens(40, [BATCH])


def test_the_state_of_another_streaming_dataset_is_not_used(datasets, tmp_path, caplog):
    cfg = streaming_config(tmp_path, path=write_shards(tmp_path / "set"))
    whole, states = read(cfg, range(9))
    for change in ({"shuffle": False}, {"path": write_jsonl(tmp_path / "other.jsonl")}, {"tokenizer": "bpe"}):
        other = streaming_config(tmp_path, **{"path": cfg.data.path, **change})
        caplog.clear()
        batches, _ = read(other, range(8, 9), states[8])
        assert np.array_equal(batches[0], read(other, range(1))[0][0])
        assert "not the streaming dataset of the checkpoint" in caplog.text
    moved = streaming_config(tmp_path, path=cfg.data.path)
    moved.train.global_batch = 2  # goes on at the same token
    source = source_of(moved, 16, states[8])
    assert np.array_equal(source.tokens(16, range(2)), whole[8][:2])


def test_where_names_the_row_of_a_streaming_dataset(datasets, tmp_path):
    cfg = streaming_config(tmp_path, path=write_shards(tmp_path / "set"), shuffle=False)
    source = source_of(cfg)
    for step in range(3):
        source.tokens(step, range(BATCH))
    name = f"the streaming dataset data.path={cfg.data.path}"
    assert source.where(0, 0) == f"sequence 0 of {name} (from row 0 of shard 0 in epoch 0 on)"
    assert source.where(2, 3) == f"sequence 11 of {name} (from row 1 of shard 1 in epoch 0 on)"
    assert source.where(9, 1) == f"sequence 37 of {name}"


def test_validation_of_streaming_dataset_is_bounded(datasets, tmp_path, monkeypatch):
    monkeypatch.setattr("ndtrain.data.open._VALIDATION_LIMIT", len(TEXTS[0]) + 1)
    settings = write_kind(datasets, tmp_path / "set", "saved splits")
    data = open_data(streaming_config(tmp_path, **settings, eval_split="held"))
    assert data.validation[0].tolist() == encoded(TEXTS[:2])


def test_open_data_opens_streaming_dataset(datasets, tmp_path):
    held = {"validation": 0.5, "eval_split": "held"}
    settings = write_kind(datasets, tmp_path / "set", "saved splits")
    data = open_data(streaming_config(tmp_path, **settings, **held, tokenizer="bpe", vocab_size=280))
    assert data.describe() == f"the streaming dataset {settings['path']}"
    assert data.vocab_size == data.tokenizer.vocab_size == 280 and data.eos_id == data.tokenizer.eos_id
    assert [data.tokenizer.decode(data.validation[0].tolist())] == ["<|endoftext|>".join([*TEXTS[:10], ""])]
    assert open_data(streaming_config(tmp_path, **settings)).validation == ()
    again = open_data(streaming_config(tmp_path, **settings, tokenizer="bpe", vocab_size=280))
    assert again.fingerprint == data.fingerprint
    assert open_data(streaming_config(tmp_path, **settings, split="held")).fingerprint != data.fingerprint


def failure(cfg, steps: range) -> str:
    try:
        read(cfg, steps)
    except ConfigError as error:
        return str(error)
    return ""


def test_reader_error_is_raised_on_every_rank(datasets, tmp_path):
    root = tmp_path / "set"
    write_jsonl(root / "a.jsonl", ["fine"] * 30)
    (root / "b.jsonl").write_text('{"text": "fine"}\n{"text": oh no\n')
    cfg = streaming_config(tmp_path, dp=2, path=str(root), shuffle=False)
    one, other = run_ranks(failure, 2, cfg, range(20), timeout=60)
    assert (
        one == other
        and one.startswith(f"the streaming dataset data.path={root} cannot be read in shard 1 of 2, epoch 0: ")
        and "\n" not in one
    )


def test_only_rank_0_opens_a_streaming_dataset(datasets, tmp_path, monkeypatch):
    cfg = streaming_config(tmp_path, path=write_shards(tmp_path / "set"))
    assert open_data(cfg).dataset is not None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(datasets, "load_dataset", pytest.fail)
    data = open_data(cfg)
    assert data.dataset is None and data.vocab_size == 257


def test_a_streamed_run_resumes_bit_for_bit(datasets, tmp_path):
    path = write_shards(tmp_path / "set")
    make = lambda name, *more: [
        "recipe=llama_debug", "logger=jsonl", "data=hf", f"data.path={path}", "data.streaming=true",
        "data.tokenizer=byte", "data.pack=true", "train.steps=6", "train.seq_len=16", "optim.warmup=0",
        "hardware.device=cpu", "hardware.peak_tflops=0.1", f"run.dir={tmp_path / name}", *more,
    ]  # fmt: skip
    assert main(make("whole")) == 0
    for more in (["train.stop_at=1"], ["train.stop_at=4", "resume=auto"], ["resume=auto"]):
        assert main(make("parts", *more)) == 0
    assert [r["loss"] for r in metrics_of(tmp_path / "parts")] == [r["loss"] for r in metrics_of(tmp_path / "whole")]
    one, other = (tensor_bytes(checkpoint_of(tmp_path / name, 6)) for name in ("whole", "parts"))
    assert one == other and not re.search("changed since", (tmp_path / "parts/logs/rank-0.log").read_text())
