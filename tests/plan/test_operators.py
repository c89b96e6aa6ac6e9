"""The bytes that operators read and write."""

import pytest
import torch

from ndtrain.plan.operators import access_of, is_free, kernel_of

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bytes_of(func, *args, **kwargs) -> int:
    out = func(*args, **kwargs)
    return kernel_of(func, args, kwargs, access_of(func, args, kwargs, out)).bytes


TABLE, IDS, ROWS = meta(1000, 8), meta(6, dtype=torch.int64), meta(6, 8)
ID_BYTES, ROW_BYTES = 6 * 8, 6 * 8 * 4
COUNTED = {
    "an operator reads its operands and writes its result": (aten.add.Tensor, (meta(4, 8), meta(4, 8)), {}, 3 * 128),
    "one that stands there twice is read once": (aten.mul.Tensor, (ROWS, ROWS), {}, 2 * ROW_BYTES),
    "a broadcast operand is read once": (aten.add.Tensor, (meta(4, 8), meta(8).expand(4, 8)), {}, 2 * 128 + 32),
    "in place: read and written": (aten.add_.Tensor, (meta(4, 8), meta(4, 8)), {}, 3 * 128),
    "a copy does not read what it overwrites": (aten.copy_.default, (meta(4, 8), meta(4, 8)), {}, 2 * 128),
    "nor do zeros": (aten.zero_.default, (meta(4, 8),), {}, 128),
    "nor does a result that is given": (aten.mul.out, (meta(4, 8), meta(4, 8)), {"out": meta(4, 8)}, 3 * 128),
    "a product that is added": (aten.addmm_.default, (meta(4, 2), meta(4, 8), meta(8, 2)), {}, 128 + 64 + 2 * 32),
    "one that overwrites": (aten.addmm_.default, (meta(4, 2), meta(4, 8), meta(8, 2)), {"beta": 0}, 128 + 64 + 32),
    "only the rows of a table that are looked up": (aten.embedding.default, (TABLE, IDS), {}, ID_BYTES + 2 * ROW_BYTES),
    "only the rows that are added to": (
        aten.index_put_.default, (TABLE, [IDS], ROWS, True), {}, ID_BYTES + 3 * ROW_BYTES,
    ),
    "only the shape of another": (aten.zeros_like.default, (meta(4, 8),), {}, 128),
}  # fmt: skip


@pytest.mark.parametrize("what", COUNTED)
def test_bytes_of_operator_equal_hand_count(what):
    func, args, kwargs, expected = COUNTED[what]
    assert bytes_of(func, *args, **kwargs) == expected


def test_views_and_allocations_cost_nothing():
    assert all(map(is_free, (aten.t.default, aten.view.default, aten.empty_like.default, aten.detach.default)))
    assert not any(map(is_free, (aten.clone.default, aten._to_copy.default, aten.cat.default)))
