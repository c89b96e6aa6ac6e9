"""Islands as real runs: their processes, kills, and their results beside those of one process."""

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from ndtrain.islands.island import LOST_WEIGHTS
from ndtrain.observe.jsonl import read_rows
from ndtrain.run import exit_status
from tests.lib.helpers import arguments, checkpoint_of, rank_main, rows
from tests.lib.ranks import started_ranks

PATIENCE_S = 240.0  # for a run on a busy machine
MESHES = {
    "one": (1, []),
    "tp": (2, ["mesh.tp=2"]),
    "fsdp": (2, ["mesh.fsdp=2"]),
    "cp": (2, ["mesh.cp=2"]),
    "pp": (2, ["mesh.pp=2"]),
    "dp": (2, ["mesh.dp=2", "mesh.zero=1"]),
    "ep": (2, ["mesh.dp=2", "mesh.ep=2"]),
}
FP64 = ["precision.params=fp64", "precision.compute=fp64", "train.compile=false", "train.micro_batch=1"]


def free_port() -> int:
    """Return a port that nobody listens at. Kernels give ports of this range to no other socket."""
    for port in random.sample(range(16384, 32768), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


@dataclass
class Islands:
    """Islands of one run, started as their ranks.

    Args:
        folder: holds a run folder for each.
        args: the overrides that all of them have.
        meshes: name -> the key of its mesh in `MESHES`.
        mains: name -> what its ranks run instead of `rank_main`.
    """

    folder: Path
    args: list[str]
    meshes: dict[str, str]
    door: int = field(default_factory=free_port)
    mains: dict[str, Callable[[list[str]], int]] = field(default_factory=dict)
    _running: dict = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Islands":
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def start(self, name: str, *more: str) -> None:
        """Start an island, or start it again."""
        ranks, mesh = MESHES[self.meshes[name]]
        islands = [
            f"islands.count={len(self.meshes)}",
            f"islands.address=127.0.0.1:{self.door}",
            "islands.timeout_s=60",
        ]
        args = [*self.args, *mesh, *islands, f"run.dir={self.folder / name}", "islands.wait_s=120", *more]
        self._running[name] = self._stack.enter_context(started_ranks(self.mains.get(name, rank_main), ranks, args))

    def wait_for_door(self) -> None:
        """Wait until an island listens at the known address."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.door)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(self.failures())

    def kill(self, name: str) -> None:
        """End all processes of an island at once, without a chance to say anything."""
        for p in self._running[name][0]:
            os.kill(p.pid, signal.SIGKILL)
        for p in self._running[name][0]:
            p.join()

    def pause(self, name: str, seconds: float) -> None:
        """Stop all processes of an island, and let them go on."""
        for p in self._running[name][0]:
            os.kill(p.pid, signal.SIGSTOP)
        time.sleep(seconds)
        for p in self._running[name][0]:
            os.kill(p.pid, signal.SIGCONT)

    def wait_for_step(self, name: str, step: int) -> None:
        """Wait until an island has logged a step."""
        end = time.monotonic() + PATIENCE_S
        while self.step(name) < step:
            assert time.monotonic() < end and not any(self.exit_codes(name)), self.failures()
            time.sleep(0.02)

    def pid(self, name: str) -> int:
        """Return the process of an island's rank 0."""
        return self._running[name][0][0].pid

    def exit_codes(self, name: str) -> list[int | None]:
        return [p.exitcode for p in self._running[name][0]]

    def failures(self) -> str:
        texts = [f"{name}: {p.read_text()}" for name, (_, f) in self._running.items() for p in f.glob("error-*")]
        logs = [f"{p}: {p.read_text()[-1500:]}" for p in self.folder.glob("*/logs/rank-0.log")]
        return "\n".join([*texts, *logs])

    def wait(self, names: Sequence[str] | None = None) -> None:
        """Wait until islands have finished.

        Raises:
            AssertionError: one failed, or they take too long.
        """
        end, waited = time.monotonic() + PATIENCE_S, names or list(self.meshes)
        while time.monotonic() < end and None in [code for name in waited for code in self.exit_codes(name)]:
            self.start_again()
            time.sleep(0.05)
        for name in waited:
            assert self.exit_codes(name) == [0] * len(self._running[name][0]), self.failures()

    def start_again(self) -> None:
        """Start the islands again that ask for it, as launch/islands.sh does: the only island that had the newest
        weights was killed while they were read."""
        for name in self.meshes:
            if set(self.exit_codes(name)) != {None}:  # one of its processes has ended
                for p in self._running[name][0]:
                    p.join(10)
                if exit_status.read(self.folder / name).error == LOST_WEIGHTS:
                    self.start(name, "resume=auto")

    def step(self, name: str) -> int:
        """Return the last step that an island has logged."""
        logged = read_rows(self.folder / name / "metrics.jsonl")
        return logged[-1]["step"] if logged else 0


def run_one(folder: Path, args: list[str], mesh: Sequence[str] = ()) -> None:
    """Run the reference: one process, without islands."""
    with started_ranks(rank_main, 1, [*args, *mesh, f"run.dir={folder}"]) as (ranks, errors):
        ranks[0].join(PATIENCE_S)
        assert ranks[0].exitcode == 0, [p.read_text() for p in errors.glob("error-*")]


def island_arguments(folder: Path, corpus: Path, steps: int, *more: str) -> list[str]:
    """Return the overrides of a small run in fp64 whose global batch several islands can share."""
    own = ["train.global_batch=12", f"train.steps={steps}", "checkpoint.async_save=false", *FP64]
    return [x for x in arguments(folder, corpus, *own, *more) if not x.startswith("run.dir=")]


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest difference of losses and gradient norms between two runs, relative, over the common steps."""
    mine, theirs = ({row["step"]: row for row in rows(folder)} for folder in (one, other))
    common = mine.keys() & theirs.keys()
    assert common, "no common step"
    of = lambda key: (abs(mine[s][key] - theirs[s][key]) / abs(mine[s][key]) for s in common)
    return max(*of("loss"), *of("grad_norm"))


def largest_difference_of_tensors(one: Path, other: Path, step: int) -> float:
    """Return the largest difference of weights and moments after a step, relative to the norm of the tensor."""
    worst = 0.0
    for path in checkpoint_of(one, step).glob("*.safetensors"):
        with safe_open(path, "pt") as mine, safe_open(checkpoint_of(other, step) / path.name, "pt") as theirs:
            assert set(mine.keys()) == set(theirs.keys())
            for name in list(mine.keys()):
                x, y = mine.get_tensor(name).double(), theirs.get_tensor(name).double()
                worst = max(worst, float((x - y).norm() / x.norm().clamp(min=1e-30)))
    return worst


def kill_and_revive(islands: Islands, kills: int, steps: int, seed: int) -> int:
    """Kill random islands at random moments and start them again, until a number of kills or the last steps.

    Return the number of kills.
    """
    draw, done = random.Random(seed), 0
    end = time.monotonic() + PATIENCE_S * kills
    while done < kills and (newest := max(islands.step(n) for n in islands.meshes)) < steps - 20:
        assert time.monotonic() < end, islands.failures()
        goal = newest + draw.randint(1, max(1, (steps - newest) // (kills - done + 1)))
        if not _reach(islands, goal, end):
            break
        name = draw.choice(list(islands.meshes))
        time.sleep(draw.uniform(0, 0.3))
        islands.kill(name)
        done += 1
        time.sleep(draw.uniform(0, 1.0))
        islands.start(name, "resume=auto")
    return done


class Killed(NamedTuple):
    """The result of a run with kills: the kills, and the largest differences from an undisturbed process, relative."""

    kills: int
    of_curves: float
    of_tensors: float


def run_with_kills(
    folder: Path, corpus: Path, meshes: Sequence[str], kills: int, steps: int, seed: int, *more: str
) -> Killed:
    """Run islands of these meshes that are killed at random moments and return, and one undisturbed process."""
    often = ["checkpoint.every=10", "checkpoint.keep=2", "model.hidden_size=32"]
    args = island_arguments(folder, corpus, steps, *often, *more)
    run_one(folder / "reference", args)
    names = dict(zip("abcdefgh", meshes, strict=False))
    with Islands(folder, args, names) as islands:
        for name in names:
            islands.start(name)
        done = kill_and_revive(islands, kills, steps, seed)
        islands.wait()
    one, others = folder / "reference", [folder / name for name in names]
    of_tensors = max(largest_difference_of_tensors(one, other, steps) for other in others)
    return Killed(done, max(largest_difference(one, other) for other in others), of_tensors)


def _reach(islands: Islands, goal: int, end: float) -> bool:
    """Wait until an island is at a step. Return False if one has finished before."""
    while max(islands.step(n) for n in islands.meshes) < goal:
        islands.start_again()
        codes = [code for n in islands.meshes for code in islands.exit_codes(n)]
        assert not any(codes) and time.monotonic() < end, islands.failures()
        if 0 in codes:
            return False
        time.sleep(0.02)
    return True
