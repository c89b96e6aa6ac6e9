"""The goodput of a run whose hosts fail: how often to save, how many days it takes, and what they cost."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ndtrain.arguments import option
from ndtrain.checkpoint.elements import checkpoint_bytes
from ndtrain.config import Config, ConfigError
from ndtrain.distributed.mesh import MeshSpec
from ndtrain.plan.drawings import goodput_svg
from ndtrain.plan.fault_tolerance import DAY, HOUR, Assumptions, Cluster, Plan, above_0, cluster_of, curves_of, plans_of
from ndtrain.plan.hardware import Hardware, load_hardware
from ndtrain.plan.options import RunOptions, planned_config, write_file
from ndtrain.plan.predict import Predictor
from ndtrain.plan.report import si, table


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions, Assumptions):
    """Of `plan goodput`."""

    step_time_s: float | None = option("seconds of a step; unless given, predicted", None, read=above_0)
    price: float | None = option("of an hour of one GPU, in any currency", None, read=above_0)
    svg: str | None = option("the file to draw goodput over GPU counts to", None)


def run(options: Options, overrides: Sequence[str]) -> None:
    """Prints the plans, and writes the JSON and the drawing.

    Raises:
        ConfigError: there is no such run, its step cannot be predicted, or a file cannot be written.
    """
    hardware = load_hardware(options.hardware)
    cfg = planned_config(overrides, options, hardware)
    cluster = cluster_of(cfg, hardware, options, MeshSpec.of(cfg.mesh).world_size)
    step_s = options.step_time_s or _predicted(cfg, hardware)
    plans = plans_of(cluster, options, step_s)
    bills = [bill_of(cfg, cluster, plan, step_s, options.price) for plan in plans]
    print(as_text(cfg, hardware, options, cluster, plans, bills))
    if options.svg:
        write_file("svg", options.svg, goodput_svg(curves_of(cfg, hardware, options, step_s)))
    if options.json:
        write_file("json", options.json, as_json(cfg, options, cluster, plans, bills))


def _predicted(cfg: Config, hardware: Hardware) -> float:
    try:
        return Predictor(hardware).predict(cfg, explain=False).step_time_s
    except ConfigError as error:
        raise ConfigError(f"{error}; or give step_time_s=SECONDS") from error


@dataclass(frozen=True)
class Bill:
    """The whole run.

    Attributes:
        checkpoint_every: steps between two saves, as the key of this name.
        cost: None: no price was given.
    """

    step_time_s: float
    checkpoint_every: int
    days: float
    gpu_hours: float
    cost: float | None


def bill_of(cfg: Config, cluster: Cluster, plan: Plan, step_s: float, price: float | None) -> Bill:
    """What the run takes with this plan. A goodput of 0 never ends."""
    goodput = plan.shares.training
    days = cfg.train.steps * step_s / goodput / DAY if goodput else math.inf
    hours = 24 * days * cluster.gpus
    return Bill(step_s, max(1, round(plan.interval_s / step_s)), days, hours, price and price * hours)


# ------------------------------------------------------------------------------------------------------------- output


def as_json(cfg: Config, options: Options, cluster: Cluster, plans: Sequence[Plan], bills: Sequence[Bill]) -> str:
    """Everything, in seconds and shares of 1."""
    body = {"options": asdict(options), "checkpoint_bytes": checkpoint_bytes(cfg), "cluster": asdict(cluster)}
    both = [asdict(plan) | asdict(bill) for plan, bill in zip(plans, bills, strict=True)]
    return json.dumps(body | {"plans": both}, indent=1)


def as_text(
    cfg: Config,
    hardware: Hardware,
    options: Options,
    cluster: Cluster,
    plans: Sequence[Plan],
    bills: Sequence[Bill],
) -> str:
    """A table for people."""
    tokens = cfg.train.steps * cfg.train.global_batch * cfg.train.seq_len
    how = "predicted" if options.step_time_s is None else "given"
    lines = [
        f"{cluster.gpus} ranks of {hardware.name} on {cluster.hosts} hosts: a failure every {duration(cluster.mtbf_s)}",
        f"a checkpoint: {si(checkpoint_bytes(cfg), 'B')}, {duration(cluster.write_s)} to storage, "
        f"{duration(cluster.copy_s)} to host memory",
        f"a restart: {duration(plans[0].restart_s)}: detect {duration(options.detect_s)}, reschedule "
        f"{duration(options.reschedule_s)}, load {duration(cluster.load_s)}",
        f"the run: {cfg.train.steps} steps of {duration(bills[0].step_time_s)} ({how}), {si(tokens, 'tokens')}; "
        f"checkpoint.async_save={str(cfg.checkpoint.async_save).lower()}",
    ]
    cells = [_cells(plan, bill) for plan, bill in zip(plans, bills, strict=True)]
    rows = [["", *(p.name for p in plans)], *([name, *(c[name] for c in cells)] for name in cells[0])]
    parts = ["\n".join(lines), table(rows)]
    if cluster.replicas > 1:
        parts.append(f"replica-tolerant: {cluster.replicas} replicas; ndtrain does not train on without one yet")
    return "\n\n".join(parts)


def _cells(plan: Plan, bill: Bill) -> dict[str, str]:
    shares = {"goodput": plan.shares.training, "saving": plan.shares.saving, "restarting": plan.shares.restarting}
    shares |= {"lost work": plan.shares.lost, "absent replicas": plan.shares.absent}
    return {
        "save every": duration(plan.interval_s),
        "  best by Young": duration(plan.young_s),
        "  best by Daly": duration(plan.daly_s),
        "checkpoint.every": str(bill.checkpoint_every),
        **{name: f"{100 * share:.2f} %" for name, share in shares.items()},
        "days": f"{bill.days:.2f}",
        "GPU hours": si(bill.gpu_hours, ""),
        **({} if bill.cost is None else {"cost": si(bill.cost, "")}),
    }


def duration(seconds: float) -> str:
    """With three digits, in the largest unit of which there are two: 12.3 min."""
    units = (("years", 365 * DAY), ("days", DAY), ("h", HOUR), ("min", 60.0), ("s", 1.0))
    unit, size = next((u for u in units if seconds >= 2 * u[1]), units[-1])
    return f"{seconds / size:.3g} {unit}"
