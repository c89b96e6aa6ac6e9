"""Copies arrays from the host to a device."""

import numpy as np
import torch
from torch import Tensor


def upload_array(x: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy on the device. The host does not wait for the copy, because it is made from page-locked memory."""
    on_host = torch.from_numpy(x)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host.to(device)
