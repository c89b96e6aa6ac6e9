"""Runs the instructions of a rank in order. Each one is a forward or a backward of one layer for one microbatch."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ndtrain.distributed.flight_recorder import RECORDER
from ndtrain.engine.instructions import Instruction, Layer, expand, join, units_ahead
from ndtrain.model import Context
from ndtrain.parallel.fsdp import ShardedUnits
from ndtrain.parallel.pp import Pipeline
from ndtrain.parallel.recompute import RecomputeGroup, SavedOps
from ndtrain.schedule import Action, sends
from ndtrain.schedule.table import show


class ActionTiming(NamedTuple):
    """When a rank computed an action, without the wait for its input.

    Attributes:
        began, ended: seconds of this machine's monotonic clock.
    """

    action: Action
    began: float
    ended: float


class Executor:
    """Runs a rank's row of a schedule over the layers of its stages and their sharded units.

    Attributes:
        timings: None, or where to append when each action ran. (On a GPU the host then waits for each action.)
    """

    def __init__(
        self,
        row: Sequence[Action],
        layers: Sequence[Layer],
        units: ShardedUnits,
        pipeline: Pipeline,
        saved_ops: SavedOps,
        recompute_groups: Sequence[RecomputeGroup],
    ):
        if units.fully_resident:
            layers, recompute_groups = join(layers, recompute_groups)
        self.row, self.layers, self.units, self.pipeline, self.saved_ops = row, layers, units, pipeline, saved_ops
        self.trains = any(a.kind != "F" for a in row)
        self._names = [show(a) for a in row]
        self.program = expand(row, layers, recompute_groups, units_ahead(units.fully_resident, units.reshards))
        self._passes = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._finish_weights}
        self.timings: list[ActionTiming] | None = None
        self._exit = {layer.stage: i for i, layer in enumerate(layers) if layer.last}
        self._entry = {layer.stage: i for i, layer in enumerate(layers) if layer.first}

    def run(self, contexts: Sequence[Context]) -> Tensor:
        """Runs the row over all microbatches, with one context for each. If the row has backwards, the gradients are
        summed over the mesh when this returns. Returns the sum of this rank's losses, in fp32 or wider.
        """
        self._contexts = contexts
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._graphs: dict[tuple[int, int], GradientEdge] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self._deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}
        wide = torch.promote_types(self.units.compute, torch.float32)
        self._loss = torch.zeros((), dtype=wide, device=self.units.device)
        if self.trains:
            self.units.begin_step()
        for number, (action, instructions) in enumerate(zip(self.row, self.program, strict=True)):
            RECORDER.action = self._names[number]
            self.pipeline.post_recv(number)
            self._start_gathers(instructions[0])  # weights and input arrive meanwhile
            self._enter(action)
            began = self._now()
            for ins in instructions:
                self._run(ins)
            if self.timings is not None:
                self.timings.append(ActionTiming(action, began, self._now()))
        RECORDER.action = "gradient sums"
        self.pipeline.finish()
        if self.trains:
            self.units.finish_step()
        return self._loss

    def _now(self) -> float:
        if self.timings is not None and self.units.device.type == "cuda":
            torch.cuda.synchronize(self.units.device)
        return time.perf_counter()

    def _enter(self, a: Action) -> None:
        """Waits for the tensor that the action receives from another stage, if it receives one."""
        needed = self.pipeline.needed(a)
        x = self.pipeline.recv(needed) if needed else None
        if a.kind == "F":
            self._inputs[a.microbatch, self._entry[a.stage]] = None if x is None else x.requires_grad_()
        elif x is not None:
            self._gradients[a.microbatch, self._exit[a.stage]] = x

    def _start_gathers(self, ins: Instruction) -> None:
        for name in (*ins.weights, *ins.prefetch):
            self.units.prefetch(name)

    def _run(self, ins: Instruction) -> None:
        self._start_gathers(ins)
        for name in ins.weights:
            self.units.unshard(name)
        self._passes[ins.kind](ins)
        if ins.reshard:
            for name in ins.weights:
                self.units.reshard(name)
        for name, final in ins.reduce:
            self.units.reduce(name, final)

    def _forward(self, ins: Instruction) -> None:
        at, layer = (ins.microbatch, ins.layer), self.layers[ins.layer]
        x = self._inputs.pop(at) if ins.drop_input else self._inputs[at]
        if layer.loss and ins.keep_graph:
            self._open_gradients(layer)  # the loss makes gradients in its forward
        if x is not None and not ins.keep_graph:
            x = x.detach()  # otherwise a block is compiled once more, for inputs that require a gradient
        with torch.set_grad_enabled(ins.keep_graph), self._saved(ins, at):
            y = layer.run(x, self._contexts[ins.microbatch])
        if ins.keep_graph:
            self._graphs[at] = get_gradient_edge(y)  # not y itself: its memory is freed with its last reader
        if layer.loss:
            self._loss += y.detach()
            if ins.keep_graph:
                self._gradients[at] = torch.ones_like(y)
        elif ins.feed and layer.last:
            self.pipeline.send(sends(self.row[ins.action]), y.detach())
        elif ins.feed:
            self._inputs[ins.microbatch, ins.layer + 1] = y.detach().requires_grad_()

    def _saved(self, ins: Instruction, at: tuple[int, int]) -> AbstractContextManager:
        if ins.recompute:
            return self.saved_ops.replaying(at)
        return nullcontext() if ins.save is None else self.saved_ops.saving(at, ins.save, ins.shape_only)

    def _backward(self, ins: Instruction) -> None:
        at, layer = (ins.microbatch, ins.layer), self.layers[ins.layer]
        edge, x = self._graphs.pop(at), self._inputs.pop(at)
        self._open_gradients(layer)
        with self.units.deferring(self._deferred.setdefault(at, []) if ins.kind == "I" else None):
            torch.autograd.backward(edge, self._gradients.pop(at))
        self._close_gradients(layer)
        if x is None:
            return
        if layer.first:
            self.pipeline.send(sends(self.row[ins.action]), x.grad)
        else:
            self._gradients[ins.microbatch, ins.layer - 1] = x.grad

    def _open_gradients(self, layer: Layer) -> None:
        for name in layer.units:
            self.units.open_gradients(name)

    def _close_gradients(self, layer: Layer) -> None:
        for name in layer.units:
            self.units.close_gradients(name)

    def _finish_weights(self, ins: Instruction) -> None:
        layer = self.layers[ins.layer]
        self._open_gradients(layer)
        with torch.no_grad():
            for write in self._deferred.pop((ins.microbatch, ins.layer)):
                write()
        self._close_gradients(layer)
