"""A row of a table of measurements as a run of ndtrain: overrides of its configuration, and the hardware.

The row's trainer is priced as if ndtrain ran its settings. If ndtrain lacks a setting, the one that works most alike
replaces it. If there is none, the row is refused.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from lab.published.cells import Row, count, number, size_of, text
from lab.published.flash import with_kernel_of
from lab.published.kept import NANOTRON, OP_LEVEL, with_kept, with_plain_loss
from lab.published.machine import hardware_of
from lab.published.model import model_of
from lab.published.serial import with_serial_messages
from lab.published.unfused import is_unfused, with_unfused_attention
from lab.published.whole import with_whole_recompute
from ndtrain.config import Config, ConfigError, ModelConfig, resolve
from ndtrain.config.schema import SAVABLE_OPS
from ndtrain.model.flops import block_flops, head_flops
from ndtrain.model.spec import CORE
from ndtrain.plan.candidates import Stages, lighter_ends
from ndtrain.plan.hardware import Hardware
from ndtrain.plan.pieces import record_pieces
from ndtrain.plan.predict import StepPlan, plan_step

# Pattern in the trainer's name of a schedule, without punctuation -> the schedule that works most alike. zb2p is ZB-H2,
# whose bubble is nearest to zb_v's. Breadth-first is gpipe with chunks.
_SCHEDULES = (
    (r"dualpipe", "dualpipe_v"),
    (r"zbv|vzb|zb2p|zbh2|zerobubblev", "zb_v"),
    (r"zb|zerobubble", "zb_h1"),
    (r"gpipe|afab|fillfdrain|filldrain|breadthfirst|bfs", "gpipe"),
    (r"interleav|1f1bi|vpp|virtual|looped|circular", "interleaved"),
    (r"1f1b|pipedream|onefoneb|nonint", "1f1b"),
)
_RECOMPUTE = (
    (r"^(no|off|false|0)", "none"),
    (r"selective|sac|attention|attn|partial|core", "selective"),
    (r"full|all|block|layer|uniform|true|yes|on|1", "full"),
)
_WHOLE = 2**30  # tokens: other trainers compute all logits of a microbatch at once
_EAGER = r"\beager\b|nanotron|llm-foundry"  # trainers whose blocks are neither compiled nor made of fused kernels
_LIGHTER_ENDS = re.compile(r"\bfirst ?(/|and) ?last stages? (with |have )?(one|a) layer (fewer|less)", re.IGNORECASE)
_PRECISION = ((r"fp8|float8|e4m3|mxfp8", "fp8"), (r"tf32|fp32|float32", "fp32"), (r"16|half|mixed|amp", "bf16"))


@dataclass(frozen=True)
class Run:
    """A priced run.

    Attributes:
        overrides: dotted key -> value, in addition to the model's.
        row: the row of the table that describes it.
    """

    model: ModelConfig
    overrides: dict[str, Any]
    ranks: int
    hardware: Hardware
    row: Row

    def plan(self) -> StepPlan:
        """Return the plan of its step.

        Raises:
            ConfigError: ndtrain cannot run it.
        """
        device = self.hardware.device
        plan = with_kept(plan_step(self.config(), device), self.row)
        plan = with_serial_messages(with_whole_recompute(plan, self.row), self.row)
        if self.overrides["train.compile"] == "true":
            plan = with_plain_loss(plan, record_pieces(self.config({"train.compile": "false"}), device))
        return with_unfused_attention(plan) if is_unfused(self.row) else with_kernel_of(plan, self.row, self.hardware)

    def config(self, overrides: Mapping[str, Any] = MappingProxyType({})) -> Config:
        """Return the resolved configuration, with some more overrides.

        Raises:
            ConfigError: ndtrain cannot run it.
        """
        cfg = Config()
        for f in fields(ModelConfig):
            setattr(cfg.model, f.name, getattr(self.model, f.name))
        for key, value in {**self.overrides, **overrides}.items():
            section, name = key.split(".")
            setattr(getattr(cfg, section), name, value)
        return resolve(cfg, self.ranks)


def run_of(row: Row) -> Run:
    """Return the run of a row.

    Raises:
        ConfigError: ndtrain cannot express it; the message gives the reason.
    """
    model, hardware = model_of(row), hardware_of(row)
    mesh = _mesh(row)
    ranks = math.prod(size for key, size in mesh.items() if key != "mesh.zero")
    stated = number(row, "micro_batch")
    schedule = _schedule(row, model, mesh["mesh.pp"])
    overrides = {
        **mesh,
        **schedule,
        **_precision(row, hardware),
        **_of_notes(row),
        **_recompute(row),
        **_split(row, model, schedule, mesh["mesh.pp"]),
        "train.seq_len": count(row, "seq_len"),
        "train.global_batch": count(row, "global_batch_seqs"),
        "train.micro_batch": None if stated is None else count(row, "micro_batch"),
        "train.loss_chunk": _WHOLE,
        "data.name": "bin",
        "data.path": "tokens.bin",
    }
    return Run(model, overrides, ranks, hardware, row)


def _mesh(row: Row) -> dict[str, int]:
    """Return the sizes of the axes. Data parallelism with sharded state becomes fsdp, since ndtrain shards over fsdp.

    Raises:
        ConfigError: the product of the sizes is not the number of GPUs.
    """
    sizes = {axis: size_of(row, axis, 1) for axis in ("pp", "cp", "tp")}
    fsdp, gpus = size_of(row, "fsdp", 1), count(row, "gpus", 0)
    model_ranks = math.prod(sizes.values())
    dp = size_of(row, "dp", max(1, gpus // (model_ranks * fsdp)))
    if gpus and dp * fsdp * model_ranks != gpus:
        if max(dp, fsdp) * model_ranks != gpus:  # else both columns describe the same axis
            raise ConfigError(
                f"gpus={gpus} are not dp x fsdp x tp x pp x cp = "
                f"{dp} x {fsdp} x {sizes['tp']} x {sizes['pp']} x {sizes['cp']}"
            )
        dp, fsdp = (dp, 1) if dp > fsdp else (1, fsdp)
    zero = _zero(row, fsdp)
    if fsdp == 1 and zero:
        dp, fsdp = 1, dp
    return {f"mesh.{axis}": size for axis, size in sizes.items()} | {
        "mesh.dp": dp,
        "mesh.fsdp": fsdp,
        "mesh.zero": zero or 1,
    }


def _zero(row: Row, fsdp: int) -> int:
    stated = text(row, "zero_stage")
    if not stated:
        return 3 if fsdp > 1 else 0
    stage = re.fullmatch(r"(?:zero|stage)?[- ]?([0-3])(?:\.0)?", stated, re.IGNORECASE)
    if stage is None:
        raise ConfigError(f"zero_stage={stated}: must be 0, 1, 2 or 3")
    return int(stage[1])


def _schedule(row: Row, model: ModelConfig, pp: int) -> dict[str, Any]:
    """Return the schedule, and its chunks if it allows any number of them. Without a name, the schedule is 1F1B."""
    chunks = size_of(row, "vpp", 1)
    stated = re.sub(r"[^a-z0-9]", "", text(row, "schedule").lower())
    name = "1f1b" if pp == 1 else _named(stated, _SCHEDULES, "schedule", "1f1b")
    if pp == 1:
        chunks = 1
    if name == "1f1b" and chunks > 1:
        name = "interleaved"
    if name in ("zb_v", "dualpipe_v") and 2 * pp > model.num_hidden_layers:
        name = "zb_h1"
    free = name == "gpipe" or (name == "interleaved" and chunks > 1)
    return {"schedule.name": name, "schedule.chunks": chunks if free else None}


def _split(row: Row, model: ModelConfig, schedule: Mapping[str, Any], pp: int) -> dict[str, Any]:
    """Return the override with the layers of each stage, if the notes or the trainer determine them."""
    says, layers = text(row, "source") + " " + text(row, "notes"), model.num_hidden_layers
    stages = Stages(schedule["schedule.name"], schedule["schedule.chunks"]).count(pp)
    split: Sequence[int] = ()
    if pp > 1 and NANOTRON.search(says):
        split = _split_of_nanotron(model, pp)
    elif pp > 1 and _LIGHTER_ENDS.search(says):
        split = lighter_ends(layers, stages)
    return {"schedule.split": list(split)} if split else {}


def _split_of_nanotron(model: ModelConfig, pp: int) -> list[int]:
    """Return the layers of each stage. A stage takes layers until all layers so far cost its share of the model with
    head. Every stage but the last gets at least one layer."""
    layers, split = model.num_hidden_layers, []
    total = layers + head_flops(model) / block_flops(model, 1)
    for stage in range(pp - 1):
        share = math.ceil(total * (stage + 1) / pp - 1e-9) - sum(split)
        split.append(max(1, min(share, layers - sum(split) - (pp - 2 - stage))))
    return [*split, layers - sum(split)]


def _precision(row: Row, hardware: Hardware) -> dict[str, str]:
    """Return the compute precision. fp16 is priced as bf16, which costs the same."""
    compute = _named(text(row, "precision"), _PRECISION, "precision", "bf16")
    if compute == "fp8" and "fp8" not in hardware.peak_tflops:
        raise ConfigError(f"precision={text(row, 'precision')}: gpu={text(row, 'gpu')} has no fp8 matmuls")
    return {"precision.compute": compute}


def _recompute(row: Row) -> dict[str, Any]:
    """Return the recompute mode. Megatron's selective mode (Korthikanti et al., 2022, arXiv:2205.05198) repeats the
    attention core and cheap ops. torchtitan's repeats every second matmul. It is priced as a mode that repeats gate and
    up, since these are half of a block's matmuls."""
    name = _named(text(row, "recompute"), _RECOMPUTE, "recompute", "none")
    if name != "selective":
        return {"recompute.name": name}
    gate_up = SAVABLE_OPS[-1]
    repeated = gate_up if OP_LEVEL.search(text(row, "notes")) else CORE
    return {"recompute.name": name, "recompute.keep": [op for op in SAVABLE_OPS if op != repeated]}


def _of_notes(row: Row) -> dict[str, Any]:
    """Return settings that follow from the trainer's software or from the notes."""
    says = lambda pattern: re.search(pattern, text(row, "source") + " " + text(row, "notes"), re.IGNORECASE) is not None
    overrides: dict[str, Any] = {"train.compile": "false" if says(_EAGER) else "true"}
    # sequence parallelism is no older than fused attention
    if says(r"\bno sequence[- ]parallel") or (is_unfused(row) and not says(r"sequence[- ]parallel")):
        overrides["tp.sequence_parallel"] = False
    if says(r"\bulysses\b"):
        overrides["cp.kind"] = "ulysses"
    return overrides


def _named(stated: str, patterns: tuple[tuple[str, str], ...], column: str, default: str) -> str:
    """Return ndtrain's name for the text of a cell, or `default` if the cell has no value.

    Raises:
        ConfigError: no pattern fits.
    """
    if not stated:
        return default
    for pattern, name in patterns:
        if re.search(pattern, stated.lower()):
            return name
    known = ", ".join(dict.fromkeys(name for _, name in patterns))
    raise ConfigError(f"{column}={stated}: ndtrain has no equivalent; known: {known}")
