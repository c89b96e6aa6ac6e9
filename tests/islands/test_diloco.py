"""DiLoCo between islands of different meshes equals the same algorithm in one process."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lab.islands import in_one_process
from ndtrain.engine.island_tasks import Tasks
from ndtrain.engine.outer_step import Exchanges
from ndtrain.run import exit_status
from tests.islands.runs import Islands, island_arguments, kill_and_revive, run_one
from tests.lib.helpers import checkpoint_of, rank_main, rows, write_corpus

STEPS, OUTER_LR, OUTER_MOMENTUM = 14, 0.7, 0.8
CASES = {  # the meshes of the islands, and further overrides
    "tp and one process": (["tp", "one"], ["islands.codec=int8", "islands.fragments=2", "islands.delay=1"]),
    "not rounded": (["fsdp", "pp"], []),
    "bf16": (["cp", "one"], ["islands.codec=bf16"]),
    "int4 in fragments": (["tp", "fsdp", "one"], ["islands.codec=int4", "islands.fragments=4"]),
    "zero 1, tied embeddings, ema": (
        ["dp", "tp"],
        ["mesh.zero=1", "model.tie_word_embeddings=true", "optim.ema=0.9", "islands.codec=int8", "islands.delay=3"],
    ),
    "optimizer of whole tensors": (["fsdp", "one"], ["plugins=[example_package.parts]", "optim=factored"]),
    "muon": (["tp", "one"], ["optim=muon", "optim.ns_dtype=fp64"]),
    "experts": (["ep", "one"], ["model=moe_debug", "moe.balance=none", "islands.codec=int8"]),
}
PLUGINS = str(Path(__file__).parents[1] / "plugins")
BY_DEFAULT = "tp and one process"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == BY_DEFAULT else pytest.mark.full) for case in CASES]
)
def test_diloco_of_different_meshes_equals_one_process(case, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", f"{PLUGINS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    meshes, more = CASES[case]
    own = [
        "islands.sync=diloco", "islands.inner_steps=4", f"islands.outer_lr={OUTER_LR}",
        f"islands.outer_momentum={OUTER_MOMENTUM}", *more,
    ]  # fmt: skip
    args = island_arguments(tmp_path, write_corpus(tmp_path / "corpus.txt"), STEPS, *own)
    wanted = in_one_process.train(tmp_path, args, len(meshes), (OUTER_LR, OUTER_MOMENTUM)).weights
    names = dict(zip("abc", meshes, strict=False))
    with Islands(tmp_path, args, names) as islands:
        for name in names:  # one after the other, so that the first one has the first rows
            islands.start(name)
            islands.wait_for_door()
        islands.wait()
    for name in names:
        assert [row["step"] for row in rows(tmp_path / name)] == list(range(1, STEPS + 1))
        with safe_open(checkpoint_of(tmp_path / name, STEPS) / "model.safetensors", "pt") as saved:
            assert set(saved.keys()) == set(wanted)
            for tensor, whole in wanted.items():
                torch.testing.assert_close(saved.get_tensor(tensor), whole, rtol=1e-9, atol=1e-10, msg=tensor)


def arguments_of(tmp_path, steps: int, *more: str) -> list[str]:
    own = ["islands.sync=diloco", "islands.inner_steps=5", "islands.codec=int8", "model.hidden_size=32", *more]
    return island_arguments(tmp_path, write_corpus(tmp_path / "corpus.txt"), steps, *own)


def check_same_weights(tmp_path, names, steps: int) -> None:
    """All islands end with the same bits."""
    saved = [checkpoint_of(tmp_path / name, steps) / "model.safetensors" for name in names]
    assert len({path.read_bytes() for path in saved}) == 1


@pytest.mark.full
def test_island_that_is_killed_and_returns_begins_with_the_outer_weights(tmp_path):
    """The other island goes on alone. The returning one reads the outer weights, and both end with the same ones."""
    steps = 150
    with Islands(tmp_path, arguments_of(tmp_path, steps, "islands.delay=2"), {"a": "one", "b": "one"}) as islands:
        islands.start("a")
        islands.start("b")
        islands.wait_for_step("b", 12)
        islands.kill("b")
        at = islands.step("a")
        islands.wait_for_step("a", at + 10)
        islands.start("b", "resume=auto")
        islands.wait()
    check_same_weights(tmp_path, "ab", steps)
    sharers = {row["islands/sharers"] for row in rows(tmp_path / "a")}
    assert [row["step"] for row in rows(tmp_path / "a")] == list(range(1, steps + 1)) and sharers == {1, 2}
    returned = [row["step"] for row in rows(tmp_path / "b")]
    assert returned[-1] == steps and returned != list(range(returned[0], steps + 1))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["one", "tp"])
def test_slow_island_stops_its_inner_steps_earlier_after_the_grace_time(mesh, tmp_path):
    steps = 100
    args = arguments_of(tmp_path, steps, "islands.grace_s=0.5", "islands.inner_steps=20", "optim.warmup=2")
    with Islands(tmp_path, args, {"a": "one", "b": mesh}) as islands:
        islands.start("a")
        islands.start("b")
        islands.wait_for_step("b", 21)
        islands.pause("b", seconds=4.0)
        islands.wait()
    check_same_weights(tmp_path, "ab", steps)
    assert [row["step"] for row in rows(tmp_path / "a")] == list(range(1, steps + 1))
    logged = [row["step"] for row in rows(tmp_path / "b")]
    for exchange in range(20, steps + 1, 20):
        before = [step for step in logged if exchange - 20 < step <= exchange]
        assert before == list(range(exchange - 19, exchange - 19 + len(before))), "it stops early"
    assert len(logged) < steps
    if mesh == "one":  # on a busy machine tp stays slower than the other island
        assert logged[-1] == steps


def slow_main(args: list[str]) -> int:
    """For `Islands`: an island that says that it is slow, so that it gets no rows."""
    Tasks.measured = lambda self, rows_per_s: self.leader and self.leader.set_speed(1e-3 * rows_per_s)
    return rank_main(args)


@pytest.mark.full
def test_island_without_rows_takes_part_in_exchanges_and_saves_what_the_others_have_computed(tmp_path):
    """After some exchanges the fast island gets all rows."""
    steps, more = 140, ["islands.inner_steps=2", "checkpoint.every=20", "checkpoint.keep=9"]
    with Islands(
        tmp_path, arguments_of(tmp_path, steps, *more), {"a": "one", "b": "one"}, mains={"b": slow_main}
    ) as islands:
        islands.start("a")
        islands.start("b")
        islands.wait()
    assert rows(tmp_path / "b")[-1]["step"] < 120, "it has no rows any more"
    for step in (120, 140):
        check_same_weights(tmp_path, "ab", step)
    states = [json.loads((checkpoint_of(tmp_path / name, steps) / "state.json").read_text()) for name in "ab"]
    assert states[0]["tokens"] == states[1]["tokens"] > 0
    assert exit_status.read(tmp_path / "b").why == "finished"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_islands_that_are_killed_at_random_moments_end_with_the_same_weights(seed, tmp_path):
    steps = 400
    meshes = [["tp", "one"], ["one", "fsdp", "one"]][seed % 2]
    more = ["islands.fragments=5", "checkpoint.every=25"] if seed < 2 else ["islands.delay=3", "checkpoint.every=25"]
    names = dict(zip("abc", meshes, strict=False))
    with Islands(tmp_path, arguments_of(tmp_path, steps, *more), names) as islands:
        for name in names:
            islands.start(name)
        done = kill_and_revive(islands, 5, steps, seed)
        islands.wait()
    check_same_weights(tmp_path, names, steps)
    assert done == 5


@pytest.mark.full
def test_stopped_islands_resume_and_equal_one_process(tmp_path):
    """They stop between two exchanges, and resume on other meshes. One of them goes on without islands afterwards."""
    own = ["islands.sync=diloco", "islands.inner_steps=4", f"islands.outer_lr={OUTER_LR}", "checkpoint.keep=9"]
    own.append(f"islands.outer_momentum={OUTER_MOMENTUM}")
    args = island_arguments(tmp_path, write_corpus(tmp_path / "corpus.txt"), STEPS, *own)
    wanted = in_one_process.train(tmp_path, args, 2, (OUTER_LR, OUTER_MOMENTUM)).weights
    for meshes, more in ((["one", "tp"], ["train.stop_at=6"]), (["fsdp", "one"], ["resume=auto"])):
        with Islands(tmp_path, args, dict(zip("ab", meshes, strict=True))) as islands:
            for name in "ab":
                islands.start(name, *more)
                islands.wait_for_door()
            islands.wait()
    for name in "ab":
        with safe_open(checkpoint_of(tmp_path / name, STEPS) / "model.safetensors", "pt") as saved:
            for tensor, whole in wanted.items():
                torch.testing.assert_close(saved.get_tensor(tensor), whole, rtol=1e-9, atol=1e-10, msg=tensor)
    run_one(tmp_path / "alone", [*args, f"resume={checkpoint_of(tmp_path / 'a', 6)}", "train.steps=8"])
    assert [row["step"] for row in rows(tmp_path / "alone")] == [7, 8]


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("stop", [None, 1, 4, 6, 8, 13])
def test_exchanges_end_in_order_and_resume_where_they_stopped(stop, delay):
    """Each exchange is used after it is offered and before the next one. A resumed run repeats none."""
    last = stop or STEPS
    exchanges = Exchanges(4, 2, delay, last, is_end=stop is None)
    moments = [(exchanges.begins(k), exchanges.ends(k)) for k in range(1, exchanges.count + 1)]
    assert moments[-1] == (last, last) and all(begin <= end <= last for begin, end in moments)
    assert all(one[1] <= other[0] for one, other in pairwise(moments))
    whole = Exchanges(4, 2, delay, STEPS)
    for step in range(last):
        assert exchanges.done_at(step) == sum(end <= step for _, end in moments[:-1])
        assert exchanges.done_at(step) == whole.done_at(step)
    if stop:
        assert [whole.ends(k) for k in range(1, exchanges.count)] == [end for _, end in moments[:-1]]
        assert whole.done_at(stop) == exchanges.count - 1 and exchanges.units(exchanges.count, ["a", "b"]) == []
