"""Between host and device, without the host waiting for what the device still has to do.

A copy from or to ordinary memory waits until all that is queued on the device is done; one from or to page-locked
memory is queued like everything else. On a CPU there is nothing to copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ndtrain.distributed.collectives import Pending
from ndtrain.distributed.flight_recorder import RECORDER


def upload(numbers: Sequence[float], device: torch.device) -> Tensor:
    """fp64 [k] on the device."""
    on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


class Readback:
    """Tensors of one device in the host's memory, for later.

    Args:
        pending: what has to be over before they hold what is wanted.
    """

    def __init__(self, pending: Pending, *tensors: Tensor):
        self._pending, self._tensors, self._copied = pending, tensors, None
        if tensors[0].is_cuda:
            pending.wait()  # the stream waits, not the host
            self._tensors = tuple(x.to("cpu", non_blocking=True) for x in tensors)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def wait(self, name: str) -> tuple[Tensor, ...]:
        """The tensors, as they were when this was made; waits for them, and for nothing that was queued after them.

        Args:
            name: what the recorder calls them.
        """
        self._pending.wait()
        if self._copied is not None:
            with RECORDER.waiting(name):
                self._copied.synchronize()
        return self._tensors
