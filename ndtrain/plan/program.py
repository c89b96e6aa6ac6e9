"""Prints the program of a rank: everything that it launches, runs and waits for in a step, in order."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from ndtrain.arguments import option
from ndtrain.config import Config
from ndtrain.mesh.mesh import MeshSpec
from ndtrain.parallel.build import DTYPES
from ndtrain.plan.dry import read_rank, require_rank
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.options import RunOptions, planned_config, write_file
from ndtrain.plan.pieces import compiles
from ndtrain.plan.report import si
from ndtrain.program import ops
from ndtrain.program.ops import Op, RankProgram, Run, Turn
from ndtrain.program.step import RankPlan, StepProgram
from ndtrain.schedule import Message
from ndtrain.schedule.table import show

PASSES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The options of `plan program`."""

    rank: int = option("rank, counted from 0", 0, read=read_rank)


def run(options: Options, overrides: Sequence[str]) -> None:
    """Print the program, and write the JSON.

    Raises:
        ConfigError: the run's configuration is invalid, the rank does not exist, or the file cannot be written.
    """
    hardware = load_hardware(options.hardware)
    cfg = planned_config(overrides, options, hardware)
    spec = MeshSpec.of(cfg.mesh)
    require_rank(options.rank, spec.world_size)
    step = StepProgram.of(cfg, compiles(cfg, hardware.device), hardware.device)
    plan = step.ranks[spec.coords(options.rank)["pp"]]
    where = spec.where(options.rank) or "one rank"
    print(
        f"rank {options.rank} ({where}), {cfg.schedule.name}, {cfg.microbatches} microbatches, zero={cfg.mesh.zero}\n"
    )
    print("\n".join(lines(cfg, step, plan)))
    step.prove()
    print(f"\nchecked under NCCL's rules for all {len(step.ranks)} pipeline ranks: no deadlock")
    if options.json:
        write_file("json", options.json, json.dumps(as_json(plan), indent=1))


def lines(cfg: Config, step: StepProgram, plan: RankPlan) -> Iterator[str]:
    """Yield the program as text. If several actions share their ops, only the first of them is written out."""
    words = _Words(cfg, step, plan)
    if plan.look_ahead is not None:
        yield "a forward before the step, to count expert loads"
        yield from _of_program(plan.look_ahead, words, 0)
    yield from _of_program(plan.program, words, 0)


def _of_program(program: RankProgram, words: "_Words", number: int) -> Iterator[str]:
    written: dict[int, str] = {}
    yield from _section("begin", program.begin, words, number)
    number += len(program.begin)
    for turn in program.turns:
        if id(turn.ops) in written:
            yield f"{show(turn.action)}: ops {number} to {number + len(turn.ops) - 1}, as {written[id(turn.ops)]}"
            number += len(turn.ops)
            continue
        written[id(turn.ops)] = show(turn.action)
        yield show(turn.action)
        yield from (f"        post the receive of {_named(message)} from pp={source}" for message, source in turn.posts)
        for op in turn.ops:
            yield f"{number:6}  {words.of(op, turn)}"
            number += 1
    yield from _section("gradient sums" if program.update else "end", program.end, words, number)
    yield from _section("norm and update", program.update, words, program.update_at)


def _section(title: str, made: Sequence[Op], words: "_Words", number: int) -> Iterator[str]:
    """Yield ops that belong to no action, with their indices from `number` on. Without ops there is no title either."""
    if made:
        yield title
    yield from (f"{index:6}  {words.of(op)}" for index, op in enumerate(made, number))


