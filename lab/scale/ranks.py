"""Many real ranks on one machine: gloo processes that start, train some steps, save, and resume on another mesh.

All ranks are forked from one process that has imported everything, so that a start does not measure imports. Each has
the limit of open files that most systems have. Rank 0 serves the store.
"""

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lab.islands import recipe
from lab.islands.figures import rounded
from lab.islands.options import OutOptions, number
from lab.scale.counted_store import CountedStore
from ndtrain import train
from ndtrain.arguments import option
from ndtrain.config import ConfigError
from ndtrain.engine.executor import Executor
from ndtrain.measure.results import save
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.run import exit_status, rendezvous
from tests.islands.runs import free_port

MOST_FILES = 1024  # the usual soft limit
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 500_000_000  # gloo's threads wake a hundred times a second each, which takes both cores from 512 ranks
_SAMPLES_PER_S = 300.0  # of all ranks together, so that measuring does not take the time of many ranks


@dataclass(frozen=True)
class Options(OutOptions):
    """Options of the trial."""

    ranks: int = option("processes", 64)
    mesh: str = option("axes and their sizes, separated by blanks", "fsdp=64")
    resume: str = option("axes of a second run that resumes the first one; empty: there is none", "")
    steps: int = option("steps of each run", 3)
    hang: int = option("rank that sleeps in the second step: the run must end with a diagnosis; -1: none", -1)
    args: str = option("further overrides, separated by blanks", "")
    count: bool = option("count operations on the store. PyTorch then opens fewer connections to it", True)
    minutes: float = number("minutes after which a run has failed", 20.0)

    def check(self) -> None:
        super().check()
        if self.hang >= 0 and self.resume:
            raise ConfigError("hang: such a run saves nothing: leave resume out")
        if self.ranks < 2:
            raise ConfigError(f"ranks={self.ranks}: at least 2 are needed")


def run(options: Options) -> bool:
    """Run the trial. Return False if a rank has failed."""
    options.check()
    runs = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = [*recipe.model(64, 2, 16), f"train.global_batch={options.ranks}"]
        common = [*recipe.overrides(folder, *model, *options.args.split()), f"run.dir={folder / 'run'}"]
        for n, mesh in enumerate(filter(None, (options.mesh, options.resume))):
            args = [*common, *_of_run(options, n, mesh)]
            runs.append({"mesh": mesh} | (_measured if options.hang < 0 else _hung)(options, folder / str(n), args))
            _show(runs[-1])
            if runs[-1]["faults"]:
                break
    save("scale ranks", options, runs=rounded(runs))
    return not any(run["faults"] for run in runs)


def _of_run(options: Options, n: int, mesh: str) -> list[str]:
    """Return the overrides of run number `n`, which resumes the one before."""
    own = [f"mesh.{axis}" for axis in mesh.split()]
    own += [f"train.steps={(n + 1) * options.steps}", f"checkpoint.every={options.steps}"]
    own += [f"hardware.timeout_s={600 if options.hang < 0 else max(10, options.ranks // 4)}"]  # steps take long here
    return [*own, *(["resume=auto"] if n else [])]


# --------------------------------------------------------------------------------------------------------- the parent


def _measured(options: Options, folder: Path, args: Sequence[str]) -> dict[str, Any]:
    """Run all ranks, and return their figures."""
    codes, began = _run_ranks(options, folder, args)
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    failed = [rank for rank, code in enumerate(codes) if code != 0]
    faults = [f"rank {rank}: {_last_line(folder / f'rank-{rank}.txt')}" for rank in failed[:8]]
    if failed or len(reports) < options.ranks:
        return {"faults": faults or ["ranks without a report"], "failed": len(failed)}
    rows = [json.loads(line) for line in Path(_run_dir(args), "metrics.jsonl").read_text().splitlines()]
    first = next(i for i, report in enumerate(reports) if report["rank"] == 0)
    others = [report for report in reports if report["rank"]]
    spread = lambda key: {"rank_0": reports[first][key], "median": median(x[key] for x in others),
                          "most": max(x[key] for x in others)}  # fmt: skip
    return {
        "ranks": options.ranks,
        "first_step_s": median(x["first_step_at"] for x in reports) - began,
        "seconds": time.time() - began,
        "loss": [row["loss"] for row in rows],
        "store_operations": spread("store_operations") | {"all": sum(x["store_operations"] for x in reports)},
        "store_bytes": spread("store_bytes") | {"all": sum(x["store_bytes"] for x in reports)},
        "open_files": spread("open_files"),
        "cpu_s": spread("cpu_s"),
        "pss_mib": spread("pss_mib") | {"all": sum(x["pss_mib"] for x in reports)},
        "faults": faults,
        "operations": reports[first]["operations"],
    }


