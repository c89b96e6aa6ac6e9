"""`ndtrain plan validate hardware=FILE.yaml` compares real steps of small models on this machine with predictions.

The file has to come from `plan calibrate` on this machine. Cases with the same number of ranks run in the same
processes, in alternating rounds. They are launched several times, because the speed of processes differs from launch to
launch with the placement of their threads and memory. A case's time is the time of its fastest block on the slowest
rank: other programs can make a block slower, but not faster. The errors of the median blocks are printed too.
"""

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ndtrain.arguments import option
from ndtrain.config import Config, ConfigError, load_config, resolve
from ndtrain.measure.ranks import choose_device, rank_device, run_launches
from ndtrain.measure.rounds import BlockTimer, run_rounds
from ndtrain.measure.training import DISTINCT, QueuedSteps, batches_of, ours
from ndtrain.mesh.mesh import Mesh, MeshSpec
from ndtrain.plan.accuracy import kendall_tau
from ndtrain.plan.hardware import load_hardware
from ndtrain.plan.options import refuse_overrides, write_file
from ndtrain.plan.predict import Predictor
from ndtrain.run.rendezvous import backend_of

WITHIN = 0.15  # target for an error
TOGETHER = 6  # the most cases in memory at one time
# `calibrate` measures none of these sizes.
MODEL = [
    "recipe=llama_small", "model.vocab_size=3000", "model.hidden_size=320", "model.intermediate_size=864",
    "model.num_hidden_layers=4", "model.num_attention_heads=8", "model.num_key_value_heads=8",
    "model.max_position_embeddings=512", "train.seq_len=128", "train.global_batch=8", "train.micro_batch=1",
    "train.compile=false",
]  # fmt: skip
CASES = {  # ranks -> overrides
    1: [
        "", "recompute=full", "recompute=selective", "recompute=every recompute.every=2", "precision.compute=bf16",
        "precision.compute=bf16 recompute=full", "train.micro_batch=4", "train.seq_len=512 train.global_batch=2",
        "model.hidden_size=192 model.intermediate_size=520", "model.hidden_size=640 model.intermediate_size=1728",
        "model.vocab_size=6000", "model.tie_word_embeddings=true",
    ],
    2: [
        "mesh.dp=2", "mesh.fsdp=2 mesh.zero=1", "mesh.fsdp=2 mesh.zero=2", "mesh.fsdp=2 mesh.zero=3",
        "mesh.fsdp=2 precision.compute=bf16", "mesh.fsdp=2 mesh.zero=3 recompute=full", "mesh.dp=2 train.micro_batch=4",
        "mesh.tp=2 train.micro_batch=4", "mesh.tp=2 train.micro_batch=2 tp.sequence_parallel=false",
        "mesh.tp=2 recompute=selective", "mesh.tp=2 precision.compute=bf16 train.micro_batch=4", "mesh.cp=2",
        "mesh.cp=2 cp.kind=ulysses", "mesh.cp=2 train.seq_len=512 train.global_batch=2", "mesh.pp=2 schedule=gpipe",
        "mesh.pp=2 schedule=1f1b", "mesh.pp=2 schedule=interleaved", "mesh.pp=2 schedule=zb_h1",
        "mesh.pp=2 schedule=dualpipe_v", "mesh.pp=2 schedule=1f1b precision.compute=bf16",
    ],
    4: [
        "mesh.dp=4", "mesh.fsdp=4 mesh.zero=3", "mesh.tp=4", "mesh.cp=4", "mesh.pp=4 schedule=1f1b",
        "mesh.pp=2 mesh.dp=2", "mesh.tp=2 mesh.fsdp=2", "mesh.pp=2 mesh.tp=2", "mesh.cp=2 mesh.fsdp=2",
    ],
    8: [
        "mesh.fsdp=8", "mesh.tp=8", "mesh.pp=2 mesh.fsdp=2 mesh.tp=2", "mesh.pp=4 mesh.dp=2",
        "mesh.dp=2 mesh.fsdp=2 mesh.cp=2", "mesh.pp=2 mesh.cp=2 mesh.tp=2",
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The options of `plan validate`."""

    hardware: str = option("description of this machine, written by `plan calibrate`")
    ranks: str = option("run only the cases with these numbers of ranks, e.g. 1,2", ",".join(map(str, CASES)))
    launches: int = option("launches of each case", 3)
    rounds: int = option("timed blocks of each case per launch", 2)
    steps: int = option("steps per block", 2)
    warmup: int = option("untimed steps before the timed ones", 2)
    json: str | None = option("JSON file for all results", None)

    @property
    def worlds(self) -> list[int]:
        """The numbers of ranks to run.

        Raises:
            ConfigError: there are no cases with such a number of ranks.
        """
        words = self.ranks.replace(",", " ").split()
        if strange := [w for w in words if w not in map(str, CASES)]:
            raise ConfigError(
                f"ranks={strange[0]}: no case has this number of ranks; known: {', '.join(map(str, CASES))}"
            )
        return [int(w) for w in words]


class Row(NamedTuple):
    """A case and its times.

    Attributes:
        blocks: seconds per step, for each block.
        predicted: seconds per step.
    """

    ranks: int
    case: str
    blocks: list[float]
    predicted: float

    @property
    def measured(self) -> float:
        """Seconds per step in the fastest block."""
        return min(self.blocks)

    @property
    def median(self) -> float:
        return statistics.median(self.blocks)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def run(options: Options, overrides: Sequence[str]) -> None:
    """Measure and predict all cases, and print both times.

    Raises:
        ConfigError: the description has no measurements of a machine, or a file cannot be written.
    """
    refuse_overrides(Options, overrides)
    hardware = load_hardware(options.hardware)
    if hardware.measured is None:
        raise ConfigError(
            f"hardware={options.hardware}: has no measurements: give a file written by `ndtrain plan calibrate`"
        )
    device, predictor, rows = choose_device(hardware.device), Predictor(hardware), []
    print(f"{options.launches} launches of each of {sum(len(CASES[n]) for n in options.worlds)} cases", flush=True)
    parts = [(ranks, part) for ranks in options.worlds for part in _parts(CASES[ranks])]
    timed = _launch(parts, options, device)
    print(f"{'ranks':>5} {'median ms':>9} {'fastest':>9} {'predicted':>9} {'error':>7}  case")
    for (ranks, cases), launched in zip(parts, timed, strict=True):
        for case, blocks in zip(cases, launched, strict=True):
            predicted = predictor.predict(config_of(case, ranks), explain=False).step_time_s
            rows.append(Row(ranks, case, blocks, predicted))
            print(_line(rows[-1]))
    print(*summary(rows, hardware.measured.cores), sep="\n")
    if options.json:
        write_file("json", options.json, json.dumps([{**r._asdict(), "error": r.error} for r in rows], indent=1))


def _parts(cases: list[str]) -> Iterator[list[str]]:
    for i in range(0, len(cases), TOGETHER):
        yield cases[i : i + TOGETHER]


def config_of(case: str, ranks: int) -> Config:
    """Return the resolved configuration of a case."""
    return resolve(load_config([*MODEL, *case.split()]), ranks)


def _launch(parts: Sequence[tuple[int, list[str]]], options: Options, device: str) -> list[list[list[float]]]:
    """Run `measure` for each part (ranks, cases). Return for each part and case the block times of all launches."""
    jobs = [(measure, n, [config_of(case, n) for case in cases], options, device) for n, cases in parts]
    by_part = run_launches(options.launches, jobs, backend_of(device))
    return [[list(chain(*of_case)) for of_case in by_case] for by_case in by_part]


def measure(rank: int, cfgs: Sequence[Config], options: Options, device: str) -> list[list[float]]:
    """Return for each case the seconds per step in each block. Runs in each rank's process."""
    timers = {}
    for i, cfg in enumerate(cfgs):
        mesh = Mesh(MeshSpec.of(cfg.mesh), rank, rank_device(rank, device))
        batches = [batches_of(cfg, mesh, step) for step in range(DISTINCT)]
        queued = QueuedSteps(ours(cfg, mesh), batches, mesh.device)
        timers[str(i)] = BlockTimer(queued, queued.finish)
    run_rounds(timers, options)
    return [[ms / 1e3 for ms in timer.block_ms] for timer in timers.values()]


def _line(row: Row) -> str:
    times = " ".join(f"{1e3 * seconds:9.1f}" for seconds in (row.median, row.measured, row.predicted))
    return f"{row.ranks:5} {times} {row.error:+7.1%}  {row.case or 'as it is'}"


def summary(rows: Sequence[Row], cores: int) -> list[str]:
    """Summarize the errors, with and without a core for each rank, and how well the predicted order agrees."""
    said = [f"\n{len(rows)} runs on {cores} cores; load average {os.getloadavg()[0]:.1f}"]
    for name, part in (
        ("ranks <= cores", [r for r in rows if r.ranks <= cores]),
        ("ranks > cores", [r for r in rows if r.ranks > cores]),
    ):
        if part:
            said.append(f"{name}: {_errors([r.error for r in part])}")
            said.append(f"  of the median blocks: {_errors([r.predicted / r.median - 1 for r in part])}")
    if len(rows) > 1:
        said.append(f"Kendall's tau of the order: {_tau(rows)}")
    for ranks in sorted({r.ranks for r in rows}):
        part = [r for r in rows if r.ranks == ranks]
        if len(part) > 1:
            said.append(f"  of {ranks} ranks alone: {_tau(part)}")
    return said


def _errors(errors: Sequence[float]) -> str:
    sizes = sorted(abs(e) for e in errors)
    within = f"{sum(e <= WITHIN for e in sizes)} of {len(sizes)} within {WITHIN:.0%}"
    return f"error median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}; {within}"


def _tau(rows: Sequence[Row]) -> str:
    tau = kendall_tau([r.measured for r in rows], [r.predicted for r in rows])
    return "none, all are equal" if tau is None else f"{tau:.2f}"
