"""Every schedule, and every mesh over all five axes, trains as one process does.
The cases have any number of microbatches, unequal stages, tied embeddings, microbatches without a valid token,
all recompute modes and all zero stages.
"""

import random
from functools import cache
from itertools import count, product

import pytest

from ndtrain.schedule import NAMES, Action, IllegalSchedule, build, default_chunks
from ndtrain.schedule.file import write
from tests.lib.parity import FP64, Run, compare, train
from tests.parallel.test_parity_tp_cp import MODEL, PACKED, TIED, TP, cp_kinds

# 9 layers: more than 8 stages, and a number that none of 2, 4 and 8 divides
DEEP = [*MODEL, *FP64, "model.num_hidden_layers=9", "model.vocab_size=203", "model.intermediate_size=24"]
RECOMPUTE = (
    [],
    ["recompute=full"],
    ["recompute=every"],
    ["recompute=every", "recompute.every=auto"],
    ["recompute=selective"],
)
SCHEDULES = [name for name in NAMES if name != "csv"]


@cache
def reference(mask: str, *overrides: str) -> Run:
    """The one-process, one-microbatch run."""
    return train(1, [*DEEP, *overrides], mask)


def check(mesh: dict[str, int], microbatches: int, extra: list[str], **bounds: float):
    """micro_batch is 2, whatever the mesh."""
    ranks, rows = 1, 2 * microbatches * mesh.get("dp", 1) * mesh.get("fsdp", 1)
    for size in mesh.values():
        ranks *= size
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    same = [f"train.global_batch={rows}", *(e for e in extra if e.startswith(("model.", "data.")))]
    mask = "uneven" if rows > 4 else "ragged"
    run = train(ranks, [*DEEP, *same, "train.micro_batch=2", *sizes, *extra], mask)
    compare(run, reference(mask, f"train.micro_batch={rows}", *same), **({"loss": 1e-10, "state": 1e-9} | bounds))


def schedules():
    """Each schedule with each number of microbatches from pp to 3 pp (pp=4: every other), in turn with chunks, tied
    weights, recompute and zero."""
    turn = count()
    for name in SCHEDULES:
        chunks = {"gpipe": (1, 2), "interleaved": (2, 1)}.get(name, (default_chunks(name),))
        for pp in (2, 4, 8) if name in ("gpipe", "1f1b") else (2, 4):
            numbers = {2: range(2, 7), 4: (4, 5, 7, 9, 12), 8: (8, 13)}[pp]
            for m in numbers:
                i = next(turn)
                each = chunks[i % len(chunks)] if pp < 8 else 1
                extra = [
                    f"schedule={name}", f"schedule.chunks={each}", *[TIED] * (i % 2),
                    *RECOMPUTE[i % len(RECOMPUTE)], f"mesh.zero={1 + i % 3}",
                ]  # fmt: skip
                marks = [] if (pp, m) == (2, 3) else [pytest.mark.full]
                short = "-".join(e.split(".")[-1] for e in extra)
                yield pytest.param(pp, m, extra, marks=marks, id=f"pp{pp}-{m}-{short}")


@pytest.mark.parametrize(("pp", "microbatches", "extra"), list(schedules()))
def test_pipeline_schedules_equal_one_process(pp, microbatches, extra):
    check({"pp": pp}, microbatches, extra)


@pytest.mark.full
@pytest.mark.parametrize("zero", [2, 3])
def test_stage_of_one_layer_equals_one_process(zero):
    """Its only unit is reduced in one backward after another."""
    check({"pp": 3, "fsdp": 2}, 5, ["model.num_hidden_layers=3", "schedule=1f1b", f"mesh.zero={zero}"])


