"""`train.trace`: one step's timeline, measured and predicted, in the run folder."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest
import torch

from ndtrain.config import load_config, resolve, world_from_env
from ndtrain.engine.executor import ActionTiming
from ndtrain.engine.trace import Trace, Tracer, _aligned, _Log
from ndtrain.engine.train_step import TrainingStep
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.parallel.build import build_stages, initialise
from ndtrain.schedule import Action, Span, build, simulate
from ndtrain.train import main
from tests.lib.helpers import arguments, checkpoint_of, rank_main, rows, tensor_bytes, write_corpus
from tests.lib.parity import make_batches
from tests.lib.ranks import run_ranks

FULL = pytest.mark.full


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


def made_up(name: str = "1f1b", pp: int = 2, dp: int = 1, microbatches: int = 4, **cost: float) -> Trace:
    """The trace of a step that ran exactly as predicted, the same on every replica."""
    schedule = build(name, pp, microbatches)
    line = simulate(schedule, {"F": 0.01, "B": 0.02, "I": 0.01, "W": 0.01} | cost).spans
    spans = [row for row in line for _ in range(dp)]
    return Trace(3, MeshSpec(("pp", "dp"), (pp, dp)), schedule, spans)


def late(spans: list[Span], seconds: float) -> list[Span]:
    return [Span(a, start + seconds, end + seconds) for a, start, end in spans]


def read_events(folder: Path, step: int = 3) -> list[dict]:
    return json.loads((folder / f"step-{step:08d}.json").read_text())["traceEvents"]


def text_of(path: Path) -> str:
    return "\n".join(ElementTree.parse(path).getroot().itertext())


# ------------------------------------------------------------------------------------------------------- the timeline


def rank_traces(overrides: list[str], steps: int) -> list[Trace | None]:
    """On one rank: the traces of `steps` steps, after two that are not traced."""
    rank, _, world = world_from_env()
    cfg = resolve(load_config(overrides), world)
    mesh = Mesh(MeshSpec.of(cfg.mesh), rank, torch.device("cpu"))
    stages = build_stages(cfg, mesh)
    initialise(stages, cfg.run.seed)
    step, traces = TrainingStep(cfg, mesh, stages), []
    for number in range(1, 3 + steps):
        batches = make_batches(cfg, mesh, number, "none")
        tracer = Tracer(step, mesh) if number > 2 else None
        step.run(number, batches).wait()
        traces.append(tracer.finish(number) if tracer else None)
    return traces[2:]


WIDE = [
    "model.vocab_size=256", "model.hidden_size=128", "model.intermediate_size=384", "model.num_hidden_layers=4",
    "model.num_attention_heads=4", "model.num_key_value_heads=4", "train.seq_len=128", "train.global_batch=16",
    "train.micro_batch=2", "train.steps=10",
]  # fmt: skip


@pytest.mark.quiet
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_trace_of_pipeline_matches_prediction(schedule):
    """Each rank has a core of its own. The test detects a pipeline that waits where the schedule does not: a backward
    that sends its gradient only after the weight gradient, or a send that blocks."""
    traces, others = run_ranks(rank_traces, 2, [*WIDE, "mesh.pp=2", f"schedule={schedule}"], 7)
    assert others == [None] * 7
    for trace in traces:
        assert [[a for a, *_ in row] for row in trace.measured.spans] == build(schedule, 2, 8).table
        for row in trace.spans:
            assert all(a.start < a.end <= b.start for a, b in pairwise(row))
        assert min(s.end - s.start for row in trace.spans for s in row) > 1e-3, "too short to be measured"
    off = [trace.measured.makespan / trace.predicted.makespan - 1 for trace in traces]
    assert abs(median(off)) < 0.15, f"measured over predicted, less 1: {[f'{o:.1%}' for o in off]}"


def test_trace_of_ideal_step_is_zero_percent_off():
    trace = made_up("zb_v", pp=4, dp=2, microbatches=9, I=0.017)
    assert trace.measured.makespan == pytest.approx(trace.predicted.makespan)
    assert trace.measured.bubble == pytest.approx(trace.predicted.bubble)
    assert "(0.0 % off)" in trace.summary() and f"bubble {100 * trace.measured.bubble:.0f} %" in trace.summary()


def test_trace_with_late_rank_reports_deviation():
    """1F1B of two ranks, 4 x (10 + 20) ms and 30 ms of bubble; the second is 25 ms late, and so ends last."""
    trace = made_up()
    trace = replace(trace, spans=[trace.spans[0], late(trace.spans[1], 0.025)])
    assert trace.predicted.makespan == pytest.approx(0.15)
    assert trace.measured.makespan == pytest.approx(0.155)
    assert trace.summary() == "traced step 3: makespan measured 155 ms, predicted 150 ms (3.3 % off), bubble 23 %"


def test_aligned_sets_clocks_at_barrier():
    """The clocks of hosts have different origins. Ranks of one host share its clock, however late they leave the
    barrier."""
    at = lambda began: [ActionTiming(Action("F", 0, 0), began, began + 1.0)]
    logs = [
        _Log("host a", 100.0, at(101.0)),
        _Log("host a", 100.5, at(101.0)),
        _Log("host b", 7000.0, at(7003.0)),
    ]
    assert [row[0].start for row in _aligned(logs)] == [1.0, 1.0, 3.0]


# ---------------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipe_v"])
def test_chrome_trace_has_every_action_without_gaps(name, tmp_path):
    trace = made_up(name, pp=2, dp=2, microbatches=5)
    trace.write(tmp_path)
    events = read_events(tmp_path)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0: pp=0 dp=0", "rank 1: pp=0 dp=1", "rank 2: pp=1 dp=0", "rank 3: pp=1 dp=1"]
    for rank, spans in enumerate(trace.spans):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        actions = [e for e in slices if e["tid"] == 0]
        recorded = [Action(e["cat"], e["args"]["microbatch"], e["args"]["stage"]) for e in actions]
        assert recorded == [a for a, *_ in spans]
        assert [e["ts"] for e in actions] == pytest.approx([1e6 * s.start for s in spans])
        assert sum(e["dur"] for e in slices) == pytest.approx(1e6 * spans[-1].end), "work and waiting leave a gap"


def test_arrows_follow_the_messages(tmp_path):
    """A forward's arrow leads to the next stage's forward, a backward's to the stage before: in time, each once, and
    within one pipeline."""
    trace = made_up("zb_h1", pp=2, dp=2, microbatches=5)
    trace.write(tmp_path)
    events = read_events(tmp_path)
    work = [e for e in events if e["ph"] == "X" and e["tid"] == 0]

    def bound(arrow: dict) -> dict:
        """The slice that the viewer ties an arrow's end to."""
        inside = lambda e: e["pid"] == arrow["pid"] and e["ts"] <= arrow["ts"] + 1e-6 < e["ts"] + e["dur"]
        return next(e for e in work if inside(e))

    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    assert ends.keys() == starts.keys() and len(starts) == 2 * 2 * 5
    for number, start in starts.items():
        source, target = bound(start), bound(ends[number])
        assert start["ts"] <= ends[number]["ts"] and (source["pid"] - target["pid"]) % 2 == 0
        kind, (way,) = source["cat"], {target["args"]["stage"] - source["args"]["stage"]}
        assert (kind, target["cat"], way) in (("F", "F", 1), ("I", "I", -1))
        assert source["args"]["microbatch"] == target["args"]["microbatch"]


