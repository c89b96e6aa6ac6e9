"""Islands as processes of their own, started as a user does: some of them hang at a moment that the test chooses."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.islands.runs import MESHES, PATIENCE_S, free_port, island_arguments
from tests.lib.helpers import MARK, processes, reset_signals, rows, wait_for, write_corpus

# If the file `loop` exists, rank 0 computes for ever, in Python, before the passes of a step. If `freeze` exists, rank
# 1 stops before it offers the last unit, as with SIGSTOP, but after its part in the collectives of its island.
DRIVER = """
import os, runpy, signal, sys
from pathlib import Path

from ndtrain.engine.train_step import TrainingStep
from ndtrain.islands.exchange import Exchange

loop, freeze = Path(sys.argv[1] + ".loop"), Path(sys.argv.pop(1) + ".freeze")
passes, withheld = TrainingStep.forward_backward, []
offer, check, numbers = Exchange.offer_unit, Exchange.check_offered, Exchange.offer_numbers


def forward_backward(*args):
    if os.environ.get("RANK", "0") == "0" and loop.exists():
        loop.unlink()
        while True:
            sum(range(1000))
    return passes(*args)


def offer_unit(self, step, unit, *rest):
    if os.environ.get("RANK") == "1" and freeze.exists() and unit == "model.embed_tokens":
        freeze.unlink()
        withheld.append(unit)
        return
    offer(self, step, unit, *rest)


def check_offered(*args):
    return withheld or check(*args)


def offer_numbers(*args):
    if withheld:
        os.kill(os.getpid(), signal.SIGSTOP)
    numbers(*args)


TrainingStep.forward_backward, Exchange.offer_unit = forward_backward, offer_unit
Exchange.check_offered, Exchange.offer_numbers = check_offered, offer_numbers
runpy.run_module("ndtrain.train", run_name="__main__", alter_sys=True)
"""
LONG = 100_000  # steps of a run that a test stops


@dataclass
class LaunchedIslands:
    """Islands of one run.

    Args:
        folder: holds a run folder for each, and its console.
        meshes: name -> the key of its mesh in `MESHES`.
        more: further overrides, for all of them.
    """

    folder: Path
    meshes: dict[str, str]
    more: tuple[str, ...] = ()
    steps: int = LONG
    restarts: int = 0
    _running: dict[str, subprocess.Popen] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "LaunchedIslands":
        corpus = write_corpus(self.folder / "corpus.txt")
        self._args = [
            *island_arguments(self.folder, corpus, self.steps, "checkpoint.every=0", "model.hidden_size=32"),
            f"islands.count={len(self.meshes)}",
            f"islands.address=127.0.0.1:{free_port()}",
            *self.more,
        ]
        (self.folder / "driver.py").write_text(DRIVER)
        for name in self.meshes:
            self.start(name)
        return self

    def __exit__(self, *error) -> None:
        for name in self.meshes:
            for pid in processes(self.run_dir(name)):
                os.kill(pid, signal.SIGKILL)
        self._stack.close()

    def run_dir(self, name: str) -> Path:
        return self.folder / name

    def start(self, name: str, *more: str) -> None:
        """Start an island, or start it again."""
        ranks, mesh = MESHES[self.meshes[name]]
        launcher = ["-m", "ndtrain.run.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
        launcher += ["--max-restarts", str(self.restarts)]
        driver = [str(self.folder / "driver.py"), str(self.folder / name)]
        args = [*driver, *self._args, *mesh, f"run.dir={self.run_dir(name)}", *more]
        console = self._stack.enter_context((self.folder / f"{name}.console").open("a"))
        env = os.environ | {MARK: str(self.run_dir(name)), "OMP_NUM_THREADS": "1"}
        self._running[name] = subprocess.Popen(
            [sys.executable, *(launcher if ranks > 1 else []), *args], cwd=self.folder, env=env, stdout=console,
            stderr=console, start_new_session=True, preexec_fn=reset_signals,
        )  # fmt: skip

    def loop(self, name: str) -> None:
        """Let the training thread of an island's rank 0 compute for ever."""
        (self.folder / f"{name}.loop").touch()

    def freeze(self, name: str) -> None:
        """Stop rank 1 of an island after it has computed a step, before others can read its gradient."""
        (self.folder / f"{name}.freeze").touch()

    def send(self, name: str, number: int, rank: str | None = None) -> None:
        """Send a signal to one rank of an island, or to all its processes."""
        for pid, of in processes(self.run_dir(name)).items():
            if rank in (None, of):
                os.kill(pid, number)

    def step(self, name: str) -> int:
        """Return the last step that an island has logged."""
        logged = rows(self.run_dir(name))
        return logged[-1]["step"] if logged else 0

    def console(self, name: str) -> str:
        return (self.folder / f"{name}.console").read_text()

    def reach(self, name: str, step: int) -> None:
        """Wait until an island has logged a step."""
        self.wait_for(lambda: self.step(name) >= step, f"step {step} of {name}")

    def wait_for_line(self, name: str, text: str) -> None:
        self.wait_for(lambda: text in self.console(name), f"{text!r} of {name}")

    def wait_for_end(self, name: str) -> int:
        """Wait until the first process of an island has ended. Return its exit code."""
        self.wait_for(lambda: self._running[name].poll() is not None, f"the end of {name}")
        return self._running[name].returncode

    def sleep(self, seconds: float) -> None:
        """Let time pass, in which all islands are as they are."""
        time.sleep(seconds)

    def is_running(self, name: str) -> bool:
        return self._running[name].poll() is None

    def wait_for(self, condition, what: str) -> None:
        """Wait for a condition. If it fails, the message has the consoles."""
        try:
            wait_for(condition, what, PATIENCE_S, pause=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(f"--- {n}\n{self.console(n)}" for n in self.meshes)) from None
