"""Joins a run that trains together with other islands."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndtrain.checkpoint import State
from ndtrain.checkpoint.directory import read_state
from ndtrain.checkpoint.elements import OUTER, digest
from ndtrain.config import Config, ConfigError
from ndtrain.config.island_checks import TOKEN, addresses, is_on_this_host, island_name, row_grain
from ndtrain.config.schema import DILOCO
from ndtrain.data import Data, Source
from ndtrain.engine.island_step import IslandStep, LocalRun
from ndtrain.engine.island_tasks import Tasks
from ndtrain.engine.outer_step import OUTER_NUMBERS, Exchanges, OuterStep
from ndtrain.engine.shared_step import SharedStep
from ndtrain.engine.start import order_of
from ndtrain.engine.train_step import TrainingStep
from ndtrain.engine.validation import rank_batches, weight_here
from ndtrain.islands.encoding import Encoding, Outer, Plain
from ndtrain.islands.exchange import Exchange
from ndtrain.islands.leader import Leader, reachable_host
from ndtrain.islands.messages import Start
from ndtrain.islands.orders import Rules
from ndtrain.islands.table import Table
from ndtrain.islands.wire import Place, WireError
from ndtrain.mesh.json_messages import all_gather_json
from ndtrain.mesh.mesh import Mesh
from ndtrain.model import tensor_shapes
from ndtrain.parallel.stages import Stages

_SECTIONS = ("model", "moe", "objective", "optim")  # equal on all islands
_METHOD = ("sync", "inner_steps", "outer_lr", "outer_momentum", "codec", "fragments", "delay")
_COUNTS = 3  # numbers of the state besides the biases: tokens, skipped steps, steps without bias correction


def join_islands(
    cfg: Config,
    mesh: Mesh,
    train_step: TrainingStep,
    data: Data,
    source: Source,
    state: State,
    resumed: Path | None,
    asked: Callable[[], float],
    tell: Callable[[str], None],
) -> SharedStep:
    """Make this run an island, on every rank.

    Args:
        state: the state of the run. It changes when the island reads a newer one.
        resumed: the checkpoint that it was read from, or None.
        asked: returns another number than 0 if somebody wants the run to stop.
        tell: prints a line for the user.

    Raises:
        ConfigError: the island cannot listen, or its file is damaged; the message is one line.
    """
    doors, token = addresses(cfg), os.environ.get(TOKEN, "")
    if not token and not all(map(is_on_this_host, doors)):
        raise ConfigError(
            f"islands.address={doors[0]} is reachable from other hosts: set {TOKEN} to a secret text, the same one for "
            "all islands"
        )
    balance = train_step.stages.balance
    losses, biases = train_step.executor.losses, balance.bias_LX.numel()
    numbers = max(losses + balance.sums_here().numel(), OUTER_NUMBERS + losses + biases, _COUNTS + biases)
    with ExitStack() as undo:
        try:
            host = reachable_host(doors[0])
            encoding = _encoding(cfg, train_step.stages)
            place = Place(host, token, doors)
            exchange = Exchange(train_step.stages, mesh.rank, numbers, place, encoding)
            undo.callback(exchange.close)
            ranks = [exchange.address]
            if mesh.world is not None:
                ranks = [str(x) for x in all_gather_json(exchange.address, mesh.world, mesh.device)]
            leader = None
            if mesh.rank == 0:
                start = Start(_steps_done(cfg, state), _weights(cfg, state, resumed), _plan(cfg, data))
                who = island_name(cfg), row_grain(cfg)
                leader = Leader(*who, start, _rules(cfg), place, ranks, Path(cfg.run.dir))
        except (WireError, ValueError, OSError) as error:
            raise ConfigError(f"islands: {error}") from error
        undo.pop_all()
    run = LocalRun(
        batches=lambda step, rows: _on(mesh, rank_batches(cfg, mesh, data, source, step, rows)),
        weight=lambda step: weight_here(cfg, mesh, data, source, step, train_step.stages.objective),
        describe=lambda: _numbers_of(state, train_step),
        restore=lambda given: _restore(given, state, train_step),
    )
    tasks = Tasks(mesh, exchange, leader, cfg.hardware.timeout_s, asked, tell)
    if cfg.islands.sync == DILOCO:
        return OuterStep(cfg, mesh, train_step, run, tasks, encoding)
    return IslandStep(cfg, mesh, train_step, run, tasks)


def _encoding(cfg: Config, stages: Stages) -> Encoding:
    if cfg.islands.sync == DILOCO:
        held, owned = (Table.of(stages, owned_only, {}) for owned_only in (False, True))
        spans = {
            name: [slice(h.at, h.at + h.rows.numel) for held in unit.tensors.values() for h in held]
            for name, unit in owned.units.items()
        }
        return Outer(cfg.islands.codec, stages.units.plan.master, held, spans, tensor_shapes(cfg.model))
    return Plain(stages.units.plan.master)


def _on(mesh: Mesh, batches: list[Any]) -> list[Any]:
    return batches if mesh.device.type == "cpu" else [b.to(mesh.device) for b in batches]


def _steps_done(cfg: Config, state: State) -> int:
    """Return the number of finished steps as the islands count them: with DiLoCo, exchanges."""
    return Exchanges.of(cfg).done_at(state.step) if cfg.islands.sync == DILOCO else state.step


def _rules(cfg: Config) -> Rules:
    i, last = cfg.islands, cfg.train.stop_at or cfg.train.steps
    rules = Rules(cfg.train.global_batch, last, i.count, i.wait_s, min(0.5, i.timeout_s / 8), i.timeout_s)
    if i.sync == DILOCO:
        return replace(rules, last=Exchanges.of(cfg).count, ahead=1, learners_share=True, grace_s=i.grace_s)
    return rules


def _plan(cfg: Config, data: Data) -> dict[str, str]:
    """Return everything that all islands must have in common, key -> value as text."""
    plan: dict[str, Any] = {
        "ndtrain": metadata.version("ndtrain"),
        "precision.params": cfg.precision.params,
        "train.steps": cfg.train.steps,
    }
    plan |= {f"{name}.{key}": x for name in _SECTIONS for key, x in asdict(getattr(cfg, name)).items()}
    method = _METHOD if cfg.islands.sync == DILOCO else ("sync",)
    plan |= order_of(cfg, data) | {f"islands.{key}": getattr(cfg.islands, key) for key in method}
    short = lambda text: text if len(text) <= 200 else digest({"text": text})
    return {key: short(str(value)) for key, value in plan.items()}


def _weights(cfg: Config, state: State, resumed: Path | None) -> str:
    """Return a text that is equal for two runs only if their weights are equal."""
    if resumed is None:
        return f"{cfg.init_from or 'seed'} {state.step}"
    sums = read_state(resumed)["checksums"]
    if cfg.islands.sync == DILOCO:  # each island has weights of its own
        outer = {name: x for name, x in sums.items() if name.startswith(tuple(prefix for prefix, _ in OUTER))}
        sums = outer or sums
    return digest(sums)


def _numbers_of(state: State, train_step: TrainingStep) -> Tensor:
    """Return the numbers of the state that other islands read along with the tensors, fp64."""
    counts = [state.tokens, state.skipped, float(train_step.optimizer.skipped)]
    biases = train_step.stages.balance.bias_LX.flatten().double().cpu()
    return torch.cat([torch.tensor(counts, dtype=torch.float64), biases])


def _restore(numbers: Tensor, state: State, train_step: TrainingStep) -> None:
    """Take over the numbers of another island's state."""
    state.tokens, state.skipped = int(numbers[0]), int(numbers[1])
    state.reset_at = int(numbers[2]) - state.skipped
    train_step.optimizer.skipped.fill_(float(numbers[2]))
    bias_LX = train_step.stages.balance.bias_LX
    bias_LX.copy_(numbers[_COUNTS : _COUNTS + bias_LX.numel()].view_as(bias_LX))
