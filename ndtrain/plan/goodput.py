"""The goodput of a run whose hosts fail: how often to save, how many days the run takes, and what it costs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ndtrain.arguments import option
from ndtrain.checkpoint.elements import checkpoint_bytes
from ndtrain.config import Config, ConfigError
from ndtrain.parallel.build import state_plan
from ndtrain.plan.drawings import goodput_svg
from ndtrain.plan.fault_tolerance import (
    DAY,
    HOUR,
    Assumptions,
    Cluster,
    IslandLoss,
    Plan,
    cluster_of,
    curves_of,
    plans_of,
    ranks_of,
)
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.options import LinkOptions, RunOptions, above_0, planned_config, write_file
from ndtrain.plan.predict import Predictor, run_seconds
from ndtrain.plan.report import si, table

LONG = 1e5 * 365 * DAY  # longer times are printed as "never"


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions, LinkOptions, Assumptions):
    """Options of `plan goodput`."""

    step_time_s: float | None = option("seconds per step; default: predicted", None, read=above_0)
    price: float | None = option("price of a GPU hour, in any currency", None, read=above_0)
    svg: str | None = option("SVG file to draw goodput over GPU counts in", None)


def run(options: Options, overrides: Sequence[str]) -> None:
    """Print the plans, and write the JSON and the drawing.

    Raises:
        ConfigError: there is no such run, its step cannot be predicted, or a file cannot be written.
    """
    hardware = options.on(load_hardware(options.hardware))
    cfg = planned_config(overrides, options, hardware)
    step_s = options.step_time_s or _predicted(cfg, hardware)
    result = result_of(cfg, hardware, options, step_s)
    print(as_text(result))
    if options.svg:
        write_file("svg", options.svg, goodput_svg(curves_of(cfg, hardware, options, step_s)))
    if options.json:
        write_file("json", options.json, as_json(result))


def _predicted(cfg: Config, hardware: Hardware) -> float:
    try:
        return Predictor(hardware).predict(cfg, explain=False).step_time_s
    except ConfigError as error:
        raise ConfigError(f"{error}; or give step_time_s=SECONDS") from error


@dataclass(frozen=True)
class Bill:
    """The time and the cost of a whole run.

    Attributes:
        checkpoint_every: steps between two saves, a value for `checkpoint.every`.
        tokens_per_s: effective throughput: tokens of the steps that count over the elapsed time.
        cost: None: no price was given.
    """

    step_time_s: float
    checkpoint_every: int
    tokens_per_s: float
    days: float
    gpu_hours: float
    cost: float | None


@dataclass(frozen=True)
class Result:
    """The result that is printed.

    Attributes:
        configured: the goodput of each plan with the run's own `checkpoint.every`; empty if it is 0.
    """

    cfg: Config
    options: Options
    cluster: Cluster
    step_s: float
    plans: tuple[Plan, ...]
    bills: tuple[Bill, ...]
    configured: tuple[float, ...]


def result_of(cfg: Config, hardware: Hardware, options: Options, step_s: float) -> Result:
    """Return the plans of a run whose steps take `step_s` seconds.

    Raises:
        ConfigError: failures leave no time to train, or the number of steps depends on the data.
    """
    if cfg.train.epochs is not None:
        raise ConfigError(f"train.epochs={cfg.train.epochs:g}: a plan does not read the data: give train.steps instead")
    cluster = cluster_of(cfg, hardware, options, ranks_of(cfg))
    plans = plans_of(cluster, options, step_s)
    own = replace(options, interval_s=cfg.checkpoint.every * step_s)
    configured = plans_of(cluster, own, step_s) if cfg.checkpoint.every else []
    bills = tuple(bill_of(cfg, cluster, plan, step_s, options.price) for plan in plans)
    return Result(cfg, options, cluster, step_s, tuple(plans), bills, tuple(p.shares.training for p in configured))


def bill_of(cfg: Config, cluster: Cluster, plan: Plan, step_s: float, price: float | None) -> Bill:
    """Return the time and the cost of the run with this plan.

    Raises:
        ConfigError: the run never ends.
    """
    if not plan.shares.training:
        rate = f"a failure every {duration(cluster.mtbf_s)} and restarts of {duration(plan.restart_s)}"
        raise ConfigError(f"{rate}: the run never ends: raise mtbf_gpu_h and mtbf_host_h")
    days = run_seconds(cfg, step_s) / plan.shares.training / DAY
    hours = 24 * days * cluster.gpus
    tokens_per_s = cfg.train.global_batch * cfg.train.seq_len / step_s * plan.shares.training
    return Bill(step_s, max(1, round(plan.interval_s / step_s)), tokens_per_s, days, hours, price and price * hours)


# ------------------------------------------------------------------------------------------------------------- output


def as_json(result: Result) -> str:
    """Format everything as JSON, in seconds and shares of 1."""
    body = {
        "options": asdict(result.options),
        "checkpoint_bytes": checkpoint_bytes(result.cfg.model, state_plan(result.cfg)),
        "cluster": asdict(result.cluster),
        "configured_goodput": result.configured,
        "plans": [asdict(plan) | asdict(bill) for plan, bill in zip(result.plans, result.bills, strict=True)],
    }
    return json.dumps(body, indent=1)


def as_text(result: Result) -> str:
    """Format the plans as a table for people."""
    cells = [_cells(plan, bill) for plan, bill in zip(result.plans, result.bills, strict=True)]
    rows = [["", *(p.name for p in result.plans)], *([name, *(c[name] for c in cells)] for name in cells[0])]
    if result.configured:
        every = f"goodput at checkpoint.every={result.cfg.checkpoint.every}"
        rows.append([every, *(f"{100 * goodput:.2f} %" for goodput in result.configured)])
    parts = ["\n".join(_assumed(result)), table(rows)]
    if result.cluster.islands:
        parts.append("\n".join(_about_islands(result, result.cluster.islands)))
    elif result.cluster.replicas > 1:
        parts.append(
            f"replica-tolerant: {result.cluster.replicas} replicas; a job of ndtrain cannot continue without a lost "
            "replica, but islands can: islands.count"
        )
    return "\n\n".join(parts)


def _about_islands(result: Result, loss: IslandLoss) -> list[str]:
    """Return lines about the loss of islands."""
    cluster, plan = result.cluster, result.plans[-1]
    waits = loss.takeover_s - min(loss.takeover_s, loss.hidden_steps * result.step_s)
    restarts = f"it restarts in {duration(loss.restart_s)}, and reads the state in {duration(cluster.heal_s)}"
    often = lambda seconds: f"every {duration(seconds)}" if seconds and seconds < LONG else "never"
    return [
        f"islands: {cluster.replicas} of {cluster.gpus // cluster.replicas} ranks; the other plans are one job of all "
        "ranks with the same step time",
        f"a lost island: the others wait for {duration(waits)}; {restarts}",
        f"all islands are lost: {often(plan.all_lost_s)}; the others may not go on: {often(plan.no_quorum_s)}",
    ]


def _assumed(result: Result) -> list[str]:
    """Return lines with the plans' assumptions: failures, a checkpoint, a restart, and the run."""
    cfg, options, cluster = result.cfg, result.options, result.cluster
    tokens = cfg.train.tokens
    size = checkpoint_bytes(cfg.model, state_plan(cfg))
    how = "predicted" if options.step_time_s is None else "given"
    return [
        f"{cluster.gpus} ranks of {options.hardware} on {cluster.hosts} hosts: a failure every "
        f"{duration(cluster.mtbf_s)}",
        f"a checkpoint: {si(size, 'B')}, {duration(cluster.write_s)} to storage, "
        f"{duration(cluster.copy_s)} to host memory",
        f"a restart: {duration(result.plans[0].restart_s)}: detect {duration(options.detect_s)}, reschedule "
        f"{duration(options.reschedule_s)}, load {duration(cluster.load_s)}",
        f"the run: {cfg.train.steps} steps of {duration(result.step_s)} ({how}), {si(tokens, 'tokens')}; "
        f"checkpoint.async_save={str(cfg.checkpoint.async_save).lower()}",
    ]


def _cells(plan: Plan, bill: Bill) -> dict[str, str]:
    shares = {"goodput": plan.shares.training, "saving": plan.shares.saving, "restarting": plan.shares.restarting}
    shares |= {"lost work": plan.shares.lost, "absent replicas": plan.shares.absent}
    return {
        "save every": duration(plan.interval_s),
        "  best by Young": duration(plan.young_s),
        "  best by Daly": duration(plan.daly_s),
        "checkpoint.every": str(bill.checkpoint_every),
        **{name: f"{100 * share:.2f} %" for name, share in shares.items()},
        "tokens/s": f"{bill.tokens_per_s:,.0f}",
        "days": f"{bill.days:.2f}",
        "GPU hours": si(bill.gpu_hours, ""),
        **({} if bill.cost is None else {"cost": si(bill.cost, "")}),
    }


def duration(seconds: float) -> str:
    """Format a time with three digits, in the largest unit of which it has at least two: 12.3 min."""
    units = (("years", 365 * DAY), ("days", DAY), ("h", HOUR), ("min", 60.0), ("s", 1.0))
    unit, size = next((u for u in units if seconds >= 2 * u[1]), units[-1])
    return f"{seconds / size:.3g} {unit}"
