"""Tiles compared with a brute-force mask, the local core with a brute-force softmax, and shardings of a sequence."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ndtrain.mesh.sequence_sharding import BALANCES, SequenceSharding
from ndtrain.model.attention.core import local_core
from ndtrain.model.attention.scores import AttentionMod, Scores, alibi_slopes
from ndtrain.model.attention.tiles import Kind, halves, tiles, work

# ----------------------------------------------------------------------------------------------------------- reference


def visible(length: int, documents: tuple[int, ...] = (0,), window: int | None = None) -> np.ndarray:
    """The mask of visible pairs [query, key]."""
    i, j = np.arange(length)[:, None], np.arange(length)
    document = np.searchsorted(documents, np.arange(length), side="right")
    seen = (j <= i) & (document[:, None] == document)
    return seen if window is None else seen & (i - j < window)


def brute_force(q_BTND, k_BTKD, v_BTKD, scores: Scores):
    """Masked softmax attention by its definition, differentiable."""
    B, T, N, D = q_BTND.shape
    k, v = (x.repeat_interleave(N // x.shape[2], 2).transpose(1, 2) for x in (k_BTKD, v_BTKD))
    s = q_BTND.transpose(1, 2) @ k.mT / D**0.5
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    if scores.slopes is not None:
        back = torch.arange(T)[:, None] - torch.arange(T)
        s = s - torch.tensor(scores.slopes, dtype=s.dtype)[:, None, None] * back
    documents = scores.documents or ((0,),) * B
    seen = torch.stack([torch.from_numpy(visible(T, d, scores.window)) for d in documents])[:, None].expand(s.shape)
    if scores.mod is not None:
        places = torch.meshgrid(*map(torch.arange, s.shape), indexing="ij")
        s, seen = scores.mod.score(s, *places), seen & scores.mod.mask(*places)
    some = seen.any(-1, keepdim=True)  # a query that sees nothing has output 0
    return (s.masked_fill(~seen, -torch.inf).masked_fill(~some, 0).softmax(-1).masked_fill(~some, 0) @ v).transpose(
        1, 2
    )


def changed(score, batch, head, query, key):
    """A score mod that is not linear, and differs from head to head and from place to place."""
    score = score + 0.05 * score * score * torch.cos(0.7 * head)
    return torch.where((query + key) % 3 == 0, 0.5 * score, score + 0.02 * (query - key) + 0.1 * (batch + 1))


def kept(batch, head, query, key):
    """A mask mod with queries that see nothing."""
    return ((query - key) % 5 != 3) & ((query % 7 != 2) | (head != 1))


MOD = AttentionMod(changed, kept)


def random_documents(rows: int, length: int, seed: int, mean: int = 9) -> tuple[tuple[int, ...], ...]:
    """The starts of random documents in each row, with lengths between 1 and 2 * mean."""
    draw = np.random.default_rng(seed)
    starts = [np.cumsum([0, *draw.integers(1, 2 * mean + 1, length)]) for _ in range(rows)]
    return tuple(tuple(int(x) for x in s if x < length) for s in starts)


def random_qkv(B: int, T: int, N: int, K: int, D: int, dtype=torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """Random q, k, v and gradient of the output."""
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, n, D, generator=gen, dtype=torch.float64).to(dtype) for n in (N, K, K, N)]


def out_and_gradients(core, q, k, v, grad) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = core(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_close(got, expected, bound_out: float, bound_grad: float) -> None:
    """Asserts that the largest error is within the bounds, relative to the largest element."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        bound = bound_out if name == "out" else bound_grad
        error = ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        assert error <= bound, f"{name} is off by {error:.3g}"


VARIANTS = ["plain", "packed", "window", "softcap", "alibi", "mod", "everything"]


def variant(name: str, B: int, T: int, N: int) -> Scores:
    on = lambda *names: name in (*names, "everything")
    return Scores(
        window=11 if on("window") else None,
        softcap=1.5 if on("softcap") else None,
        slopes=alibi_slopes(N) if on("alibi") else None,
        mod=MOD if on("mod") else None,
        documents=random_documents(B, T, seed=3, mean=T // 5) if on("packed") else None,
    )


# -------------------------------------------------------------------------------------------------- sequence sharding

shardings = st.builds(
    lambda balance, ring, ulysses, units: SequenceSharding(2 * ring * ulysses * units, ring, ulysses, balance),
    st.sampled_from(BALANCES), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4),
)  # fmt: skip


