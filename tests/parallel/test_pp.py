"""The number of layers per stage if no split is given."""

from itertools import product

import pytest

from ndtrain.config import load_config, resolve
from ndtrain.parallel.distribution import Distribution
from ndtrain.parallel.pp import balanced_sizes, rank_cost
from ndtrain.schedule import stage_ranks

PLACEMENTS = [
    ("1f1b", 2, 1),
    ("1f1b", 4, 1),
    ("interleaved", 2, 2),
    ("interleaved", 2, 3),
    ("zb_v", 2, 2),
    ("zb_v", 3, 2),
]


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    """All in which every stage has a layer."""
    ranges = [range(1, layers + 1)] * stages
    return [sizes for sizes in product(*ranges) if sum(sizes) == layers]


@pytest.mark.parametrize(("name", "pp", "chunks"), PLACEMENTS)
@pytest.mark.parametrize("head", [0.0, 0.7, 1.3, 2.6])
def test_balanced_sizes_are_near_cheapest_split(name, pp, chunks, head):
    """With one stage per rank no split is cheaper. Otherwise none is cheaper by more than a layer."""
    rank_of = stage_ranks(name, pp, chunks)
    for layers in range(len(rank_of), 9):
        sizes = balanced_sizes(layers, head, rank_of)
        assert sum(sizes) == layers and min(sizes) >= 1 and len(sizes) == len(rank_of)
        least = min(rank_cost(split, head, rank_of) for split in every_split(layers, len(rank_of)))
        assert rank_cost(sizes, head, rank_of) <= least + (1e-9 if chunks == 1 else 1 + 1e-9), (layers, sizes)


SPLITS = {  # layers, cost of the head in layers, schedule, ranks, chunks -> layers of the stages
    "one stage": (5, 2.0, "1f1b", 1, 1, (5,)),
    "the first and the last one have less": (126, 0.66, "1f1b", 16, 1, (7, *[8] * 14, 7)),
    "of a layer or two": (126, 0.66, "interleaved", 16, 4, (1, *[2] * 62, 1)),
    "extra layers are late": (10, 0.5, "1f1b", 4, 1, (2, 3, 3, 2)),
    "equal ones of all ranks": (126, 0.66, "interleaved", 16, 3, (*[2] * 17, *[3] * 30, 2)),
    "a head as dear as two layers": (32, 2.4, "1f1b", 2, 1, (17, 15)),
    "a head as dear as a rank": (16, 4.3, "1f1b", 8, 1, (*[2] * 6, 3, 1)),
    "a V": (10, 0.7, "zb_v", 2, 2, (2, 2, 3, 3)),
}


@pytest.mark.parametrize("name", SPLITS)
def test_balanced_sizes_equal_worked_examples(name):
    layers, head, schedule, pp, chunks, sizes = SPLITS[name]
    assert balanced_sizes(layers, head, stage_ranks(schedule, pp, chunks)) == sizes


def test_placement_counts_head_by_its_flops():
    """Llama 3 8B's head costs as much as 1.8 blocks at 8,192 tokens."""
    cfg = resolve(load_config(["recipe=llama3_8b", "mesh.fsdp=1", "mesh.pp=4", "schedule=1f1b"]), 4)
    assert [len(stage) for stage in Distribution.of(cfg).placement.layers] == [8, 8, 9, 7]