@dataclass(frozen=True)
class _Words:
    """Describes ops in words."""

    cfg: Config
    step: StepProgram
    plan: RankPlan

    def of(self, op: Op, turn: Turn | None = None) -> str:
        match op:
            case Run():
                return self._pass(op)
            case ops.Gather(unit):
                return f"gather   {unit}{self._sent(unit, self._compute, 'all-gather')}"
            case ops.Reduce(unit):
                return f"reduce   {unit}{self._sent(unit, self._master, 'reduce-scatter')}"
            case ops.Sum(axes, units):
                shards = sum(self.step.units[name].shard for name in units) * self._master
                return f"sum      {', '.join(units)}  (all-reduce over {axes}, {si(shards, 'B')})"
            case ops.AwaitSums(axes):
                return f"wait     for the sums over {axes}"
            case ops.Await(unit):
                return f"wait     for {unit}"
            case ops.Free(unit):
                return f"free     {unit}"
            case ops.Open(unit):
                return f"open     the gradient of {unit}"
            case ops.Close(unit):
                return f"close    the gradient of {unit}"
            case ops.Collect(unit, first):
                return f"collect  the gradient of {unit}{'' if first else ' and add it'}"
            case ops.SumTied(unit):
                return f"sum      {unit}, shared with another stage"
            case ops.SumTPReplicas(units):
                return f"sum      gradients replicated across tp ranks, of {_some(units)}"
            case ops.Offer(unit):
                return f"offer    the gradient of {unit} to the other islands"
            case ops.GatherWhole(number):
                return f"gather   whole gradients of round {number} on their owners{self._whole(number)}"
            case ops.AwaitWhole(number):
                return f"wait     for the whole gradients of round {number}"
            case ops.ComputeWhole(number):
                return f"compute  directions of whole tensors of round {number}"
            case ops.ScatterWhole(number):
                return f"scatter  directions of round {number}{self._whole(number)}"
            case ops.AwaitScatter(number):
                return f"wait     for the directions of round {number}"
            case ops.Receive() if turn is not None and turn.needs is not None:
                return f"receive  {_named(turn.needs)}"
            case ops.Send() if turn is not None and turn.gives is not None:
                return f"send     {_named(turn.gives)}"
            case _:
                return _PLAIN[type(op)]

    def _pass(self, op: Run) -> str:
        what = "recompute" if op.recompute else PASSES[op.kind]
        name = self.plan.names[op.layer]
        graph = "" if op.kind != "F" or op.keep_graph else ", no graph"
        saved = f", saves {', '.join(sorted(op.save))}" if op.save and not op.recompute else ""
        return f"run      {what} of {name}{graph}{saved}"

    def _sent(self, unit: str, width: int, collective: str) -> str:
        u = self.step.units[unit]
        return f"  ({collective} over {u.axes}, {si(u.numel * width, 'B')})" if u.shards > 1 else "  (a copy)"

    def _whole(self, number: int) -> str:
        round_ = self.plan.rounds[number]
        axes = "+".join(axis for axis in round_.axes if MeshSpec.of(self.cfg.mesh).size(axis) > 1)
        size = si(round_.numel * self.step.plan.sent.itemsize, "B")
        return f"  (all-to-all over {axes}, {size})" if axes else "  (a copy)"

    @property
    def _compute(self) -> int:
        return DTYPES[self.cfg.precision.compute].itemsize

    @property
    def _master(self) -> int:
        return DTYPES[self.cfg.precision.params].itemsize


_PLAIN = {
    ops.Accept: "accept   the input from another stage of this rank",
    ops.Hand: "hand     the result to another stage of this rank",
    ops.FinishSends: "wait     until all messages are sent",
    ops.CountTokens: "count    tokens  (all-reduce over dp+fsdp+cp)",
    ops.AwaitTokens: "wait     for the count of tokens",
    ops.SumLoads: "sum      loads of experts  (all-reduce over all ranks)",
    ops.AwaitLoads: "wait     for the loads of experts",
    ops.CheckCapacity: "check    that the rows of experts have fitted  (all-reduce over all ranks)",
    ops.GatherStats: "sum      loss and gradient norm  (all-reduce over all ranks)",
    ops.GatherLogits: "compare  attention logits of heads  (all-reduce over all ranks)",
    ops.Prepare: "prepare  the update: clipping, and the gradients of whole tensors",
    ops.Update: "update   weights and optimizer state",
    ops.UpdateBiases: "update   selection biases of experts",
    ops.Report: "report   the step's numbers  (all-reduce over all ranks)",
}


def _some(units: Sequence[str]) -> str:
    return units[0] if len(units) == 1 else f"{len(units)} units"


def _named(message: Message) -> str:
    what = "activation" if message.kind == "F" else "gradient"
    return f"the {what} of microbatch {message.microbatch} for stage {message.stage}"


def as_json(plan: RankPlan) -> list[dict]:
    """Return the ops in order. Sets of op names become lists."""
    plain = lambda value: sorted(value) if isinstance(value, frozenset) else value
    named = lambda op: {key: plain(value) for key, value in asdict(op).items()}
    return [{"action": action and show(action), "op": type(op).__name__, **named(op)} for action, op in plan.program]
