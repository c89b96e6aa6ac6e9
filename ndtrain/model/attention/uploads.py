"""Copies of numbers of the host on a device."""

import numpy as np
import torch
from torch import Tensor


def upload_array(x: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device. The host does not wait for it: the memory that it is made from is page-locked."""
    on_host = torch.from_numpy(x)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host.to(device)
