"""Generated schedules run and have the bubble of theory. The checker refuses exactly the tables that cannot run."""

import random
import re
import subprocess
import sys
import time
from collections import ChainMap
from itertools import pairwise
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch.distributed.pipelining.schedules as peers

from ndtrain.schedule import (
    NAMES,
    Action,
    IllegalSchedule,
    Message,
    Schedule,
    ScheduleError,
    Span,
    build,
    check,
    default_chunks,
    simulate,
)
from ndtrain.schedule.__main__ import main
from ndtrain.schedule.draw import CELL, Panel, panel, timeline_svg
from ndtrain.schedule.file import write

GENERATED = [name for name in NAMES if name != "csv"]
CHUNKS = {"gpipe": (1, 2), "interleaved": (1, 2, 3)}
RANKS = (2, 4, 8, 16)


def idle(schedule, cost=None) -> set[float]:
    """The idle times of the ranks, from the first start of any rank to the last end of any."""
    timeline = simulate(schedule, *[cost] * (cost is not None))
    waits = {timeline.makespan - busy for busy in timeline.busy}
    share = sum(timeline.makespan - busy for busy in timeline.busy) / (schedule.pp * timeline.makespan)
    assert timeline.bubble == pytest.approx(share, abs=1e-12)
    return waits


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_are_legal_and_round_trip_as_csv(name, tmp_path):
    """For every size the table runs, and reading its file gives the same table."""
    for pp in range(1, 9):
        for m in range(1, 3 * pp + 2):
            for chunks in CHUNKS.get(name, (default_chunks(name),)):
                made = build(name, pp, m, chunks)  # checks
                assert made.pp == pp and made.stages == pp * chunks
                assert sum(map(len, made.table)) == m * made.stages * 2 + sum(
                    a.kind == "W" for row in made.table for a in row
                )
                write(made.table, tmp_path / "table.csv")
                read = build("csv", pp, m, path=tmp_path / "table.csv")
                assert (read.table, read.rank_of) == (made.table, made.rank_of)