# -------------------------------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_v", marks=FULL)])
def test_traced_run_writes_files_and_trains_as_without(schedule, tmp_path, corpus):
    """The third step, in both files and the log; and tracing changes no number of the training."""
    plan = ["mesh.pp=2", f"schedule={schedule}", "model.num_hidden_layers=4", "train.stop_at=4"]
    for folder, trace in (("traced", "true"), ("plain", "false")):
        args = arguments(tmp_path / folder, corpus, *plan, f"train.trace={trace}")
        assert run_ranks(rank_main, 2, args) == [0, 0]
    made = tmp_path / "traced" / "trace"
    assert sorted(p.name for p in made.iterdir()) == ["step-00000003.json", "step-00000003.svg"]
    assert not (tmp_path / "plain" / "trace").exists()
    said = (tmp_path / "traced/logs/rank-0.log").read_text()
    assert "traced step 3: makespan measured" in said
    bubble = {"1f1b": 1 / 5, "zb_v": 1 / 25}[schedule]  # pp - 1 of m + pp - 1; pp - 1 chunks beside the 6 m of work
    assert f"mesh pp=2, {schedule}, 4 microbatches, bubble {100 * bubble:.0f} %" in said
    drawn = text_of(made / "step-00000003.svg")
    assert "step 3 measured: makespan" in drawn and "predicted from its mean times: makespan" in drawn
    actions = [e for e in read_events(made) if e["ph"] == "X" and e["tid"] == 0]
    assert len(actions) == sum(len(row) for row in build(schedule, 2, 4).table)
    last = checkpoint_of(tmp_path / "traced", 4), checkpoint_of(tmp_path / "plain", 4)
    assert tensor_bytes(last[0]) == tensor_bytes(last[1]) != {}
    losses = [[(r["loss"], r["grad_norm"]) for r in rows(tmp_path / f)] for f in ("traced", "plain")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_short_run_traces_its_last_step(tmp_path, corpus, capsys):
    """The last step is traced, and the third step after a resume."""
    args = arguments(tmp_path / "run", corpus, "train.trace=true", "resume=auto")
    assert main([*args, "train.stop_at=2"]) == 0
    assert "traced step 2: makespan measured" in capsys.readouterr().out
    assert main([*args, "train.stop_at=8"]) == 0
    made = sorted(p.name for p in (tmp_path / "run" / "trace").glob("*.json"))
    assert made == ["step-00000002.json", "step-00000005.json"]
    assert [a["args"]["name"] for a in read_events(tmp_path / "run/trace", 5)[:1]] == ["rank 0"]
    assert "rank 0" in text_of(tmp_path / "run/trace/step-00000005.svg")


def test_trace_that_cannot_be_written_gives_warning(tmp_path, corpus, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace").write_text("in the way")
    assert main(arguments(tmp_path / "run", corpus, "train.trace=true", "train.stop_at=4")) == 0
    assert "warning: trace of step 3 not written: File exists" in capsys.readouterr().out
    assert len(rows(tmp_path / "run")) == 4


@pytest.mark.parametrize("value", ["text", ["clock", 1.0], ["clock", 1.0, [[["F", 0, 0], 1.0]]], ["clock", None, []]])
def test_log_from_json_refuses_other_values(value):
    with pytest.raises(ValueError, match="a rank sent a message that is not a"):
        _Log.from_json(value)


def test_log_round_trips_as_json():
    log = _Log("clock", 0.5, [ActionTiming(Action("F", 1, 2), 3.0, 4.0)])
    assert _Log.from_json(json.loads(json.dumps(log))) == log