def meshes():
    """All meshes of 4 and 8 ranks over five axes with pp > 1. The other settings alternate."""
    turn = count()
    for n in (4, 8):
        for sizes in product((1, 2, 4, 8), repeat=5):
            mesh = dict(zip(("pp", "dp", "fsdp", "cp", "tp"), sizes, strict=True))
            pp, dp, fsdp, cp, tp = sizes
            if pp * dp * fsdp * cp * tp != n or pp == 1:
                continue
            i = next(turn)
            names = SCHEDULES if pp < 8 else ["gpipe", "1f1b"]
            ways = [*(TP[i % 4] if tp > 1 else []), *cp_kinds(cp)[i % len(cp_kinds(cp))]]
            extra = [
                f"schedule={names[i % len(names)]}", *ways, *[TIED] * (i % 2), *[PACKED] * (i // 2 % 2),
                *RECOMPUTE[i // 2 % len(RECOMPUTE)], f"mesh.zero={1 + i % 3}",
            ]  # fmt: skip
            name = "-".join([*(f"{a}{s}" for a, s in mesh.items() if s > 1), *(e.split(".")[-1] for e in extra)])
            yield pytest.param(mesh, extra, marks=pytest.mark.full, id=name)


@pytest.mark.parametrize(("mesh", "extra"), list(meshes()))
def test_meshes_of_five_axes_equal_one_process(mesh, extra):
    check(mesh, mesh["pp"] + 1, extra)


def test_mesh_order_and_split_equal_one_process():
    extra = ["mesh.order=[tp,fsdp,pp,cp,dp]", "schedule.split=[2,7]", "schedule=zb_h1", TIED]
    check({"pp": 2, "tp": 2}, 3, extra)


WITHOUT_BLOCK = {  # the first stage has the embedding alone and the last one the head, as Llama 3 405B's have
    "both": ["schedule=interleaved", "schedule.split=[0,4,5,0]", "recompute=selective"],
    "last, V": ["schedule=zb_v", "schedule.split=[2,3,4,0]", TIED, "mesh.zero=3"],
    "last, halves": ["schedule=zb_h1", "schedule.split=[9,0]", "recompute=full", "mesh.zero=2"],
    "last, DualPipe": ["schedule=dualpipe_v", "schedule.split=[3,3,3,0]", "recompute=every"],
}


@pytest.mark.parametrize("name", ["both", *(pytest.param(n, marks=pytest.mark.full) for n in [*WITHOUT_BLOCK][1:])])
def test_stages_without_block_equal_one_process(name):
    check({"pp": 2}, 4, WITHOUT_BLOCK[name])


def shuffled(draw: random.Random) -> tuple[int, int, list[list[Action]]]:
    """(pp, microbatches, table): the table of a schedule in which some actions of a rank are swapped."""
    pp, m = draw.choice((2, 3)), draw.choice((2, 3, 4))
    table = [list(row) for row in build(draw.choice(SCHEDULES), pp, m).table]
    for _ in range(draw.randint(1, 12)):
        row = draw.choice(table)
        i = draw.randrange(len(row) - 1)
        j = i + 1 if draw.random() < 0.8 else draw.randrange(len(row))
        row[i], row[j] = row[j], row[i]
    return pp, m, table


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.full) for s in range(1, 16))])
def test_shuffled_tables_equal_one_process_or_are_refused(seed, tmp_path):
    """A case never hangs: it ends within the two minutes of `run_ranks`."""
    draw, refused = random.Random(seed), 0
    while True:
        pp, m, table = shuffled(draw)
        path = tmp_path / "table.csv"
        write(table, path)
        try:
            build("csv", pp, m, path=path)
            break
        except IllegalSchedule:
            refused += 1
    print(f"seed {seed}: {refused} refused, then one of pp={pp} m={m}")
    check({"pp": pp}, m, ["schedule=csv", f"schedule.path={path}", *[TIED] * (seed % 2)])


@pytest.mark.full
def test_thirty_two_ranks_equal_one_process():
    """All five axes at once."""
    check(dict.fromkeys(("pp", "dp", "fsdp", "cp", "tp"), 2), 4, ["schedule=zb_v", TIED, PACKED, "mesh.zero=2"])


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_pipeline_in_fp32_is_near_one_process(schedule):
    """Compared with the same microbatches, because nine layers amplify other roundings of activations beyond the
    bound."""
    same = [*DEEP, "precision.params=fp32", "precision.compute=fp32", "train.global_batch=8", "train.micro_batch=2"]
    run = train(2, [*same, f"schedule={schedule}", "mesh.pp=2"], "uneven")
    compare(run, train(1, same, "uneven"), loss=1e-6, state=1e-5)
