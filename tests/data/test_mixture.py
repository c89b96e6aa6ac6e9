"""Mixtures of corpora: their proportion at every prefix, their order on every mesh, and what `data.blend` refuses."""

import hashlib
import json
import re
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ndtrain.config import AXES, ConfigError, load_config
from ndtrain.config.batch_sizes import BatchSizes
from ndtrain.config.data_checks import check_data
from ndtrain.data import microbatches, mixture, open_data, order, rows_of
from ndtrain.data.__main__ import main as prepare
from ndtrain.data.corpora import open_corpus
from ndtrain.data.mixture_order import MAX_PERIOD, MixtureOrder, integer_shares
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.mesh.sequence_sharding import SequenceSharding
from ndtrain.train import main
from tests.data.test_data import config
from tests.lib.helpers import checkpoint_of, tensor_bytes
from tests.lib.helpers import rows as metrics_of

WEIGHTS = [0.7, 0.2, 0.1]


@pytest.fixture
def letters(tmp_path):
    """Entries of three corpora, of 'a', of 'b' and of 'c' alone, that hold 200, 60 and 5 sequences of 16 tokens."""
    root = tmp_path / "corpora"
    root.mkdir()
    (root / "a").mkdir()
    for n in range(32):
        (root / "a" / f"{n}.txt").write_text("a" * (90 + n % 20))
    lines = [json.dumps({"body": "b" * (40 + n % 7)}) for n in range(23)]
    (root / "b.jsonl").write_text("\n".join(lines))
    tokens = np.full(5 * 16 + 3, ord("c"), "<u2")
    tokens[::20] = 256
    tokens.tofile(root / "c.bin")
    return [
        {"name": "text", "path": str(root / "a"), "weight": WEIGHTS[0]},
        {"name": "jsonl", "path": str(root / "b.jsonl"), "text_key": "body", "weight": WEIGHTS[1]},
        {"name": "bin", "path": str(root / "c.bin"), "eos_id": 256, "weight": WEIGHTS[2]},
    ]


def mixture_config(tmp_path, entries, **data):
    return config({"name": "blend", "blend": entries, **data}, tmp_path)


def source_of(cfg, step=0):
    return open_data(cfg).sequences(cfg, mesh=None, step=step, saved=None)


def corpus_of(tokens_BT: np.ndarray) -> np.ndarray:
    """Which of the corpora of `letters` each sequence is from."""
    letters = [set(row.tolist()) - {256} for row in tokens_BT]
    assert all(len(one) == 1 for one in letters)
    return np.array([one.pop() - ord("a") for one in letters])


# ------------------------------------------------------------------------------------------------------- the assignment


def lag(corpus: np.ndarray, shares: list[int]) -> Fraction:
    """The furthest that any corpus is, at any prefix, from its exact proportion."""
    period = sum(shares)
    n = np.arange(1, len(corpus) + 1)
    off = [np.abs(np.cumsum(corpus == c) * period - n * share).max() for c, share in enumerate(shares)]
    return Fraction(int(max(off)), period)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_mixture_order_keeps_proportion_at_every_prefix(weights):
    order = MixtureOrder(weights)
    corpus, ordinal = order.locate(np.arange(3 * order.period + 5))
    assert lag(corpus, order.shares) < 1
    assert np.array_equal(corpus[: order.period], corpus[order.period : 2 * order.period])
    for c in range(len(weights)):
        assert np.array_equal(ordinal[corpus == c], np.arange((corpus == c).sum()))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.lists(st.integers(0, 10**12), min_size=1))
def test_mixture_order_locates_any_number_directly(weights, numbers):
    order = MixtureOrder(weights)
    corpus, ordinal = order.locate(np.array(numbers))
    for k, c, j in zip(numbers, corpus, ordinal, strict=True):
        assert [int(x[0]) for x in order.locate(np.array([k]))] == [c, j]
        whole = sum(order.shares)
        assert abs(j * whole - k * order.shares[c]) < whole