@given(shardings)
@settings(max_examples=60)
def test_sharding_holds_every_token_once(sharding):
    indices = [sharding.index(part) for part in range(sharding.parts)]
    assert {len(i) for i in indices} == {sharding.length // sharding.parts}
    assert sorted(np.concatenate(indices)) == list(range(sharding.length))
    for r in range(sharding.ring):
        held = np.concatenate([indices[r * sharding.ulysses + u] for u in range(sharding.ulysses)])
        local = np.concatenate([np.arange(p.start, p.start + p.count) for p in sharding.pieces(r)])
        assert np.array_equal(local, np.arange(len(held)))
        assert np.array_equal(
            held, np.concatenate([p.first + p.stride * np.arange(p.count) for p in sharding.pieces(r)])
        )
        assert (np.diff(held) > 0).all()


def test_sharding_indices_equal_worked_examples():
    assert SequenceSharding(16, 2).index(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert SequenceSharding(16, 2, 2).index(1).tolist() == [12, 13, 14, 15]
    assert SequenceSharding(8, 2, 1, "striped").index(1).tolist() == [1, 3, 5, 7]
    assert SequenceSharding(8, 2, 1, "none").index(1).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("length, ring, ulysses, balance", [(6, 2, 1, "zigzag"), (6, 1, 4, "none"), (8, 2, 1, "snake")])
def test_indivisible_sharding_is_refused(length, ring, ulysses, balance):
    with pytest.raises(ValueError, match=r"length|balance"):
        SequenceSharding(length, ring, ulysses, balance)


# -------------------------------------------------------------------------------------------------------------- tiles


def seen_of(t) -> np.ndarray:
    m, n = t.shape
    ahead = np.arange(n) - np.arange(m)[:, None]
    return (t.low <= ahead) & (ahead <= t.high)


def check_tile(t, sharding, seen, own, other) -> None:
    """Asserts that the tile has its kind and its position."""
    if t.kind is Kind.FULL:
        assert seen.all()
    elif t.kind is Kind.CAUSAL:
        assert np.array_equal(seen, np.tril(np.ones_like(seen))) and t.shape[0] == t.shape[1]
    assert seen.any(axis=1).all(), "a query that sees nothing"
    if own is not None:
        assert own[t.q][0] - other[t.k][0] == t.distance
        assert set(np.diff(own[t.q])) | set(np.diff(other[t.k])) <= {t.stride}


@given(
    sharding=shardings, seed=st.integers(0, 99), packed=st.booleans(), window=st.none() | st.integers(1, 30),
    block=st.none() | st.tuples(st.integers(1, 7), st.integers(1, 7)), split=st.booleans(),
)  # fmt: skip
@settings(max_examples=150)
def test_tiles_hold_each_visible_pair_once(sharding, seed, packed, window, block, split):
    documents = random_documents(2, sharding.length, seed, mean=1 + seed % 20) if packed else None
    masks = [visible(sharding.length, d, window) for d in documents or ((0,), (0,))]
    whole = [
        np.concatenate([p.first + p.stride * np.arange(p.count) for p in sharding.pieces(r)])
        for r in range(sharding.ring)
    ]
    for a in range(sharding.ring):
        for b in range(sharding.ring):
            pair_tiles = tiles(sharding.pieces(a), sharding.pieces(b), sharding.length, documents, window, block)
            expected = np.stack([m[np.ix_(whole[a], whole[b])] for m in masks])
            assert work(pair_tiles) == (expected.sum() if packed else expected[0].sum())
            if split:
                first, second = halves(pair_tiles)
                pair_tiles = (*first, *second)
            count, seen_rows = np.zeros(expected.shape, int), np.zeros(expected.shape[:2], bool)
            for t in pair_tiles:
                seen = seen_of(t)
                check_tile(t, sharding, seen, *((whole[a], whole[b]) if block else (None, None)))
                assert block is None or (t.shape[0] <= block[0] and t.shape[1] <= block[1])
                count[t.rows, t.q, t.k] += seen
                if not split:
                    assert t.first == (not seen_rows[t.rows, t.q].any())
                seen_rows[t.rows, t.q] = True
            assert np.array_equal(count, expected)


def test_zigzag_needs_one_tile_per_step():
    sharding = SequenceSharding(64, 4)
    shapes = [[(t.shape, t.kind) for t in tiles(sharding.pieces(1), sharding.pieces(b), 64)] for b in range(4)]
    assert shapes[0] == [((16, 8), Kind.FULL)]
    assert shapes[1] == [((16, 16), Kind.CAUSAL)]
    assert shapes[2] == shapes[3] == [((8, 16), Kind.FULL)]


def test_tiles_skip_blocks_beyond_window():
    pieces = SequenceSharding(4096).pieces(0)
    window_tiles = tiles(pieces, pieces, 4096, window=600)
    assert sum(t.shape[0] * t.shape[1] for t in window_tiles) < 2 * work(window_tiles)


@pytest.mark.parametrize(
    "balance, packed, bound", [("zigzag", False, 1.05), ("striped", False, 1.05), ("striped", True, 1.2)]
)
@pytest.mark.parametrize("ring", [2, 4, 8])
def test_balanced_sharding_keeps_load_near_mean(balance, packed, bound, ring):
    sharding = SequenceSharding(2048, ring, 1, balance)
    documents = random_documents(1, 2048, seed=ring, mean=150) if packed else None
    loads = [
        sum(work(tiles(sharding.pieces(a), sharding.pieces(b), 2048, documents)) for b in range(ring))
        for a in range(ring)
    ]
    assert max(loads) <= bound * np.mean(loads)
    none = SequenceSharding(2048, ring, 1, "none")
    busy = [sum(work(tiles(none.pieces(a), none.pieces(b), 2048)) for b in range(ring)) for a in range(ring)]
    assert max(busy) > 1.3 * np.mean(busy), "the measure sees no imbalance"


def test_halves_split_work_evenly():
    pieces = SequenceSharding(1024).pieces(0)
    for all_tiles in (tiles(pieces, pieces, 1024), tiles(pieces, pieces, 1024, block=(64, 64))):
        first, second = halves(all_tiles)
        assert 0.4 <= work(first) / work(all_tiles) <= 0.6
        assert work(first) + work(second) == work(all_tiles)


# --------------------------------------------------------------------------------------------------------- local core


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("length", [64, pytest.param(1300, marks=pytest.mark.full)])
def test_local_core_equals_masked_softmax(name, heads, length):
    q, k, v, grad = random_qkv(2, length, *heads, 16)
    scores = variant(name, 2, length, heads[0])
    got = out_and_gradients(lambda *x: local_core(*x, SimpleNamespace(scores=scores)), q, k, v, grad)
    assert_close(got, out_and_gradients(lambda *x: brute_force(*x, scores), q, k, v, grad), 1e-10, 1e-9)


@pytest.mark.parametrize("name", ["window", "softcap", "alibi", "mod"])
def test_local_core_over_several_blocks_equals_masked_softmax(name, monkeypatch):
    monkeypatch.setattr("ndtrain.model.attention.kernels.BLOCK", (16, 24))
    monkeypatch.setattr("ndtrain.model.attention.tiles.BLOCK", (16, 24))
    q, k, v, grad = random_qkv(2, 130, 4, 2, 16)
    scores = variant(name, 2, 130, 4)
    got = out_and_gradients(lambda *x: local_core(*x, SimpleNamespace(scores=scores)), q, k, v, grad)
    tiles.cache_clear()
    assert_close(got, out_and_gradients(lambda *x: brute_force(*x, scores), q, k, v, grad), 1e-10, 1e-9)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_local_core_in_low_precision_is_near_fp64(name, dtype, bound):
    q, k, v, grad = random_qkv(2, 96, 4, 2, 32, dtype)
    scores = variant(name, 2, 96, 4)
    got = out_and_gradients(lambda *x: local_core(*x, SimpleNamespace(scores=scores)), q, k, v, grad)
    assert all(x.dtype == dtype for x in got)
    wide = [x.double() for x in (q, k, v, grad)]
    assert_close(got, out_and_gradients(lambda *x: brute_force(*x, scores), *wide), bound, 2 * bound)


def test_local_core_ignores_other_documents():
    q, k, v, _ = random_qkv(1, 40, 2, 2, 16)
    scores = Scores(documents=((0, 10, 25),))
    run = lambda k: local_core(q, k, v, SimpleNamespace(scores=scores))
    other = k.clone()
    other[:, :10] *= 5
    other[:, 25:] *= 5
    assert torch.equal(run(k)[:, 10:25], run(other)[:, 10:25])
    assert not torch.allclose(run(k)[:, 25:], run(other)[:, 25:])


def test_alibi_slopes_equal_published_values():
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(1) == (2.0**-8,)
    # 12 heads: those of 8, then every other one of 16
    assert alibi_slopes(12) == pytest.approx((*alibi_slopes(8), *(2 ** (-0.5 * i) for i in (1, 3, 5, 7))))


def test_plain_local_core_compiles_without_graph_break():
    q, k, v, _ = random_qkv(1, 32, 4, 2, 16, torch.float32)
    core = torch.compile(local_core, fullgraph=True, backend="eager")
    ctx = SimpleNamespace(scores=Scores())
    assert torch.equal(core(q, k, v, ctx), local_core(q, k, v, ctx))
