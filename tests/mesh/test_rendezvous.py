"""The simulator of NCCL's rules (ndtrain/program/launch_order.py) on programs whose outcome is known."""

import pytest

from ndtrain.program.launch_order import Compute, LaunchOrderError, Op, Start, Wait, check, simulate


def send(to: int, comm: str = "c", **rest) -> Op:
    return Op("send", comm, sends=(to,), **rest)


def receive(source: int, comm: str = "c", **rest) -> Op:
    return Op("receive", comm, receives=(source,), **rest)


def gather(*members: int, comm: str = "c", name: str = "all_gather", **rest) -> Op:
    return Op(name, comm, members=members, **rest)


def shift(to: int, source: int) -> Op:
    return Op("shift", "c", sends=(to,), receives=(source,))


def waited(*ops: Op) -> list:
    """All launched, then all waited for."""
    return [*ops, *map(Wait, ops)]


def test_sends_that_cross_on_one_communicator_deadlock():
    outcome = simulate({0: waited(send(1), receive(1)), 1: waited(send(0), receive(0))})
    assert outcome.stuck == [
        "rank 0 waits for send on c, which needs rank 1 (in send)",
        "rank 1 waits for send on c, which needs rank 0 (in send)",
    ]
    check({0: waited(send(1, "up"), receive(1, "down")), 1: waited(send(0, "down"), receive(0, "up"))})


def test_a_batch_of_messages_is_one_operation():
    """A ring's shift goes as a batch; unbatched, every rank would send first."""
    check({r: waited(shift((r + 1) % 4, (r - 1) % 4)) for r in range(4)})
    assert len(simulate({r: waited(send((r + 1) % 4), receive((r - 1) % 4)) for r in range(4)}).stuck) == 4


def test_message_waits_behind_message_of_other_pair():
    programs = {0: waited(receive(2), send(1)), 1: waited(receive(0), send(2)), 2: waited(receive(1), send(0))}
    (line,) = (line for line in simulate(programs).stuck if line.startswith("rank 1"))
    assert line == "rank 1 waits for receive on c, which needs rank 0 (in receive)"


def test_operation_begins_after_preceding_compute():
    slow, fast = gather(0, 1, seconds=1), gather(0, 1, seconds=1)
    outcome = check({0: [Compute(5), slow, Wait(slow)], 1: [fast, Compute(2), Wait(fast), Compute(3)]})
    assert (slow.began, fast.began, fast.ended, outcome.makespan) == (5, 0, 6, 9)


def test_wait_delays_later_launches():
    first, second = receive(1, "a"), send(1, "b")
    outcome = simulate({0: [first, Wait(first), second], 1: [other := receive(0, "b"), Wait(other), send(0, "a")]})
    assert len(outcome.stuck) == 2
    first, second = receive(1, "a"), send(1, "b")
    check({0: [first, second, Wait(first)], 1: [other := receive(0, "b"), Wait(other), send(0, "a")]})


def test_operations_of_one_communicator_take_turns():
    ops = [[gather(0, 1, seconds=2), gather(0, 1, seconds=3)] for _ in range(2)]
    assert check({r: waited(*ops[r]) for r in range(2)}).makespan == 5
    ops = [[gather(0, 1, seconds=2), gather(0, 1, comm="d", seconds=3)] for _ in range(2)]
    assert check({r: waited(*ops[r]) for r in range(2)}).makespan == 3


def test_stuck_names_member_that_never_launches():
    outcome = simulate({0: waited(gather(0, 1, 2)), 1: waited(gather(0, 1, 2)), 2: []})
    assert [line.partition(", which ")[2] for line in outcome.stuck] == [
        "needs rank 2 (which has not launched its part)"
    ] * 2


def test_stuck_names_send_without_wait():
    assert simulate({0: [send(1)], 1: []}).stuck == [
        "rank 0 never ends send on c, which needs rank 1 (which has not launched its part)"
    ]


def test_check_refuses_ranks_that_disagree():
    with pytest.raises(LaunchOrderError, match="ranks disagree on a collective over c"):
        check({0: [gather(0, 1)], 1: [gather(0, 1, name="all_reduce")]})
    with pytest.raises(LaunchOrderError, match="has 8 bytes at one end, 4 at the other"):
        check({0: [send(1, nbytes=8)], 1: [receive(0, nbytes=4)]})


def test_thread_begins_at_its_start():
    """The thread of rank 0 cannot join the collective before the rank's receive, for which rank 1 first needs it."""
    message, other = receive(1, "a"), lambda: [*waited(gather(0, 1, comm="b")), *waited(send(0, "a"))]
    check({0: {0: [Start(1), *waited(message)], 1: waited(gather(0, 1, comm="b"))}, 1: other()})
    message = receive(1, "a")
    outcome = simulate({0: {0: [*waited(message), Start(1)], 1: waited(gather(0, 1, comm="b"))}, 1: other()})
    assert len(outcome.stuck) == 2
