"""Values between ranks that nothing unpickles."""

import pytest
import torch
import torch.distributed as dist

from ndtrain.mesh import json_messages
from ndtrain.mesh.json_messages import all_gather_json, broadcast_json, gather_json
from tests.lib.ranks import run_ranks

CPU = torch.device("cpu")


def exchanged() -> list:
    """What each collective gives on this rank. The values differ in length, and one is empty."""
    group, rank = dist.group.WORLD, dist.get_rank()
    mine = [None, "ü" * 100, {"rank": [rank, 0.1]}][rank]
    tuples = all_gather_json((rank, (1.5,)), group, CPU)
    return [broadcast_json(mine, group, CPU), all_gather_json(mine, group, CPU), gather_json(mine, group, CPU), tuples]


def test_json_messages_arrive_on_every_rank():
    values = [None, "ü" * 100, {"rank": [2, 0.1]}]
    everywhere = [None, values, None, [[r, [1.5]] for r in range(3)]]
    assert run_ranks(exchanged, 3) == [[None, values, values, everywhere[3]], everywhere, everywhere]


def of_a_stranger() -> list[str]:
    """Bytes that are no JSON, and lengths that are not allowed, in place of a rank's own."""
    group, errors = dist.group.WORLD, []
    json_messages._encoded = lambda value, device: torch.tensor(list(value), dtype=torch.uint8)
    for content in (b"\x80\x04.", b"{", b"[" * 100_000, b""):
        try:
            all_gather_json(content, group, CPU)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_message_that_is_no_json_is_refused():
    for errors in run_ranks(of_a_stranger, 2):
        assert len(errors) == 4 and errors[2].startswith("a message between ranks is nested too deep"), errors
        assert errors[3] == f"a message of 0 bytes between ranks: at most {json_messages.MOST_BYTES} are allowed"


def test_too_long_message_is_refused_before_allocation():
    with pytest.raises(ValueError, match="a message of 9223372036854775807 bytes between ranks"):
        json_messages._checked(2**63 - 1)
