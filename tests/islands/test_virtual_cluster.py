"""The protocol of islands in a virtual cluster: random faults, directed scenes, and a kill at every point of a step."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.islands import virtual
from tests.islands.scenes import Ambush, FixedAddresses, RareExchanges, Scene, play, storm
from tests.islands.virtual import Violation

STEPS = 30
CHUNKS = 5
# islands -> (number of random runs by default, in the full sweep, steps)
RANDOM_RUNS = {2: (50, 3000, 60), 3: (30, 3000, 60), 4: (15, 1500, 60), 5: (8, 1000, 60), 8: (3, 300, 40)}
STORMS = {2: (20, 1000), 3: (12, 400), 4: (5, 200), 5: (3, 100)}
LARGE = {16: (4, 10), 32: (2, 5), 64: (1, 3)}  # islands -> (runs of a chunk, steps)


# -------------------------------------------------------------------------------------------------------- random faults


@pytest.fixture(autouse=True)
def hangs_end_soon(monkeypatch):
    """Let a run count as a hang earlier, so that a failing test ends soon."""
    monkeypatch.setattr(virtual, "LONGEST_S", 1000.0)


def check(run: Callable[..., object], seed: int, islands: int, faults: int, steps: int, *more: type[Scene]) -> None:
    """Fail with a line that repeats the run, if it breaks a promise."""
    try:
        run(seed, islands, faults, steps, *more)
    except Violation as e:
        names = "".join(f", {x.__name__}" for x in more)
        pytest.fail(f"{run.__name__}({seed}, {islands}, {faults}, {steps}{names}): {e}", pytrace=False)


@pytest.mark.parametrize("islands", RANDOM_RUNS)
def test_run_random_faults_breaks_no_promise(islands):
    count, _, steps = RANDOM_RUNS[islands]
    for seed in range(count):
        check(virtual.run, seed, islands, seed % 13, steps)


@pytest.mark.parametrize("islands", STORMS)
def test_storm_bursts_of_faults_break_no_promise(islands):
    for seed in range(STORMS[islands][0]):
        check(storm, seed, islands, 8, 60)


@pytest.mark.parametrize("islands", STORMS)
def test_storm_rare_exchanges_break_no_promise(islands):
    for seed in range(STORMS[islands][0] // 2):
        check(storm, seed, islands, 8, 60, RareExchanges)


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("islands", RANDOM_RUNS)
def test_run_many_random_faults_breaks_no_promise(islands, chunk):
    _, count, steps = RANDOM_RUNS[islands]
    for seed in range(chunk * count // CHUNKS, (chunk + 1) * count // CHUNKS):
        check(virtual.run, 10_000 + seed, islands, seed % 17, steps)


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("cluster", [Scene, Ambush, FixedAddresses, RareExchanges])
@pytest.mark.parametrize("islands", STORMS)
def test_storm_many_bursts_of_faults_break_no_promise(islands, cluster, chunk):
    count = STORMS[islands][1] // CHUNKS
    for seed in range(chunk * count, (chunk + 1) * count):
        check(storm, 10_000 + seed, islands, 10, 60, cluster)


@pytest.mark.full
@pytest.mark.parametrize("chunk", range(4))
@pytest.mark.parametrize("islands", LARGE)
def test_run_large_clusters_break_no_promise(islands, chunk):
    count, steps = LARGE[islands]
    for seed in range(chunk * count, (chunk + 1) * count):
        check(virtual.run, 10_000 + seed, islands, 4 + seed, steps)


# --------------------------------------------------------------------------------------------------------------- replay


def fingerprint(seed: int) -> str:
    """Return a hash of all that happens in a run."""
    made = storm(seed, 4, 8)
    return hashlib.sha256("\n".join(made.trace).encode()).hexdigest()


def test_run_same_seed_repeats_all_events():
    assert fingerprint(3) == fingerprint(3) != fingerprint(4)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_run_same_seed_with_other_hashes_repeats_all_events(hash_seed):
    code = "from tests.islands.test_virtual_cluster import fingerprint; print(fingerprint(3))"
    env, root = os.environ | {"PYTHONHASHSEED": hash_seed}, Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == fingerprint(3)


# --------------------------------------------------------------------------------------------------------------- scenes


def started(islands: int, steps: int = STEPS) -> Scene:
    """Return a cluster that has finished some steps."""
    scene = Scene(0, islands, steps)
    scene.start_all()
    scene.run_to_step(5)
    return scene


def lines(scene: Scene, name: str, begin: str) -> list[str]:
    return [line for line in scene.lines[name] if line.startswith(begin)]


def all_steps(scene: Scene, life: str) -> bool:
    """Return True if a process has finished all steps once, in order."""
    return scene.finished[life] == list(range(1, scene.rules.last + 1))


def test_scene_no_faults_finishes_all_steps_in_one_epoch():
    scene = Scene(0, 3)
    scene.start_all()
    scene.run_to_end()
    assert len(scene.epochs) == 1
    assert all(all_steps(scene, f"{name}#{k}") for k, name in enumerate(scene.names, 1))


def test_scene_two_plus_one_the_two_go_on_and_the_one_waits_and_joins_again():
    scene = started(3, 80)
    scene.partition({"i2"})
    scene.run_for(12)
    alone, pair = scene.done("i2"), scene.done("i0")
    assert pair > alone + 5 and scene.island("i2").number == 1
    assert lines(scene, "i2", "waits: ") == [
        "waits: 1 of 3 islands (i2) cannot go on alone, because i0, i1 may still train: "
        "they go on when more than half are here"
    ]
    assert not lines(scene, "i0", "waits: ") + lines(scene, "i1", "waits: ")
    scene.mend()
    scene.run_to_end()
    assert all_steps(scene, "i0#1") and all_steps(scene, "i1#2")
    assert scene.finished["i2#3"][0] == 1 and scene.finished["i2#3"][-1] == 80


@pytest.mark.parametrize("side", [{"i0", "i1"}, {"i0", "i3"}])
def test_scene_two_plus_two_only_the_side_of_the_first_member_goes_on(side):
    scene = started(4, 80)
    assert scene.epochs[1].names[0] == "i0"
    others = sorted(set(scene.names) - side)
    scene.partition(side)
    scene.run_for(12)
    assert min(map(scene.done, side)) > max(map(scene.done, others)) + 5
    for name in others:
        here, missing = ", ".join(others), ", ".join(sorted(side))
        line = f"waits: 2 of 4 islands ({here}) cannot go on alone, because {missing} may still train: "
        assert {said.startswith(line) for said in lines(scene, name, "waits: ")} <= {True}
    assert any(lines(scene, name, "waits: ") for name in others)
    scene.mend()
    scene.run_to_end()
    assert all_steps(scene, "i0#1")


def test_scene_founder_killed_the_others_go_on_and_it_joins_again():
    scene = started(3, 60)
    scene.kill("i0")
    scene.run_to_step(20, "i1", "i2")
    assert scene.island("i1").epoch.names == ("i1", "i2")
    scene.start("i0")
    scene.run_to_end()
    assert all_steps(scene, "i1#2") and scene.island("i1").epoch.names[-1] == "i0"


@pytest.mark.parametrize("holder", ["i0", "i1"])
@pytest.mark.parametrize("has_disk", [True, False])
def test_scene_door_holder_killed_an_island_that_returns_finds_the_others(holder, has_disk):
    scene = started(4, 100)
    scene.kill(holder)
    scene.run_for(1)
    scene.kill("i3")
    if not has_disk:
        del scene.disk["i3"]
    scene.run_for(1)
    scene.start("i3")
    scene.run_to_end(*(n for n in scene.names if n != holder))


def test_scene_half_killed_with_the_first_member_the_others_wait_for_it():
    scene = started(4)
    scene.kill("i0")
    scene.kill("i1")
    scene.run_for(12)
    assert max(scene.done("i2"), scene.done("i3")) < 12 and len(scene.epochs) == 1
    assert lines(scene, "i2", "waits: 2 of 4 islands (i2, i3) cannot go on alone, because i0, i1 may still train: ")
    scene.start("i1")
    scene.run_to_end("i1", "i2", "i3")


def test_scene_half_killed_without_the_first_member_it_goes_on():
    scene = started(4)
    scene.kill("i2")
    scene.kill("i3")
    scene.run_to_end("i0", "i1")
    assert all_steps(scene, "i0#1") and all_steps(scene, "i1#2")


def test_scene_all_killed_and_restarted_go_on_from_the_newest_checkpoint():
    scene = started(3)
    scene.run_to_step(12)
    history = dict(scene.processes["i1"].history)
    for name, step in (("i0", 4), ("i1", 12), ("i2", 0)):
        scene.kill(name)
        scene.begin_at(name, step, history)
    number = max(scene.epochs)
    scene.run_for(5)
    scene.start_all()
    scene.run_to_end()
    first = scene.epochs[number + 1]
    assert (first.begin, first.holders, {*first.learners, "i1"}) == (13, ("i1",), set(first.names))
    assert scene.processes["i0"].history[12] == history[12]


def test_scene_name_taken_twice_the_second_stops_with_one_line():
    scene = started(3)
    twin = scene.start_twin("i1")
    scene.run(lambda: twin.stopped)
    assert scene.over["i1"] == "the name i1 is taken by another island: give another islands.name"
    scene.by_address.pop(twin.member.address, None)
    scene.run_to_end()
    assert len(scene.epochs) == 1


def test_scene_other_plan_the_line_names_the_key():
    scene = Scene(0, 3)
    scene.rules = replace(scene.rules, count=2)
    scene.start("i0")
    scene.start("i1")
    scene.run_to_step(5, "i0", "i1")
    scene.mutate = lambda island: setattr(island, "start", replace(island.start, plan={"model": "other", "more": "1"}))
    scene.start("i2")
    scene.run_to_end("i0", "i1")
    assert scene.over["i2"] in {
        f"island {name} has model=tiny, this one has other (and 1 more keys): islands train one model and plan"
        for name in ("i0", "i1")
    }
    assert len(scene.epochs) == 1


def test_scene_island_leaves_no_step_is_lost():
    scene = started(3)
    process = scene.processes["i2"]
    scene.leave("i2")
    scene.run_to_end("i0", "i1")
    assert process.stopped and scene.over["i2"] == ""
    assert all_steps(scene, "i0#1") and all_steps(scene, "i1#2")
    assert scene.epochs[2].names == ("i0", "i1") and not scene.epochs[2].holders
    assert scene.finished["i2#3"] == list(range(1, scene.epochs[2].begin))


def test_scene_all_restarted_soon_decide_the_next_epoch():
    for seed in range(20):
        scene = Scene(seed, 2)
        scene.start_all()
        scene.run_to_step(5)
        for name in scene.names:
            scene.kill(name)
        number = max(scene.epochs)
        scene.run_for(1 + 0.2 * seed)
        scene.start_all()
        scene.run_for(20)
        assert max(scene.epochs) > number, f"seed {seed}: nothing is decided after 20 s"


@pytest.mark.parametrize("lost", ["i0", "i1"])
def test_scene_one_of_two_killed_the_other_goes_on_alone(lost):
    scene = started(2)
    (other,) = {"i0", "i1"} - {lost}
    life = scene.processes[other].member.life
    scene.kill(lost)
    scene.run_to_end(other)
    assert all_steps(scene, life) and scene.epochs[2].names == (other,)


@pytest.mark.parametrize("lost", ["i0", "i1"])
def test_scene_host_of_one_of_two_lost_the_other_waits_and_names_it(lost):
    scene = started(2)
    (other,) = {"i0", "i1"} - {lost}
    scene.kill(lost, host=True)
    scene.run_for(60)
    assert len(scene.epochs) == 1 and scene.done(other) < 12
    assert lines(scene, other, "waits: ") == [
        f"waits: 1 of 2 islands ({other}) cannot go on alone, because {lost} may still train: "
        "they go on when more than half are here"
    ]
    scene.start(lost)
    scene.run_to_end()


def stick(scene: Scene, name: str) -> None:
    """Let the ranks of an island do nothing more, while its leader goes on."""
    scene.processes[name].rank.task += 1
    scene.processes[name].rank.kind = "stuck"


def awaited(scene: Scene) -> tuple[int, str]:
    """Return the step in which the first island waits, and for whom."""
    step = scene.done("i0") + 1
    return step, scene.island("i0").awaited(step)


def test_scene_island_computes_nothing_more_the_others_name_it_and_wait():
    scene = started(3)
    stick(scene, "i1")
    scene.run_for(60)
    step, line = awaited(scene)
    assert line == f"island i1, which has not computed step {step}" and len(scene.epochs) == 1
    stick(scene, "i2")
    scene.island("i2").computed = 0
    scene.run_for(5)
    assert awaited(scene) == (step, f"islands i1, i2, which have not computed step {step}")
    scene.kill("i1")
    scene.kill("i2")
    scene.start("i1")
    scene.start("i2")
    scene.run_to_end()


def test_scene_island_computed_but_sends_nothing_the_others_name_it():
    scene = started(2)
    stick(scene, "i1")
    scene.run_for(20)
    scene.island("i1").computed = awaited(scene)[0]
    scene.run_for(5)
    step, line = awaited(scene)
    assert line == f"island i1, which has not sent all gradients of step {step}"


def test_scene_new_island_reads_no_weights_the_others_name_it():
    scene = started(3, 80)
    scene.kill("i2")
    scene.run_for(8)
    scene.start("i2")
    scene.run(lambda: "i2" in scene.island("i0").epoch.learners)
    stick(scene, "i2")
    scene.run_for(20)
    step, line = awaited(scene)
    assert line == f"island i2, which has not read the weights before step {step}"


# ---------------------------------------------------------------------------------------------------------- kill points


@cache
def number_of_events() -> int:
    return play(-1, "i0")[0].events


def kill_everywhere(victim: str, offset: int, stride: int) -> set[str]:
    """Kill an island at every event of a stride, and return everything it did at these moments."""
    seen = set()
    for point in range(offset, number_of_events(), stride):
        try:
            seen |= play(point, victim)[1]
        except Violation as e:
            pytest.fail(f"play({point}, {victim!r}): {e}", pytrace=False)
    return seen


@pytest.mark.parametrize("victim", ["i0", "i1", "i2"])
def test_scene_killed_at_points_of_a_step_all_end(victim):
    seen = kill_everywhere(victim, 5, 31)
    assert {"compute", "offered", "sharer"} <= seen


@pytest.mark.full
@pytest.mark.parametrize("victim", ["i0", "i1", "i2"])
def test_scene_killed_at_every_point_of_a_step_all_end(victim):
    seen = kill_everywhere(victim, 0, 1)
    expected = {"compute", "offered", "may finish", "sharer", "frozen", "accepter"}
    expected |= {"i0": {"proposer"}, "i1": {"leaver"}, "i2": {"learner", "heal"}}[victim]
    assert expected <= seen


def test_scene_planned_epoch_decided_after_a_promise_for_a_loss_the_steps_before_it_are_finished():
    """Two members promise to replace a lost one, and then learn that a planned epoch had been accepted before. The
    steps before it belong to the epoch whose reads the promise has cancelled."""
    check(virtual.run, 11_726, 3, 9, 60)


def test_scene_planned_epoch_replaces_a_step_that_was_begun_before():
    """Between the promise, which cancels the step, and the decision the ranks did not look."""
    check(storm, 10_084, 5, 10, 60, RareExchanges)
