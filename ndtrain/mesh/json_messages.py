"""Messages of small values between ranks, as JSON. PyTorch's object collectives unpickle the bytes that arrive over the
network, which can run code of the sender. Nothing is unpickled here. The caller checks the fields of the value that it
receives."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = 64 << 20  # limit for the JSON of one rank's value


def broadcast_json(value: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the value of the group's first rank, on every rank.

    Args:
        value: a value that JSON can express; ignored on the other ranks.
        device: the device of the group's tensors.

    Raises:
        ValueError: the message is not JSON, or is too long.
    """
    mine = _encoded(value, device) if group.rank() == 0 else None
    size = torch.tensor([0 if mine is None else len(mine)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    content = mine if mine is not None else torch.empty(_checked(int(size)), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=0)
    return _decoded(content)


def all_gather_json(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return the values of all ranks of the group, in rank order, on every rank. Arguments and errors are as in
    `broadcast_json`."""
    padded, sizes = _padded(value, group, device)
    rows = torch.empty(len(sizes), len(padded), dtype=torch.uint8, device=device)
    dist.all_gather(list(rows.unbind()), padded, group=group)
    return [_decoded(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def gather_json(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any] | None:
    """Return the values of all ranks, in rank order, on the group's first rank, and None on the others. Arguments and
    errors are as in `broadcast_json`."""
    padded, sizes = _padded(value, group, device)
    if group.rank() > 0:
        dist.gather(padded, None, group=group, group_dst=0)
        return None
    rows = torch.empty(len(sizes), len(padded), dtype=torch.uint8, device=device)
    dist.gather(padded, list(rows.unbind()), group=group, group_dst=0)
    return [_decoded(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def _padded(value: Any, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return this rank's value, padded to the length of the longest value, and the lengths of all values."""
    mine = _encoded(value, device)
    lengths = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(mine)], device=device), group=group)
    sizes = [_checked(size) for size in lengths.tolist()]
    return torch.nn.functional.pad(mine, (0, max(sizes) - len(mine))), sizes


def _checked(size: int) -> int:
    if not 0 < size <= MOST_BYTES:
        raise ValueError(f"a message of {size} bytes between ranks: at most {MOST_BYTES} are allowed")
    return size


def _encoded(value: Any, device: torch.device) -> Tensor:
    content = json.dumps(value).encode()
    _checked(len(content))
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _decoded(content: Tensor) -> Any:
    try:
        return json.loads(content.cpu().numpy().tobytes())
    except RecursionError as error:
        raise ValueError("a message between ranks is nested too deeply") from error