def test_integer_shares_of_decimal_weights_are_exact():
    assert integer_shares([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert integer_shares([1, 2]) == [1, 2] and integer_shares([3.5]) == [1]
    assert integer_shares([0.3333, 0.6667]) == [3333, 6667]
    assert integer_shares([1e-3, 1]) == [1, 1000]


@given(st.lists(st.floats(1e-2, 1e3), min_size=2, max_size=6))
def test_integer_shares_round_fine_weights_to_a_millionth(weights):
    shares = integer_shares(weights)
    assert sum(shares) <= MAX_PERIOD and min(shares) >= 1
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share / sum(shares) - weight / sum(weights)) < 1 / MAX_PERIOD
    corpus = MixtureOrder(weights).locate(np.arange(2000))[0] if sum(shares) < 1 << 14 else None
    assert corpus is None or lag(corpus, shares) < 1


def test_mixture_order_keeps_proportion_at_longest_period():
    order = MixtureOrder([0.123456789, 0.2, 0.676543211])
    assert order.period == MAX_PERIOD or MAX_PERIOD % order.period == 0
    corpus, _ = order.locate(np.arange(order.period))
    assert lag(corpus, order.shares) < 1


# ---------------------------------------------------------------------------------------------------------- the order


def test_three_corpora_keep_proportion_over_1000_steps(tmp_path, letters):
    cfg = mixture_config(tmp_path, letters)
    cfg.train.global_batch = 4
    data = open_data(cfg)
    assert data.describe() == f"3 corpora, {sum(map(len, data.train)):,} training tokens"
    source = data.sequences(cfg, None, 0, None)
    seen = np.concatenate([corpus_of(source.tokens(step, range(4))) for step in range(1000)])
    assert np.bincount(seen).tolist() == [2800, 800, 400]
    assert lag(seen, [7, 2, 1]) < 1


def digests(cfg, spec: MeshSpec, steps) -> list[str]:
    """For each step a digest of the global batch as the data replicas and context ranks of a mesh see it together."""
    t, hashes = cfg.train, []
    sharding = SequenceSharding(t.seq_len, spec.size("cp"))
    sources = [source_of(cfg) for _ in range(spec.world_size)]  # none knows of another
    for step in steps:
        whole = torch.full((t.global_batch, t.seq_len, 2), -1)
        for rank, source in enumerate(sources):
            rows = rows_of(spec.index(rank, "dp", "fsdp"), spec.size("dp", "fsdp"), t.global_batch)
            part = spec.index(rank, "cp")
            batches = microbatches(source, step, rows, t.micro_batch, sharding, part)
            both = torch.cat([torch.stack([b.tokens, b.labels], dim=-1) for b in batches])
            index = torch.from_numpy(sharding.index(part)) if sharding.parts > 1 else torch.arange(t.seq_len)
            mine = whole[rows.start : rows.stop][:, index]
            assert ((mine == -1) | (mine == both)).all()  # as the others of the same replica have it
            whole[rows.start : rows.stop, index] = both
        assert (whole >= 0).all()
        hashes.append(hashlib.sha256(whole.numpy().tobytes()).hexdigest())
    return hashes


def test_mixture_order_is_same_on_six_meshes(tmp_path, letters):
    cfg = mixture_config(tmp_path, letters)
    cfg.train.global_batch, cfg.train.micro_batch = 8, 2
    meshes = [(1, 1, 1, 1, 1), (1, 2, 1, 1, 1), (1, 1, 4, 1, 1), (2, 2, 2, 1, 1), (1, 2, 1, 2, 2), (1, 1, 2, 4, 1)]
    steps = [0, 1, 2, 37, 501]
    orders = {sizes: digests(cfg, MeshSpec(AXES, sizes), steps) for sizes in meshes}
    assert len({tuple(hashes) for hashes in orders.values()}) == 1
    one_process = [
        hashlib.sha256(np.stack([x[:, :-1], x[:, 1:]], axis=-1).tobytes()).hexdigest()
        for x in (source_of(cfg).tokens(step, range(8)) for step in steps)
    ]
    assert orders[meshes[0]] == one_process and len(set(one_process)) == len(steps)


@pytest.mark.parametrize("shuffle", [False, True])
def test_mixture_resumed_within_epoch_has_same_order(tmp_path, letters, shuffle):
    cfg = mixture_config(tmp_path, letters, shuffle=shuffle)
    cfg.train.global_batch = 3
    whole = source_of(cfg)
    expected = [whole.tokens(step, range(3)) for step in range(120)]
    for start in (1, 7, 40, 90):
        again = source_of(cfg, start)
        assert whole.state(start) is None
        for step in range(start, start + 20):
            assert np.array_equal(again.tokens(step, [2, 0, 1]), expected[step][[2, 0, 1]])


def test_each_corpus_of_mixture_has_its_own_epochs(tmp_path):
    for c in "xy":
        np.arange(17 if c == "x" else 41, dtype="<u2").tofile(tmp_path / f"{c}.bin")
    entries = [{"name": "bin", "path": str(tmp_path / f"{c}.bin"), "weight": w} for c, w in (("x", 3), ("y", 1))]
    cfg = mixture_config(tmp_path, entries)
    cfg.train.seq_len, cfg.train.global_batch = 4, 8
    data = open_data(cfg)
    source, order = data.sequences(cfg, None, 0, None), data.mixture_order
    starts = np.concatenate([source.tokens(step, range(8))[:, 0] for step in range(20)])
    corpus, _ = order.locate(np.arange(160))
    for c, count in enumerate((4, 10)):
        mine = starts[corpus == c]
        epochs = mine[: len(mine) // count * count].reshape(-1, count)
        assert len(epochs) > 3 and all(sorted(e) == list(range(0, 4 * count, 4)) for e in epochs.tolist())
        assert len({tuple(e) for e in epochs.tolist()}) > 1  # shuffled anew


def test_mixture_of_one_corpus_equals_that_corpus(tmp_path, letters):
    entry = letters[0]
    alone = config({k: v for k, v in entry.items() if k != "weight"}, tmp_path)
    in_mixture = mixture_config(tmp_path, [entry])
    for cfg in (alone, in_mixture):
        cfg.train.global_batch = 5
    for step in (0, 1, 50, 1000):
        one, other = (source_of(cfg).tokens(step, range(5)) for cfg in (alone, in_mixture))
        assert np.array_equal(one, other)


def test_the_corpora_of_a_mixture_are_shuffled_differently(tmp_path):
    path = tmp_path / "x.bin"
    np.arange(401, dtype="<u2").tofile(path)
    cfg = config({"name": "blend", "blend": [{"name": "bin", "path": str(path), "weight": 1}] * 2}, tmp_path, 500, 4)
    cfg.train.global_batch = 200
    starts = source_of(cfg).tokens(0, range(200))[:, 0]
    corpus, _ = open_data(cfg).mixture_order.locate(np.arange(200))
    orders = [starts[corpus == c].tolist() for c in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_where_names_the_corpus_and_its_sequence(tmp_path, letters):
    cfg = mixture_config(tmp_path, letters, shuffle=False)
    cfg.train.global_batch = 4
    source, corpus = source_of(cfg), open_data(cfg).mixture_order.locate(np.arange(40))[0]
    for c, number in product(range(3), range(4)):
        step, i = divmod(int(np.flatnonzero(corpus == c)[number]), 4)
        assert source.where(step, i) == f"sequence {number % 5} of data.path={letters[c]['path']}"
    assert order.Sequences(np.arange(9), 4, BatchSizes(2), 0, False).where(1, 1) == "sequence 1 of the corpus"


# -------------------------------------------------------------------------------------------------------------- opening


def test_open_data_opens_every_corpus_of_mixture(tmp_path, letters):
    cfg = mixture_config(tmp_path, letters, validation=0.3)
    data = open_data(cfg)
    assert (data.tokenizer.vocab_size, data.vocab_size, data.eos_id) == (257, 257, 256)
    assert [chr(min(ids)) for ids in data.train] == ["a", "b", "c"]
    assert [chr(min(ids)) for ids in data.validation] == ["a", "b"]
    again = open_data(mixture_config(tmp_path, letters, validation=0.3))
    assert again.fingerprint == data.fingerprint
    other = [*letters[:2], {**letters[2], "weight": 0.2}]
    assert open_data(mixture_config(tmp_path, other, validation=0.3)).fingerprint != data.fingerprint
    Path(letters[2]["path"]).write_bytes(np.full(100, ord("c"), "<u2").tobytes())
    assert open_data(mixture_config(tmp_path, letters, validation=0.3)).fingerprint != data.fingerprint


def test_keys_of_data_are_defaults_of_blend_entries(tmp_path, letters):
    entries = [{"name": "text", "weight": 1}, {"name": "jsonl", "path": letters[1]["path"], "weight": 1}]
    base = {"path": letters[0]["path"], "text_key": "body", "validation": 0.25}
    entries = mixture.mixture_entries(mixture_config(tmp_path, entries, **base).data)
    assert [m.data.path for m in entries] == [letters[0]["path"], letters[1]["path"]]
    assert [m.data.validation for m in entries] == [0.25, 0.25] and entries[1].data.text_key == "body"
    assert [m.label for m in entries] == ["data.blend[0]", "data.blend[1]"]


def test_one_bpe_is_trained_on_corpora_by_weight(tmp_path, monkeypatch):
    for c in "pq":
        (tmp_path / c).mkdir()
        for n in range(400):
            (tmp_path / c / f"{n}.txt").write_text(f"{c}{c}{n} " * 10)
    entries = [{"name": "text", "path": str(tmp_path / c), "weight": w} for c, w in (("p", 3), ("q", 1))]
    cfg = mixture_config(tmp_path, entries, tokenizer="bpe", vocab_size=290)
    corpora = [open_corpus(m.data) for m in mixture.mixture_entries(cfg.data)]
    monkeypatch.setattr(mixture, "TOKENIZER_SAMPLE", 8000)
    texts = list(mixture._mixed_sample(corpora, [3, 1]))
    sizes = [sum(len(t) for t in texts if t.startswith(c)) for c in "pq"]
    assert 4500 < sizes[0] < 7500 and 1200 < sizes[1] < 2800
    data = open_data(cfg)
    assert data.vocab_size == data.tokenizer.vocab_size == 290
    merged = set(data.tokenizer._backend.get_vocab())
    assert {"pp", "qq"} <= merged
    trained = list((tmp_path / "cache").glob("bpe-*.json"))
    assert open_data(cfg).fingerprint == data.fingerprint and len(trained) == 1


def test_packing_refuses_corpora_with_different_end_tokens(tmp_path, letters):
    letters[2]["eos_id"] = ord("c")
    assert open_data(mixture_config(tmp_path, letters)).eos_id is None
    with pytest.raises(
        ConfigError, match=r"data.pack=true: documents end with token 256 in data.blend\[0\], but with 99"
    ):
        open_data(mixture_config(tmp_path, letters, pack=True))
    letters[2]["eos_id"] = 256
    assert open_data(mixture_config(tmp_path, letters, pack=True)).eos_id == 256


def prepared(tmp_path, entry: dict, name: str, *more: str) -> dict:
    """An entry for the corpus of `entry`, made ready by `python -m ndtrain.data prepare`."""
    keys = [f"data.{k}={v}" for k, v in entry.items() if k not in ("name", "weight")]
    out = tmp_path / name
    args = [
        f"out={out}",
        f"data={entry['name']}",
        *keys,
        "data.validation=0.2",
        "workers=1",
        f"data.cache={tmp_path}/c",
    ]
    assert prepare(["prepare", *args, *more]) == 0
    return {"name": "bin", "path": str(out), "weight": entry["weight"]}


def test_mixture_reads_prepared_corpora(tmp_path, letters):
    one, other = (prepared(tmp_path, e, n, "data.tokenizer=byte") for e, n in zip(letters[:2], "xy", strict=True))
    data = open_data(mixture_config(tmp_path, [one, other], pack=True, tokenizer="bpe"))  # which is not asked for
    plain = open_data(mixture_config(tmp_path, letters[:2], pack=True, validation=0.2))
    assert all(np.array_equal(*pair) for pair in zip(data.train, plain.train, strict=True))
    assert all(np.array_equal(*pair) for pair in zip(data.validation, plain.validation, strict=True))
    assert data.fingerprint == plain.fingerprint and data.tokenizer.digest() == plain.tokenizer.digest()
    assert data.eos_id == 256 and data.vocab_size == 257
    with_text = open_data(mixture_config(tmp_path, [one, letters[1]], pack=True))
    assert with_text.tokenizer.digest() == plain.tokenizer.digest()
    another = prepared(tmp_path, letters[1], "z", "data.tokenizer=bpe", "data.vocab_size=260")
    with pytest.raises(ConfigError, match=r"data.blend\[1\]: was prepared with another tokenizer than data.blend\[0\]"):
        open_data(mixture_config(tmp_path, [one, another]))
    with pytest.raises(ConfigError, match=r"data.blend\[1\]: was prepared with another tokenizer than data.tokenizer"):
        open_data(mixture_config(tmp_path, [letters[0], another]))


# ---------------------------------------------------------------------------------------- validation of token files


def write_tokens(path: Path, ids) -> str:
    np.asarray(ids, "<u2").tofile(path)
    return str(path)


def test_validation_path_of_bin_is_validation_split(tmp_path):
    train, held = (write_tokens(tmp_path / f"{n}.bin", range(n, n + 40)) for n in (1, 200))
    data = open_data(config({"name": "bin", "path": train, "validation_path": held}, tmp_path))
    assert [v.tolist() for v in data.validation] == [list(range(200, 240))]
    assert data.vocab_size == 240
    alone = open_data(config({"name": "bin", "path": train}, tmp_path))
    assert alone.validation == () and alone.fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (None, "data.validation_path=.*/no.bin: no such file or folder"),
        ([], "data.validation_path=.*: the file holds no tokens"),
        ([1, 300, 2], "data.validation_path=.*: token id 300 at offset 1 is outside model.vocab_size=300"),
        (b"123", "data.validation_path=.*: 3 bytes are not a multiple of the 2 of data.dtype=uint16"),
    ],
)
def test_bad_validation_path_is_refused(tmp_path, held, message):
    path = tmp_path / "no.bin"
    if isinstance(held, bytes):
        path.write_bytes(held)
    elif held is not None:
        write_tokens(path, held)
    train = write_tokens(tmp_path / "train.bin", range(40))
    with pytest.raises(ConfigError, match=message):
        open_data(config({"name": "bin", "path": train, "validation_path": str(path)}, tmp_path))


# ------------------------------------------------------------------------------------------------------------- errors

TEXT = {"name": "text", "path": "/corpus", "weight": 1}
ENTRIES = {
    "unknown key": (
        [{**TEXT, "wieght": 1}],
        r"data.blend\[0\].wieght: no such key; did you mean 'weight'\? known: name",
    ),
    "no weight": ([TEXT, {"name": "python"}], r"data.blend\[1\].weight is missing: give each corpus"),
    "weight zero": ([{**TEXT, "weight": 0}], r"data.blend\[0\].weight=0: must be a positive number"),
    "negative weight": ([{**TEXT, "weight": -0.5}], r"data.blend\[0\].weight=-0.5: must be a positive number"),
    "weight that is no number": ([{**TEXT, "weight": "half"}], "weight=half: must be a positive number"),
    "weight true": ([{**TEXT, "weight": True}], "weight=True: must be a positive number"),
    "endless weight": ([{**TEXT, "weight": float("inf")}], "weight=inf: must be a positive number"),
    "nested": ([{"name": "blend", "weight": 1}], r"data.blend\[0\].name=blend: a blend cannot contain another blend"),
    "streaming": (
        [{**TEXT, "streaming": True}],
        r"data.blend\[0\].streaming: a blend takes neither blends nor streaming datasets",
    ),
    "no name": ([{"path": "/corpus", "weight": 1}], r"data.blend\[0\].name is missing: known: python, text"),
    "unknown name": ([{**TEXT, "name": "jsnl"}], r"data.blend\[0\].name=jsnl: no such choice; did you mean 'jsonl'\?"),
    "shared key": (
        [{**TEXT, "tokenizer": "byte"}],
        r"\[0\].tokenizer: all corpora of a blend share this key: set data.tokenizer instead",
    ),
    "key without effect": ([{**TEXT, "split": "x"}], r"\[0\].split=x: data=text does not use this key: remove it"),
    "wrong type": ([{**TEXT, "validation": "some"}], r"data.blend\[0\].validation=some: "),
    "path missing": ([{"name": "jsonl", "weight": 1}], r"data.blend\[0\]: data.path is missing: data=jsonl needs it"),
    "validation of 1": ([{**TEXT, "validation": 1.0}], r"data.blend\[0\]: data.validation=1.0: must be in"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_bad_blend_entry_is_one_line_error(case, tmp_path):
    entries, message = ENTRIES[case]
    with pytest.raises(ConfigError, match=message) as caught:
        open_data(mixture_config(tmp_path, entries))
    assert "\n" not in str(caught.value)


def change(n, **keys):
    return lambda entries: entries[n].update(keys)


CORPORA = {
    "missing path": (change(1, path="/no/such"), {}, r"data.blend\[1\]: data.path=/no/such: no such file or folder"),
    "shorter than a sequence": (
        lambda entries: Path(entries[1]["path"]).write_text('{"body": "bbb"}'),
        {},
        r"data.blend\[1\]: data=jsonl: the training split holds 4 tokens, fewer than one sequence of",
    ),
    "no text key": (change(1, text_key="text"), {}, r"data.blend\[1\]: data.path: .*b.jsonl:1: no field 'text': set"),
    "end of text of a text corpus": (
        change(0, eos_id=3),
        {},
        r"data.blend\[0\].eos_id=3: data=text does not use this key",
    ),
    "weight of nearly nothing": (change(2, weight=1e-9), {}, r"data.blend\[2\].weight=1e-09: less than a millionth"),
    "bpe beside token files": (
        lambda entries: None,
        {"tokenizer": "bpe"},
        r"data.tokenizer=bpe: would train a new tokenizer, but data.blend\[2\] already holds tokens: give the",
    ),
    "tokens of another tokenizer": (
        lambda entries: write_tokens(Path(entries[2]["path"]), [299] * 40),
        {},
        r"data.blend\[2\]: token id 299 is outside the 257 tokens of data.tokenizer",
    ),
}


@pytest.mark.parametrize("case", CORPORA)
def test_corpora_that_do_not_fit_are_refused(case, tmp_path, letters):
    spoil, settings, message = CORPORA[case]
    spoil(letters)
    with pytest.raises(ConfigError, match=message) as caught:
        open_data(mixture_config(tmp_path, letters, **settings))
    assert "\n" not in str(caught.value)


SETTINGS = {
    "empty blend": ({"name": "blend"}, "data.blend is empty: data=blend needs corpora with weights"),
    "blend for another": ({"blend": [TEXT]}, "data.blend is for data=blend, but data=python: set data=blend"),
    "a streaming blend": (
        {"name": "blend", "blend": [TEXT], "streaming": True},
        "data.streaming=true: .* only data=hf does",
    ),
    "streaming text": (
        {"name": "text", "path": "x", "streaming": True},
        "data=text does not support streaming, only data=hf does",
    ),
    "hf without a path": ({"name": "hf"}, "data.path is missing: data=hf needs it"),
    "validation file of text": (
        {"name": "text", "path": "x", "validation_path": "y"},
        "data.validation_path=y: data=text does not read it, only data=bin, .* do: set it to null",
    ),
    "split of text": (
        {"name": "text", "path": "x", "eval_split": "test"},
        "data.eval_split=test: data=text has no splits, only data=hf has",
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_contradicting_settings_are_refused(case, tmp_path):
    data, message = SETTINGS[case]
    with pytest.raises(ConfigError, match=message):
        check_data(config(data, tmp_path).data)


# ------------------------------------------------------------------------------------------------------- command line


def spelled(entries) -> str:
    return "data.blend=[" + ", ".join("{" + ", ".join(f"{k}: {v}" for k, v in e.items()) + "}" for e in entries) + "]"


def test_blend_is_read_from_command_line(letters):
    cfg = load_config(["data=blend", spelled(letters), "data.tokenizer=byte"])
    entries = mixture.mixture_entries(cfg.data)
    assert [m.weight for m in entries] == WEIGHTS and [m.data.name for m in entries] == ["text", "jsonl", "bin"]
    check_data(cfg.data)


def test_a_run_on_a_mixture_resumes_bit_for_bit(tmp_path, letters, capsys):
    make = lambda name, *more: [
        "recipe=llama_debug", "logger=jsonl", "data=blend", spelled(letters), "data.tokenizer=byte", "data.pack=true",
        "train.steps=4", "train.seq_len=16", "optim.warmup=0", "hardware.device=cpu", "hardware.peak_tflops=0.1",
        f"run.dir={tmp_path / name}", *more,
    ]  # fmt: skip
    assert main(make("whole")) == 0
    assert "3 corpora, " in capsys.readouterr().out
    assert main(make("parts", "train.stop_at=2")) == 0 and main(make("parts", "resume=auto")) == 0
    assert [r["loss"] for r in metrics_of(tmp_path / "parts")] == [r["loss"] for r in metrics_of(tmp_path / "whole")]
    one, other = (tensor_bytes(checkpoint_of(tmp_path / name, 4)) for name in ("whole", "parts"))
    assert one == other and not re.search("changed since", (tmp_path / "parts/logs/rank-0.log").read_text())
