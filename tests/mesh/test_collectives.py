"""Flat collectives on 1 to 4 ranks against sums in one process. Some sizes are not divisible by the number of ranks."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from ndtrain.config import world_from_env
from ndtrain.mesh.collectives import all_gather, all_gather_row, all_reduce, reduce_scatter
from ndtrain.mesh.sharding import even_split
from tests.lib.ranks import run_ranks


def rank_case(numel: int, dtype: torch.dtype) -> dict:
    rank, _, n = world_from_env()
    group = dist.group.WORLD if n > 1 else None
    data = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).mul(100).to(dtype) for r in range(n)]
    reduced, scattered = data[rank].clone(), data[rank].clone()
    # several operations in flight at once, waited for in reverse order
    second = (data[rank] * 2).clone()
    works = [all_reduce(reduced, group), reduce_scatter(scattered, group), all_reduce(second, group)]
    for work in reversed(works[1:]):
        work.wait()
    works[0].wait()
    part = data[rank][:7]
    gathered = torch.empty(7 * n, dtype=dtype)
    all_gather(gathered, part, group).wait()
    in_place = torch.zeros(7 * n, dtype=dtype)
    in_place[7 * rank : 7 * rank + 7] = part
    all_gather(in_place, in_place[7 * rank : 7 * rank + 7], group).wait()
    rows, work = all_gather_row(part, group)
    work.wait()
    own = scattered[slice(*even_split(numel, n, rank))]
    return {"reduced": reduced, "second": second, "own": own, "gathered": gathered, "in_place": in_place, "rows": rows}


CASES = list(product((torch.float32, torch.float64, torch.int64), (8, 13, 1001), (1, 2, 3, 4)))
SAMPLE = [  # each type, size and number of ranks; sizes that the ranks divide, and that they do not
    (torch.float32, 8, 1), (torch.float64, 13, 2), (torch.int64, 8, 2), (torch.float32, 1001, 3),
    (torch.int64, 13, 3), (torch.float32, 13, 4), (torch.float64, 1001, 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "numel", "n"), [c if c in SAMPLE else pytest.param(*c, marks=pytest.mark.full) for c in CASES]
)
def test_collectives_equal_sums_in_one_process(n, numel, dtype):
    results = run_ranks(rank_case, n, numel, dtype)
    data = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).mul(100).to(dtype) for r in range(n)]
    total = torch.stack(data).double().sum(0)
    in_order = data[0].clone()
    for d in data[1:]:
        in_order += d
    bound = 1e-4 if dtype == torch.float32 else 1e-9
    for r, got in enumerate(results):
        assert torch.equal(got["reduced"], results[0]["reduced"]), "ranks differ in the bits of a sum"
        assert (got["reduced"].double() - total).abs().max() <= bound
        assert (got["second"].double() - 2 * total).abs().max() <= 2 * bound
        assert torch.equal(got["own"], in_order[slice(*even_split(numel, n, r))]), "not summed in rank order"
        expected = torch.stack([d[:7] for d in data])
        assert torch.equal(got["gathered"].view(n, 7), expected)
        assert torch.equal(got["in_place"].view(n, 7), expected)
        assert torch.equal(got["rows"], expected)
