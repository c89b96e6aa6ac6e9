"""Start, save and load of thousands of ranks in one process: right, and without work that grows with their number."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from math import ceil, log2
from pathlib import Path
from unittest import mock
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndtrain.checkpoint import State, layouts
from ndtrain.checkpoint.elements import parts_of, slices_of
from ndtrain.checkpoint.loading import load
from ndtrain.checkpoint.saving import Writer
from ndtrain.checkpoint.verifying import verify
from ndtrain.config import Config, load_config, resolve
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import Stages, build_stages
from ndtrain.run.rendezvous import shake_hands
from ndtrain.run.shared_config import Written, adopt, publish
from ndtrain.run.signed_store import SignedStore
from tests.scale.one_process import Cluster

TIMEOUT_S = 60.0
RANKS_OF_A_HOST = 8
SIZES = {  # ranks -> sizes of pp, dp, fsdp, tp
    48: (2, 1, 12, 2),
    64: (2, 2, 8, 2),
    1536: (4, 4, 24, 4),
    2048: (4, 8, 16, 4),
}
SHAPE = [
    "recipe=llama_debug", "model.num_hidden_layers=4", "checkpoint.async_save=false", "train.compile=false",
]  # fmt: skip
FILES_OPEN = 40  # a reader keeps 16, and there are two
PRIME = 65_521
STATE = State(step=1, tokens=0, order={})


def config_of(ranks: int, layout: str) -> Config:
    axes = dict(zip(("pp", "dp", "fsdp", "tp"), SIZES[ranks], strict=True))
    batch = 4 * axes["dp"] * axes["fsdp"]
    own = [f"train.global_batch={batch}", "train.micro_batch=1", f"checkpoint.layout={layout}"]
    return resolve(load_config([*SHAPE, *own, *(f"mesh.{a}={n}" for a, n in axes.items())]), ranks)


# --------------------------------------------------------------------------------------------------------------- start


def begin(cluster: Cluster, cfgs: Sequence[Config], rank: int) -> tuple[str, str]:
    """The messages of a rank before the process group exists. Returns the attempt and the name of the run."""
    scope = SignedStore(cluster.store, "ndtrain", "secret")
    attempt = shake_hands(scope, rank, cluster.ranks, TIMEOUT_S)
    messages, written = scope.within(attempt), Written({}, {})
    if rank == 0:
        publish(messages, cluster.ranks, cfgs[0], written, ["", {}], TIMEOUT_S)
        return attempt, cfgs[0].run.name
    return attempt, adopt(messages, rank, cfgs[1], written, TIMEOUT_S)[0].run.name


def operations_of_start(ranks: int) -> list[int]:
    """Store operations of each rank."""
    cluster, cfgs = Cluster(ranks), [load_config(["recipe=llama_debug", f"run.name={name}"]) for name in ("a", "b")]
    (attempt, name), *others = cluster.run(partial(begin, cluster, cfgs))
    assert name == "a" and set(others) == {(attempt, "a")}
    return [sum(counted.operations.values()) for counted in cluster.counted]


@pytest.mark.parametrize("ranks", [256, pytest.param(2048, marks=pytest.mark.full)])
def test_start_takes_as_many_store_operations_as_for_eight_ranks(ranks):
    many, few = operations_of_start(ranks), operations_of_start(8)
    assert many[0] == few[0] and set(many[1:]) == set(few[1:])


# --------------------------------------------------------------------------------------------------------- checkpoints


def built(cfg: Config, rank: int, cluster: Cluster) -> tuple[Stages, Mesh]:
    """A rank's stages, without values."""
    dist.init_process_group("fake", rank=rank, world_size=cluster.ranks, store=FakeStore())
    try:
        mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
        mesh.__dict__["background"] = cluster.group
        stages = build_stages(cfg, mesh)
    finally:
        dist.destroy_process_group()
    return stages, mesh


def in_cluster(cluster: Cluster, work: Callable) -> list:
    host = lambda: cluster.rank - cluster.rank % RANKS_OF_A_HOST
    with mock.patch.object(layouts, "first_rank_of_host", host):
        return cluster.run(work)


def save(ranks: int, layout: str, folder: Path) -> tuple[Cluster, Path]:
    cfg, cluster = config_of(ranks, layout), Cluster(ranks)
    of = [built(cfg, rank, cluster) for rank in range(ranks)]
    for stages, _ in of:
        for data, value in values_of(stages):
            data.copy_(value)

    def write(rank: int) -> Path:
        writer = Writer(folder, *of[rank], cfg.checkpoint, asdict(cfg), lambda folder: None)
        return writer.write(STATE, writer.live)

    return cluster, in_cluster(cluster, write)[0]


def values_of(stages: Stages) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements of weights and moments that a rank holds, and their values in the test: a function of the tensor and
    of the position in it."""
    for part in (part for of_stem in parts_of(stages.units.plan).values() for part in of_stem):
        for held in slices_of(stages, part, owned_only=False):
            start, length, number, stride = held.rows
            position = start + torch.arange(number).unsqueeze(1) * stride + torch.arange(length)
            yield held.data, ((position + crc32((part.prefix + held.tensor).encode())) % PRIME).flatten().float()


def read(ranks: int, path: Path) -> Cluster:
    """Load on all ranks of another mesh. Every element is what it was."""
    cfg, cluster = config_of(ranks, "shared"), Cluster(ranks)
    of = [built(cfg, rank, cluster) for rank in range(ranks)]
    in_cluster(cluster, lambda rank: load(path, *of[rank]))
    assert all(torch.equal(got, value) for stages, _ in of for got, value in values_of(stages))
    return cluster


@pytest.mark.parametrize(
    ("ranks", "others"), [(64, 48), *(pytest.param(*c, marks=pytest.mark.full) for c in ((48, 64), (2048, 1536)))]
)
@pytest.mark.parametrize("layout", [pytest.param("shared", marks=pytest.mark.full), "host"])
def test_checkpoint_of_many_ranks_is_read_by_others(layout, ranks, others, tmp_path):
    saved, path = save(ranks, layout, tmp_path)
    assert not any(verify(path).values())
    neighbours = 2 + 2 * ceil(log2(ranks))
    own = [counted for rank, counted in enumerate(saved.counted) if rank]
    assert max(len(counted.peers) for counted in saved.counted) <= neighbours
    if layout == "host":
        of_host = [{name for name in counted.files if "-host-" in name} for counted in saved.counted]
        # the first rank of a host creates its files: weights and moments. A rank may have nothing to write
        assert all(names <= of_host[rank - rank % RANKS_OF_A_HOST] for rank, names in enumerate(of_host))
        assert max(map(len, of_host)) == 2
        assert max(counted.most_open for counted in own) <= 3
    loaded = read(others, path)
    assert max(len(counted.peers) for counted in loaded.counted) <= neighbours
    assert max(counted.most_open for counted in loaded.counted) <= FILES_OPEN