def _hung(options: Options, folder: Path, args: Sequence[str]) -> dict[str, Any]:
    """Run all ranks, of which one sleeps in its second step, and return its diagnosis."""
    codes, began = _run_ranks(options, folder, args)
    text = json.loads(Path(_run_dir(args), "exit.json").read_text())["error"]
    lines = [line.strip().partition(", at ")[0] for line in text.splitlines()]  # without paths of this machine
    named = [x for x in lines if x.startswith(f"rank {options.hang} ") and "is waited for" in x]
    faults = [] if named else [f"the diagnosis does not name the rank: {text}"]
    wrong = [rank for rank, code in enumerate(codes) if code != exit_status.CODES["hang"]]
    faults += [f"rank {rank}: {codes[rank]}, {_last_line(folder / f'rank-{rank}.txt')}" for rank in wrong[:8]]
    return {"ranks": options.ranks, "diagnosis": (named or [""])[0], "seconds": time.time() - began, "faults": faults}


def _run_ranks(options: Options, folder: Path, args: Sequence[str]) -> tuple[list[int], float]:
    """Run all ranks, and return their exit codes and the time of their start."""
    folder.mkdir()
    port, began = free_port(), time.time()
    gc.collect()
    gc.freeze()  # otherwise a collection in each child would copy the pages of all objects
    pids = [_forked(lambda rank=rank: _rank(rank, options, folder, port, args)) for rank in range(options.ranks)]
    gc.unfreeze()
    return _exit_codes(pids, began + 60 * options.minutes), began


def _run_dir(args: Sequence[str]) -> str:
    return next(x for x in args if x.startswith("run.dir=")).removeprefix("run.dir=")


def _forked(child: Callable[[], None]) -> int:
    """Run a function in a forked process, which never returns here. Return its process id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    try:
        child()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _exit_codes(pids: Sequence[int], end: float) -> list[int]:
    """Wait for processes, and kill those that still run at time `end`. Return their exit codes."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        if time.time() > end:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return [codes[pid] for pid in pids]


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "no output"


# ------------------------------------------------------------------------------------------------------------- a rank


def _rank(rank: int, options: Options, folder: Path, port: int, args: Sequence[str]) -> None:
    """Run one rank, and write its figures. This process then ends."""
    console = os.open(folder / f"rank-{rank}.txt", os.O_CREAT | os.O_WRONLY)
    for output in (1, 2):
        os.dup2(console, output)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
    world = str(options.ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    probe = _Probe(options.count)
    if rank == options.hang:
        _sleep_in_step(2)
    code = train.main(list(args))
    (folder / f"rank-{rank}.json").write_text(json.dumps({"rank": rank} | probe.report()))
    sys.stdout.flush()
    os._exit(code)


def _sleep_in_step(step: int) -> None:
    """Let the first forward pass of a step never end."""
    forward = Executor._forward

    def sleeping(self: Executor, run: Any, microbatch: int) -> Any:
        if RECORDER.step == step:
            time.sleep(3600)
        return forward(self, run, microbatch)

    Executor._forward = sleeping  # type: ignore[method-assign]


class _Probe:
    """Measures this process: its operations on the store, its open files, its memory, and its first step."""

    def __init__(self, count: bool):
        self.stores: list[CountedStore] = []
        self.files = self.pss_mib = 0
        self.first_step_at = 0.0
        connect = rendezvous._connect

        def counted(timeout_s: float) -> CountedStore:
            self.stores.append(CountedStore(connect(timeout_s)))
            return self.stores[-1]

        if count:
            rendezvous._connect = counted
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.files = max(self.files, len(os.listdir("/proc/self/fd")))
            if RECORDER.step > 1 and not self.first_step_at:
                self.first_step_at = time.time()
                self.pss_mib = _pss_mib()
            time.sleep(max(0.1, int(os.environ["WORLD_SIZE"]) / _SAMPLES_PER_S))

    def report(self) -> dict[str, Any]:
        operations: dict[str, int] = {}
        for store in self.stores:
            for name, count in store.operations.items():
                operations[name] = operations.get(name, 0) + count
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "store_operations": sum(operations.values()),
            "operations": operations,
            "store_bytes": sum(store.nbytes for store in self.stores),
            "open_files": max(self.files, len(os.listdir("/proc/self/fd"))),
            "cpu_s": used.ru_utime + used.ru_stime,
            "pss_mib": self.pss_mib or _pss_mib(),
            "first_step_at": self.first_step_at or time.time(),
        }


def _pss_mib() -> int:
    """Return this process's memory in MiB. Pages that it shares with others count in part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) // 1024


def _show(result: dict[str, Any]) -> None:
    if result["faults"]:
        print(f"{result['mesh']}: failed: {'; '.join(result['faults'])}", flush=True)
        return
    if "diagnosis" in result:
        print(f"{result['mesh']}: {result['diagnosis']}, after {result['seconds']:.0f} s", flush=True)
        return
    print(f"{result['mesh']}: first step after {result['first_step_s']:.1f} s, end after {result['seconds']:.1f} s")
    for key in ("store_operations", "store_bytes", "open_files", "cpu_s", "pss_mib"):
        print(f"  {key:18}", ", ".join(f"{name} {value:,.4g}" for name, value in result[key].items()), flush=True)