def test_rank_of_places_stages_by_schedule():
    assert build("interleaved", 3, 3).rank_of == (0, 1, 2, 0, 1, 2)
    for name in ("zb_v", "dualpipe_v"):
        vee = build(name, 3, 5)
        assert vee.rank_of == (0, 1, 2, 2, 1, 0)
        assert [vee.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [name for name in GENERATED if build(name, 2, 4).splits_backward] == ["zb_h1", "zb_v", "dualpipe_v"]


# theory: bubble, with F=1, B=2, I=W=1


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_have_bubble_of_theory(name, p):
    for m in (p, p + 1, 3 * p, 4 * p + 3):
        assert idle(build(name, p, m)) == {3 * (p - 1)}
        assert simulate(build(name, p, m)).bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert idle(build(name, p, m), {"F": 3, "B": 5}) == {8 * (p - 1)}


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_has_bubble_of_theory(v, p):
    for m in (p, 2 * p, 3 * p):
        assert simulate(build("interleaved", p, m, v)).bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    for m in (
        p + 1,
        p + p // 2,
        2 * p - 1,
        2 * p + 1,
    ):  # also where pp does not divide: the longer warm-up keeps the bubble at its least
        assert idle(build("interleaved", p, m, v)) == {3 * (p - 1)}


@pytest.mark.parametrize("p", RANKS)
def test_zb_h1_has_bubble_of_paper(p):
    """(p-1)(F + I - W), a third of 1F1B's (p-1)(F + B) where all three are equal (arXiv:2401.10241, table 1)."""
    for m in (p, 2 * p, 3 * p + 1):
        assert idle(build("zb_h1", p, m)) == {p - 1}
        assert idle(build("zb_h1", p, m), {"F": 10, "I": 12, "W": 8}) == {14 * (p - 1)}


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_has_bubble_of_paper(p):
    """No rank waits between its first action and its last (arXiv:2405.15362). The remaining bubble is the p-1 forwards
    before the first input of the last rank. It is the minimum for this placement."""
    for m in (2 * p - 1, 2 * p, 3 * p + 1):
        schedule = build("zb_v", p, m)
        timeline = simulate(schedule)
        assert all(a.end == b.start for row in timeline.spans for a, b in pairwise(row))
        assert idle(schedule) == {p - 1}
        assert timeline.bubble == pytest.approx((p - 1) / (6 * m + p - 1), abs=1e-12)


@pytest.mark.parametrize("p", RANKS)
def test_dualpipe_v_has_bubble_of_paper(p):
    """(p-1)(F&B + B - 3W) as published, if an overlapped forward and backward take F&B and end together; here
    F&B = F + B. If they run one after the other, the results of the first are sent earlier, and half of that bubble
    remains."""
    for m in (2 * p, 3 * p + 1):
        schedule = build("dualpipe_v", p, m)
        assert idle_side_by_side(schedule) == {(p - 1) * (3 + 2 - 3)}
        assert idle(schedule) == {p - 1}


def idle_side_by_side(schedule) -> set[int]:
    """The idle times if a forward and a following backward of the rank's other stage are one action."""
    rows = [grouped(row) for row in schedule.table]
    end, free = {}, [0] * schedule.pp
    busy = [sum(duration(a) for a in row) for row in schedule.table]
    while any(rows):
        for rank, row in enumerate(rows):
            while row and all(may_run(a, ChainMap(end, dict.fromkeys(row[0])), schedule.stages) for a in row[0]):
                group = row.pop(0)
                needed = [d for a in group for d in needs(a, end, schedule.stages) if d not in group]
                free[rank] = max([free[rank], *(end[d] for d in needed)]) + sum(duration(a) for a in group)
                end |= dict.fromkeys(group, free[rank])
    return {max(free) - b for b in busy}


def grouped(row) -> list[list[Action]]:
    groups = [[row[0]]]
    for a in row[1:]:
        before = groups[-1]
        together = len(before) == 1 and before[0].kind == "F" and a.kind == "B" and before[0].stage != a.stage
        groups = [*groups[:-1], [*before, a]] if together else [*groups, [a]]
    return groups


def duration(a: Action) -> int:
    return {"F": 1, "B": 2, "I": 1, "W": 1}[a.kind]


# theory: live activations


@pytest.mark.parametrize("p", RANKS)
def test_schedules_have_expected_peak_of_activations(p):
    for m in (2 * p, 4 * p):
        peak = {name: simulate(build(name, p, m)).peak_shares for name in GENERATED}
        assert peak["gpipe"] == [m] * p
        assert peak["1f1b"] == [p - rank for rank in range(p)], "independent of the number of microbatches"
        assert peak["zb_h1"] == [p] * p, "1F1B's first rank, everywhere"
        assert peak["zb_v"] == [p] * p
        assert max(peak["dualpipe_v"]) == p + 0.5, "published: one chunk more than 2p"
        assert peak["interleaved"][0] == (3 * p - 1) / 2, "a warm-up of p + 2(p-1) chunks, and one"


def test_zb_h1_frees_input_gradient_activations_earlier():
    timeline = simulate(build("zb_h1", 4, 8))
    assert timeline.peak == [4, 4, 4, 4]
    assert timeline.peak_input == [4, 3, 2, 1]


def test_few_microbatches_shorten_makespan_and_bound_peak():
    """With fewer microbatches than fill a schedule, each one less still shortens it, and at most all are alive."""
    for name in GENERATED:
        for p in (2, 3, 4, 8):
            lines = [simulate(build(name, p, m)) for m in range(1, 2 * p + 1)]
            assert all(a.makespan < b.makespan for a, b in pairwise(lines))
            assert all(max(line.peak_shares) <= m for m, line in enumerate(lines, 1))


def test_simulate_applies_latency_and_cost_per_action():
    timeline = simulate(build("1f1b", 2, 1), latency=0.5)
    assert [(s.start, s.end) for row in timeline.spans for s in row] == [(0, 1), (5, 7), (1.5, 2.5), (2.5, 4.5)]
    assert timeline.makespan == 7 and timeline.busy == [3, 3] and timeline.bubble == pytest.approx(1 - 6 / 14)
    by_stage = simulate(build("gpipe", 2, 2), lambda a: 1 + a.stage)
    assert [s.start for s in by_stage.spans[0]] == [0, 1, 7, 9] and by_stage.makespan == 10


# against PyTorch's own tables


def their_table(kind, pp, m, chunks):
    """The table of one of PyTorch's schedules, from its own method, without stages or processes."""
    rounds = max(1, m // pp)
    it = SimpleNamespace(
        pp_group_size=pp, n_local_stages=chunks, _num_stages=pp * chunks, num_stages=pp * chunks, _n_microbatches=m,
        number_of_rounds=rounds, microbatches_per_round=m // rounds,
    )  # fmt: skip
    if hasattr(kind, "_get_pipeline_order"):
        rows = kind._get_pipeline_order(it)
    else:
        rows = {rank: kind._calculate_single_rank_operations(it, rank) for rank in range(pp)}
    flat = {rank: [b for a in row if a for b in a.sub_actions or (a,)] for rank, row in rows.items()}
    return [
        [Action(a.computation_type.value, a.microbatch_index, a.stage_index) for a in flat[rank] if a.is_compute_op]
        for rank in range(pp)
    ]


PEERS = {
    "gpipe": (peers.ScheduleGPipe, 1, lambda pp, m: True),
    "1f1b": (peers.Schedule1F1B, 1, lambda pp, m: m >= pp),
    "interleaved": (peers.ScheduleInterleaved1F1B, 3, lambda pp, m: m % max(1, m // pp) == 0),
    "zb_h1": (peers.ScheduleInterleavedZeroBubble, 1, lambda pp, m: m % max(1, m // pp) == 0),
    "zb_v": (peers.ScheduleZBVZeroBubble, 2, lambda pp, m: True),
    "dualpipe_v": (peers.ScheduleDualPipeV, 2, lambda pp, m: m >= 2 * pp),
}


@pytest.mark.parametrize("name", PEERS)
def test_tables_are_no_worse_than_pytorch(name):
    """Tables equal PyTorch's for the numbers of microbatches that PyTorch supports with a legal table. Only zb_v
    differs, in the order of its last weight gradients; its bubble and peak are equal."""
    kind, chunks, has_one = PEERS[name]
    compared = 0
    for pp in (2, 3, 4, 8):
        for m in (1, 2, 3, pp, pp + 1, 2 * pp, 2 * pp + 1, 4 * pp):
            if not has_one(pp, m):
                continue
            ours, table = build(name, pp, m, chunks), their_table(kind, pp, m, chunks)
            if name == "1f1b":  # on the last rank, which has no warm-up, theirs counts forwards from 1
                table[-1] = [a._replace(microbatch=a.microbatch - (a.kind == "F")) for a in table[-1]]
            check(table, m, pp * chunks)
            theirs = Schedule(name, table, m, ours.rank_of)
            assert simulate(ours).bubble == simulate(theirs).bubble
            assert simulate(ours).peak == simulate(theirs).peak
            assert simulate(ours).peak_input == simulate(theirs).peak_input
            assert ours.table == table or name == "zb_v"
            compared += 1
    assert compared > 10


# messages


@pytest.mark.parametrize("name", GENERATED)
def test_messages_cover_each_cross_rank_need_once(name):
    schedule = build(name, 3, 7)
    expected = {}
    for rank, row in enumerate(schedule.table):
        for a in row:
            before = a.stage + {"F": -1, "W": 0}.get(a.kind, 1)
            source = schedule.rank_of[before] if 0 <= before < schedule.stages else rank
            if source != rank:
                message = Message("F" if a.kind == "F" else "B", a.microbatch, a.stage)
                expected.setdefault((source, rank), set()).add(message)
    for source in range(3):
        for target in range(3):
            sent = schedule.messages.get((source, target), [])
            assert len(sent) == len(set(sent)) and set(sent) == expected.get((source, target), set())


def test_messages_keep_the_order_of_the_row():
    assert build("1f1b", 2, 2).messages[0, 1] == [Message("F", 0, 1), Message("F", 1, 1)]
    vee = build("zb_v", 2, 3)
    assert vee.messages[1, 0][:4] == [Message("F", 0, 3), Message("F", 1, 3), Message("B", 0, 0), Message("F", 2, 3)]
    assert build("zb_v", 1, 3).messages == {}


# the checker


def test_check_names_missing_duplicate_or_misplaced_action():
    table = build("1f1b", 2, 2).table
    with pytest.raises(IllegalSchedule, match=r"^B\(microbatch 1, stage 1\) is missing$"):
        check([table[0], table[1][:-1]], 2, 2)
    with pytest.raises(IllegalSchedule, match=r"^rank 1: F\(microbatch 0, stage 1\) appears twice$"):
        check([table[0], [*table[1], table[1][0]]], 2, 2)
    with pytest.raises(
        IllegalSchedule,
        match=r"rank 1: B\(microbatch 0, stage 0\) must be on rank 0, like the earlier actions of its stage",
    ):
        check([table[0][:-2], [Action("B", 0, 0), *table[1]]], 2, 2)
    with pytest.raises(IllegalSchedule, match=r"rank 0: I\(microbatch 0, stage 0\) appears in addition to its B"):
        check([[*table[0], Action("I", 0, 0)], table[1]], 2, 2)
    with pytest.raises(IllegalSchedule, match=r"rank 0: B\(microbatch 0, stage 0\) appears in addition to its I"):
        check([[Action(kind, 0, 0) for kind in "FIB"]], 1, 1)
    with pytest.raises(
        IllegalSchedule,
        match=r"rank 0: F\(microbatch 2, stage 0\) is outside the schedule \(microbatches 0 to 1, stages",
    ):
        check([[*table[0], Action("F", 2, 0)], table[1]], 2, 2)
    with pytest.raises(IllegalSchedule, match=r"^W\(microbatch 0, stage 0\) is missing$"):
        check([[Action("F", 0, 0), Action("I", 0, 0)]], 1, 1)


def test_check_explains_deadlock_from_its_root():
    itself = (
        r"^rank 0: B\(microbatch 0, stage 0\) waits for rank 0: F\(microbatch 0, stage 0\) behind B\(.*0, stage 0\)$"
    )
    with pytest.raises(IllegalSchedule, match=itself):
        check([[Action("B", 0, 0), Action("F", 0, 0)]], 1, 1)
    # rank 0 waits for rank 1, which is no more to blame than it is: ranks 1 and 2 wait for each other
    rows = [
        [Action("F", 0, 0), Action("B", 0, 0)],
        [Action("F", 0, 1), Action("B", 0, 1), Action("F", 0, 3), Action("B", 0, 3)],
        [Action("F", 0, 2), Action("B", 0, 2)],
    ]
    with pytest.raises(IllegalSchedule) as error:
        check(rows, 1, 4)
    assert str(error.value) == (
        "rank 1: B(microbatch 0, stage 1) waits for rank 2: B(microbatch 0, stage 2), which waits for "
        "rank 1: B(microbatch 0, stage 3) behind B(microbatch 0, stage 1)"
    )
    assert (error.value.rank, error.value.index) == (1, 1)


def test_check_time_is_linear_in_microbatches():
    def seconds(microbatches):
        table = build("zb_v", 8, microbatches).table
        start = time.process_time()
        check(table, microbatches, 16)
        return time.process_time() - start

    few, many = (min(seconds(m) for _ in range(3)) for m in (16, 256))
    assert many < 64 * few, "16 times as many actions"


def test_check_refuses_exactly_tables_that_cannot_run():
    """Swaps, drops, repeats, moves or changes actions of legal tables, and compares the checker with the definition:
    each (microbatch, stage) has one F and either B or I and W, each stage has one rank, and every action runs."""
    draw = random.Random(0)
    refused = {"places": 0, "order": 0}
    for _ in range(1000):
        schedule = build(draw.choice(GENERATED), draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 5]))
        table = [list(row) for row in schedule.table]
        for _ in range(draw.choice([1, 1, 2, 3])):
            mutate(table, draw)
        placed = well_placed(table, schedule.microbatches, schedule.stages)
        heads = stuck_heads(table, schedule.stages, draw) if placed else None
        if placed and not heads:
            check(table, schedule.microbatches, schedule.stages)
            continue
        refused["order" if placed else "places"] += 1
        with pytest.raises(IllegalSchedule) as error:
            check(table, schedule.microbatches, schedule.stages)
        if placed:
            action = table[error.value.rank][error.value.index]
            assert heads[error.value.rank] == action, "it names the next action of a rank"
            named = f"rank {error.value.rank}: {action.kind}(microbatch {action.microbatch},"
            assert str(error.value).startswith(named)
    assert refused["places"] > 150 and refused["order"] > 200 and sum(refused.values()) < 850


def mutate(table, draw) -> None:
    row, other = draw.choice(table), draw.choice(table)
    if not row:
        return
    i, j = draw.randrange(len(row)), draw.randrange(len(row))
    act = draw.choice([*["swap"] * 3, *["neighbours"] * 6, "drop", "repeat", "move", "rename"])
    if act == "neighbours":
        row[i - 1], row[i] = row[i], row[i - 1]
    elif act == "swap":
        row[i], row[j] = row[j], row[i]
    elif act == "drop":
        del row[i]
    elif act == "repeat":
        row.insert(j, row[i])
    elif act == "move":
        other.insert(0, row.pop(i))
    else:
        row[i] = row[i]._replace(**draw.choice([{"kind": draw.choice("FBIW")}, {"microbatch": 7}, {"stage": 9}]))


def well_placed(table, microbatches, stages) -> bool:
    kinds = {(m, s): [] for m in range(microbatches) for s in range(stages)}
    ranks = {}
    for rank, row in enumerate(table):
        for a in row:
            ranks.setdefault(a.stage, set()).add(rank)
            kinds.setdefault((a.microbatch, a.stage), []).append(a.kind)
    inside = len(kinds) == microbatches * stages
    return inside and all(sorted(k) in (["B", "F"], ["F", "I", "W"]) for k in kinds.values()) and max(
        map(len, ranks.values())
    ) == 1  # fmt: skip


def stuck_heads(table, stages, draw) -> dict[int, Action]:
    """Runs the table, one random ready rank at a time. Returns the action at which each rank is stuck."""
    queues, done = [list(row) for row in table], set()
    while ready := [q for q in queues if q and may_run(q[0], done, stages)]:
        done.add(draw.choice(ready).pop(0))
    return {rank: q[0] for rank, q in enumerate(queues) if q}


def may_run(a: Action, done, stages: int) -> bool:
    if a.kind == "W":
        return ("I", a.microbatch, a.stage) in done
    if a.kind == "F":
        return a.stage == 0 or ("F", a.microbatch, a.stage - 1) in done
    after = a.stage == stages - 1 or any((kind, a.microbatch, a.stage + 1) in done for kind in "BI")
    return ("F", a.microbatch, a.stage) in done and after


def needs(a: Action, done, stages: int) -> list[Action]:
    """The completed actions that `a` depends on."""
    step = -1 if a.kind == "F" else 1
    kinds = {"F": "F", "W": ""}.get(a.kind, "BI")
    same_stage = {"F": "", "W": "I"}.get(a.kind, "F")
    candidates = [Action(k, a.microbatch, a.stage + step) for k in kinds] + [
        Action(k, a.microbatch, a.stage) for k in same_stage
    ]
    return [d for d in candidates if d in done]


# names, sizes and files


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zbv", 2, 4), ["zbv: no such schedule", "did you mean 'zb_v'?", "1f1b"]),
        (("1f1b", 2, 4, 2), ["1f1b has 1 stage(s) per rank, not chunks=2"]),
        (("zb_v", 2, 4, 1), ["zb_v has 2 stage(s) per rank, not chunks=1"]),
        (("gpipe", 0, 4), ["pp=0: must be at least 1"]),
        (("gpipe", 2, 0), ["microbatches=0: must be at least 1"]),
        (("gpipe", 2, 4, 0), ["chunks=0: must be at least 1"]),
        (("csv", 2, 4), ["csv needs the path of its file"]),
        (("csv", 2, 4, None, "none/such.csv"), ["none/such.csv: cannot be read as a schedule", "No such file"]),
    ],
)
def test_build_refuses_bad_arguments(arguments, words):
    with pytest.raises(ScheduleError) as error:
        build(*arguments)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


FILES = {
    "malformed": ("0F0,0B0\n1F0,1X0\n", "row 2, column 2: '1X0' is not an action: write <stage><F|B|I|W><microbatch>"),
    "stage first": ("0F0,0B0\n,F1\n", "row 2, column 2: 'F1' is not an action"),
    "too few rows": ("0F0,0B0\n", "1 rows of actions, but pp=2 needs one per rank"),
    "too many rows": ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", "3 rows of actions, but pp=2"),
    "microbatches": ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "has 2 microbatches, but the configuration has 1"),
    "twice": ("0F0,0B0\n\n,1F0,,1F0,1B0\n", "row 3, column 4: rank 1: F(microbatch 0, stage 1) appears twice"),
    "two ranks": (
        "0F0\n1F0,1B0,0B0\n",
        "row 2, column 3: rank 1: B(microbatch 0, stage 0) must be on rank 0, like the earlier actions of its stage",
    ),
    "missing": ("0F0,0B0\n1F0,1I0\n", "W(microbatch 0, stage 1) is missing"),
    "order": ("0B0,0F0\n1F0,1B0\n", "row 1, column 1: rank 0: B(microbatch 0, stage 0) waits for rank 0: F("),
    "nothing": ("", "0 rows of actions, but pp=2"),
    "no text": (b"\xff\xfe\x00", "cannot be read as a schedule"),
}


@pytest.mark.parametrize("case", FILES)
def test_bad_csv_file_is_refused(case, tmp_path):
    content, words = FILES[case]
    path = tmp_path / "my.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ScheduleError) as error:
        build("csv", 2, 1, path=path)
    assert str(error.value).startswith(str(path)) and words in str(error.value) and "\n" not in str(error.value)


def test_csv_with_gaps_and_several_stages_per_rank_is_read(tmp_path):
    path = tmp_path / "gaps.csv"
    path.write_text("0F0, ,,3F0,3B0,,,0B0,\n,1F0,2F0,,,2I0,1B0,2W0\n\n,,\n")
    schedule = build("csv", 2, 1, path=path)
    assert schedule.rank_of == (0, 1, 1, 0) and schedule.splits_backward
    assert build("csv", 2, 1, chunks=2, path=path).table == schedule.table
    with pytest.raises(ScheduleError, match="has 4 stages, but pp=2 and 3 chunks per rank make 6"):
        build("csv", 2, 1, chunks=3, path=path)


# the command and the drawing


def test_schedule_command_prints_and_writes_timeline(tmp_path, capsys):
    drawing, table = tmp_path / "timeline.svg", tmp_path / "table.csv"
    assert main(["schedule=zb_v", "pp=4", "microbatches=12", f"out={drawing}", f"csv={table}"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^0 +72 +36 +4\.0 % +4$", printed, re.MULTILINE) and "makespan 37.5" in printed
    ElementTree.parse(drawing)
    assert main(["schedule=csv", "pp=4", "microbatches=12", f"path={table}", "cost.F=2", "cost.W=3"]) == 0
    assert f"makespan {simulated(table):.6g}" in capsys.readouterr().out
    assert main(["schedule=1f1b", "pp=1", "microbatches=2", "cost.I=2"]) == 0
    assert "makespan 8" in capsys.readouterr().out, "a full backward is both its halves"


def simulated(path) -> float:
    return simulate(build("csv", 4, 12, path=path), {"F": 1, "I": 0.5, "W": 1.5}).makespan


def test_schedule_compare_prints_every_bubble(tmp_path, capsys):
    assert main(["compare", "pp=4", "microbatches=8", f"out={tmp_path / 'all.svg'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    bubbles = {line.split()[0]: line.split()[3] for line in lines[1:-1]}
    assert bubbles == {
        "gpipe": "27.3", "1f1b": "27.3", "interleaved": "15.8", "zb_h1": "11.1", "zb_v": "5.9", "dualpipe_v": "5.9",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("schedule=1f1b pp=2", "microbatches: missing"),
        ("pp=2 microbatches=2", "schedule: missing"),
        ("schedule=1f1b microbatch=2 pp=2", "microbatch: no such key; did you mean 'microbatches'?"),
        ("schedule=1f1b microbatches=2 pp=two", "pp=two: must be a whole number, at least 1"),
        ("schedule=1f1b microbatches=2 pp=2 cost.F=0", "cost.F=0: must be a time"),
        ("schedule=1f1b microbatches=2 pp=2 latency=-1", "latency=-1: must be a time"),
        ("schedule=1f1b microbatches=2 pp=2 out", "out: arguments are key=value"),
        ("schedule=1f1b microbatches=2 pp=2 out=/none/such/x.svg", "No such file"),
        ("compare microbatches=2 pp=2 csv=x.csv", "csv: not supported by compare"),
    ],
)
def test_bad_argument_is_one_line_error(arguments, words, capsys):
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_schedule_help_lists_options():
    done = subprocess.run([sys.executable, "-m", "ndtrain.schedule", "-h"], capture_output=True, text=True)
    assert done.returncode == 0 and "cost.F" in done.stdout and ", ".join(NAMES) in done.stdout


SVG = "{http://www.w3.org/2000/svg}"


def cells(picture: str) -> list[list[tuple[str, float, float]]]:
    """For each panel, (tooltip, x, width) of its cells."""
    panels = ElementTree.fromstring(picture).findall(f"{SVG}g")
    return [
        [
            (g.findtext(f"{SVG}title"), float(r.get("x")), float(r.get("width")))
            for g in p.iter(f"{SVG}g")
            for r in g.findall(f"{SVG}rect")
            if r.get("height") == str(CELL) and g.find(f"{SVG}title") is not None
        ]
        for p in panels
    ]


def test_timeline_svg_shows_predicted_and_measured():
    timeline = simulate(build("interleaved", 2, 4))
    measured = [[Span(s.action, 100 + s.start / 2, 100 + s.end / 2) for s in row] for row in timeline.spans]
    panels = [panel(timeline, "predicted <1>"), Panel("measured", measured)]
    same = cells(timeline_svg(panels, "ms"))
    assert [len(p) for p in same] == [32, 32]
    assert same[0][1][0] == "F(microbatch 1, stage 0): 1 to 2"
    for (_, x, width), (_, measured_x, measured_width) in zip(*same, strict=True):
        assert measured_x == pytest.approx(x / 2, abs=0.11), "the same scale, from its own first action"
        assert measured_width == pytest.approx(width / 2, abs=0.6)
    own = cells(timeline_svg(panels, "ms", same_scale=False))
    assert [c[1:] for c in own[0]] == [c[1:] for c in own[1]], "each fills the width"
    text = timeline_svg(panels, "ms")
    assert "predicted &lt;1&gt;: bubble 11.1 %" in text and "weight gradient" not in text
