"""The executor, a loop over the ops of a rank's program."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from ndtrain.mesh.collectives import Group, all_reduce, reduces_in_place
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.model import Context
from ndtrain.parallel.pp import Pipeline
from ndtrain.parallel.recompute import RecomputeGroup
from ndtrain.parallel.stages import Stages
from ndtrain.program import ops
from ndtrain.program.build import NO_EXPERTS, Experts, Holdings, UnitFacts, build_program
from ndtrain.program.ops import Op, RankProgram, Run, Turn
from ndtrain.program.passes import Layer
from ndtrain.schedule import Action, Message
from ndtrain.schedule.table import show


class ActionTiming(NamedTuple):
    """The time span in which a rank computed an action, without the wait for its input.

    Attributes:
        began, ended: seconds on this machine's monotonic clock.
    """

    action: Action
    began: float
    ended: float


class TokenCount:
    """The sum of the weights of all tokens of the global batch.

    Args:
        mine: the sum of the weights of this rank's tokens, fp64 [1]. It is not changed.
        group: the ranks with other tokens.
    """

    def __init__(self, mine: Tensor, group: Group):
        self._total, self._group = mine.clone(), group

    def launch(self) -> None:
        """Launch the sum over the ranks."""
        self._summed = all_reduce(self._total, self._group)

    def wait(self) -> None:
        """Wait for the sum."""
        self._summed.wait()

    def scale(self) -> Tensor:
        """Return the factor of the sum of the token losses, a scalar. Call it after `wait`."""
        return 1 / self._total.where(self._total > 0, 1).sum()


class Executor:
    """Runs a rank's row of a schedule over the layers of its stages and their sharded units.

    Args:
        losses: the number of sums that the head returns: the loss, and the other sums of the objective. Also an
            attribute.
        experts: the ops that experts add to the program.
        offers: as in `Holdings`.

    Attributes:
        ran: the program that ran last, or None.
        timings: list to which the time span of each action is appended; None: no timing. With timings on a GPU, the
            host waits for each action.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        stages: Stages,
        pipeline: Pipeline,
        recompute_groups: Sequence[RecomputeGroup] = (),
        losses: int = 1,
        experts: Experts = NO_EXPERTS,
        offers: bool = False,
    ):
        units = stages.units
        facts = {name: UnitFacts.of(unit.layout, units.plan) for name, unit in units.units.items()}
        in_place = any(reduces_in_place(unit.grad) for unit in units.units.values())
        rounds = len(units.owners.rounds) if units.owners is not None else 0
        clips = stages.qk_clip is not None
        self.holdings = Holdings(layers, facts, recompute_groups, in_place, experts, offers, rounds, clips).joined()
        self.layers, self.units, self.pipeline = self.holdings.layers, units, pipeline
        self.saved_ops, self.balance, self.capacity = stages.saved_ops, stages.balance, stages.capacity
        self.timings: list[ActionTiming] | None = None
        self.losses = losses
        self.ran: RankProgram | None = None
        self._names = {a: show(a) for a in pipeline.schedule.table[pipeline.rank]}
        self._programs: dict[frozenset[str], RankProgram] = {}
        self._exit = {layer.stage: i for i, layer in enumerate(self.layers) if layer.last}
        self._entry = {layer.stage: i for i, layer in enumerate(self.layers) if layer.first}

    @property
    def program(self) -> RankProgram:
        """The program of the next step.

        It depends on the units that are already unsharded. After an evaluation more of them are than after an update.
        """
        before = frozenset(self.units.unsharded)
        if before not in self._programs:
            self._programs[before] = build_program(self.pipeline.schedule, self.pipeline.rank, self.holdings, before)
        return self._programs[before]

    def run(self, contexts: Sequence[Context], tokens: TokenCount | None = None) -> Tensor:
        """Run the row over all microbatches, and return the sums of this rank's losses [losses], in fp32 or wider.

        If the row has backward passes, the gradients are summed over the mesh on return.

        Args:
            contexts: one for each microbatch.
            tokens: counts the tokens, if the row has backward passes.
        """
        self._contexts, self._tokens = contexts, tokens
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._graphs: dict[tuple[int, int], GradientEdge] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._results: list[Tensor] = []  # results of the current action for another stage
        self._local: dict[Message, Tensor] = {}  # results that another stage of this rank has not read yet
        wide = torch.promote_types(self.units.compute, torch.float32)
        self._losses = torch.zeros(self.losses, dtype=wide, device=self.units.device)
        self.ran = program = self.program
        self._run_ops(program.begin, 0)
        number = len(program.begin)
        for turn in program.turns:
            self.run_turn(turn, number)
            number += len(turn.ops)
        RECORDER.action = "gradient sums"
        self._run_ops(program.end, number)
        RECORDER.op = None
        return self._losses

    def run_turn(self, turn: Turn, number: int) -> None:
        """Run the ops of an action.

        Args:
            number: the index of the first op in the program.
        """
        a, units = turn.action, self.units
        RECORDER.action, RECORDER.op = self._names[a], number
        self.pipeline.post(turn.posts)
        if a.kind == "F" and a.stage == 0:
            self._inputs[a.microbatch, self._entry[a.stage]] = None
        began = self._now()
        for index, op in enumerate(turn.ops, number):
            RECORDER.op = index
            match op:
                case Run():
                    self.run_pass(op, a)
                case ops.Gather():
                    units.gather(op.unit)
                case ops.Await():
                    units.await_gather(op.unit)
                case ops.Free():
                    units.free(op.unit)
                case ops.Receive():
                    self._take(a, self.pipeline.recv(turn.needs))
                    began = self._now()
                case ops.Accept():
                    self._take(a, self._local.pop(turn.needs))
                    began = self._now()
                case ops.Send():
                    self.pipeline.send(turn.gives, self._results.pop())
                case ops.Hand():
                    self._local[turn.gives] = self._results.pop()
                case _:
                    self.run_op(op)
        if self.timings is not None:
            self.timings.append(ActionTiming(a, began, self._now()))

    def _run_ops(self, made: Sequence[Op], number: int) -> None:
        for index, op in enumerate(made, number):
            RECORDER.op = index
            self.run_op(op)

    def run_op(self, op: Op) -> None:
        """Run an op that is not tied to an action: on gradients, on the count of tokens, or on experts."""
        units = self.units
        match op:
            case ops.Open():
                units.open(op.unit)
            case ops.Close():
                units.close(op.unit)
            case ops.Reduce():
                units.reduce(op.unit)
            case ops.Collect():
                units.collect(op.unit, op.first)
            case ops.Sum():
                units.sum_replicas(op.axes, op.units)
            case ops.AwaitSums():
                units.await_sums(op.axes)
            case ops.SumTPReplicas():
                units.sum_tp_replicas(op.units)
            case ops.SumTied():
                units.sum_tied(op.unit)
            case ops.Offer() if self.capacity is None or not self.capacity.exceeded:  # else the step is repeated
                units.offer(op.unit)
            case ops.GatherWhole():
                units.owners.gather(op.round)
            case ops.AwaitWhole():
                units.owners.await_gather(op.round)
            case ops.ScatterWhole():
                units.owners.scatter(op.round)
            case ops.AwaitScatter():
                units.owners.await_scatter(op.round)
            case ops.FinishSends():
                self.pipeline.finish()
            case ops.CountTokens():
                self._tokens.launch()
            case ops.AwaitTokens():
                self._tokens.wait()
            case ops.SumLoads():
                self.balance.sum_loads()
            case ops.AwaitLoads():
                self.balance.await_loads()
            case ops.CheckCapacity():
                self.capacity.check()

    def _now(self) -> float:
        if self.timings is not None and self.units.device.type == "cuda":
            torch.cuda.synchronize(self.units.device)
        return time.perf_counter()

    def _take(self, a: Action, x: Tensor) -> None:
        """Store a tensor from another stage: the input of a forward, or the gradient of a stage's output."""
        if a.kind == "F":
            self._inputs[a.microbatch, self._entry[a.stage]] = x.requires_grad_()
        else:
            self._gradients[a.microbatch, self._exit[a.stage]] = x

    # --------------------------------------------------------------------------------------------------------- passes

    def run_pass(self, run: Run, a: Action) -> None:
        """Run a forward or a backward pass of a layer."""
        match run.kind:
            case "F":
                self._forward(run, a.microbatch)
            case "W":
                self._finish_weights(run, a.microbatch)
            case _:
                self._backward(run, a.microbatch)

    def _forward(self, run: Run, microbatch: int) -> None:
        at, layer = (microbatch, run.layer), self.layers[run.layer]
        x = self._inputs.pop(at) if run.drop_input else self._inputs[at]
        if layer.loss and run.keep_graph:
            self._attach(layer)  # the loss computes gradients in its forward
        if x is not None and not run.keep_graph:
            x = x.detach()  # otherwise a block is compiled a second time, for inputs that require a gradient
        with torch.set_grad_enabled(run.keep_graph), self._saved(run, at):
            y = layer.run(x, self._contexts[microbatch])
        if run.keep_graph:
            self._graphs[at] = get_gradient_edge(y)  # not y itself: its memory is freed with its last reader
        if layer.loss:
            self._losses += y.detach()
            if run.keep_graph:
                self._gradients[at] = torch.ones_like(y)
        elif run.feed and layer.last:
            self._results.append(y.detach())
        elif run.feed:
            self._inputs[microbatch, run.layer + 1] = y.detach().requires_grad_()

    def _saved(self, run: Run, at: tuple[int, int]) -> AbstractContextManager:
        if run.recompute:
            return self.saved_ops.replaying(at)
        return nullcontext() if run.save is None else self.saved_ops.saving(at, run.save, run.shape_only)

    def _backward(self, run: Run, microbatch: int) -> None:
        at, layer = (microbatch, run.layer), self.layers[run.layer]
        edge, x = self._graphs.pop(at), self._inputs.pop(at)
        self._attach(layer)
        with self.units.deferring(self._deferred.setdefault(at, []) if run.kind == "I" else None):
            _run_backward(edge, self._gradients.pop(at))
        self._detach(layer)
        if x is None:
            return
        if layer.first:
            self._results.append(x.grad)
        else:
            self._gradients[microbatch, run.layer - 1] = x.grad

    def _finish_weights(self, run: Run, microbatch: int) -> None:
        layer = self.layers[run.layer]
        self._attach(layer)
        with torch.no_grad():
            for write in self._deferred.pop((microbatch, run.layer)):
                write()
        self._detach(layer)

    def _attach(self, layer: Layer) -> None:
        for name in layer.units:
            self.units.attach(name)

    def _detach(self, layer: Layer) -> None:
        for name in layer.units:
            self.units.detach(name)


def _run_backward(edge: GradientEdge, grad: Tensor) -> None:
    """Run autograd from an output of a graph.

    `torch.autograd.backward` also compares the two shapes, and imports the compiler's symbolic shapes to do it. That
    takes 0.6 s when a run starts. The engine checks the shapes anyway.
    """
    _engine_run_backward((edge,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True)
