"""A training whose ranks are on a device that hangs, or is slow, from the third step on: a stub over gloo and CPU.

    python hung_device.py FAULT VICTIM OVERRIDE...

| fault  | what happens in the third step                                                              |
|--------|---------------------------------------------------------------------------------------------|
| late   | the victim's host sleeps; the others' devices complete nothing, their hosts go on           |
| launch | as `late`, and the others' hosts go on until the queue of launches is full, and block there |
| link   | nothing completes on any device                                                             |
| slow   | three operations of five seconds, one after the other, on every device                      |

As on NCCL no wait blocks the host, until it needs the result of a step: a copy whose event completes behind all else.
"""

import itertools
import os
import runpy
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from ndtrain.engine import trainer
from ndtrain.engine.executor import Executor
from ndtrain.mesh import collectives
from ndtrain.mesh.device_progress import DeviceProgress
from ndtrain.mesh.flight_recorder import RECORDER
from ndtrain.mesh.host_device import Readback

FULL_QUEUE = 40  # launches
SLOW_S = 5.0


class Work:
    """An operation that never completes. Its wait does not block."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False

    def get_future_result(self) -> torch.futures.Future:
        return torch.futures.Future()


def on_device(runs: bool) -> None:
    DeviceProgress.runs = lambda self, group: runs


def copied_by(synchronize) -> None:
    """Results of steps are copied by an event with this `synchronize`."""
    make = Readback.__init__

    def init(self, *args) -> None:
        make(self, *args)
        self._copied = SimpleNamespace(synchronize=synchronize)

    Readback.__init__ = init


def hang(blocks_in_launch: bool) -> None:
    """From now on this rank's device completes nothing."""
    launches = itertools.count()

    def launch(*args, **kwargs) -> Work:
        if blocks_in_launch and next(launches) == FULL_QUEUE:
            time.sleep(600)
        return Work()

    collectives.dist = SimpleNamespace(
        isend=launch, irecv=launch, all_reduce=launch, ReduceOp=torch.distributed.ReduceOp
    )
    copied_by(partial(time.sleep, 600))
    on_device(True)


def slow_down() -> None:
    """The next three operations take five seconds each on the device."""
    ends, drained = [], threading.Event()

    def run() -> None:
        while len(ends) < 3:
            time.sleep(0.01)
        for end in ends:
            time.sleep(SLOW_S)
            end.set_result(0)
        drained.set()

    def add(self, record, works) -> None:
        result = torch.futures.Future()
        ends.append(result)
        on_device(len(ends) < 3)
        follow(self, record, [SimpleNamespace(get_future_result=lambda: result)])

    follow, DeviceProgress.add = DeviceProgress.add, add
    copied_by(drained.wait)
    on_device(True)
    threading.Thread(target=run, daemon=True).start()


def main() -> None:
    fault, victim = sys.argv[1:3]
    del sys.argv[1:3]
    mine, begun = os.environ["RANK"] == victim, []

    def before(call, applies):
        """`call`, which the first time in the third step is preceded by the fault, where it applies."""

        def called(self, *args):
            if RECORDER.step == 3 and not begun and applies(self):
                begun.append(Path("failed-at").write_text(str(time.time())))
                if fault == "slow":
                    slow_down()
                elif fault != "link" and mine:
                    time.sleep(600)
                else:
                    hang(fault == "launch")
            return call(self, *args)

        return called

    # the other ranks of a pipeline wait for the victim's message before their first forward
    Executor.run = before(Executor.run, lambda self: self.pipeline.schedule.pp > 1 and not mine)
    Executor._forward = before(Executor._forward, lambda self: True)
    on_device(False)
    watchdog = trainer.HangWatchdog
    trainer.HangWatchdog = lambda *args, **named: watchdog(*args, **named | {"on_device": True})
    runpy.run_module("ndtrain.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
