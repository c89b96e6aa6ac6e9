"""Processes on several hosts share work by claims in a folder; the time of a claim's end is on a clock of the test."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ndtrain.data.claims import Claims, living_member, members
from ndtrain.device.heartbeat import DEAD_S, set_beat
from ndtrain.device.process_owner import Owner
from tests.lib.clock import Clock


def process(host: str, number: int) -> Owner:
    """A process on another host."""
    token = f"{number:032x}"
    return replace(Owner.this_process(), host=host, machine=f"boot of {host}", pid=1, started=1, token=token)


def left_by(folder: Path, owner: Owner, *names: str) -> Path:
    """Claims as a killed process leaves them. Returns the file of the member."""
    (folder / "members").mkdir(exist_ok=True)
    file = folder / "members" / f"{owner.token}.json"
    file.write_text(json.dumps(asdict(owner)))
    set_beat(file, 0)
    for name in names:
        (folder / f"{name}.claim").write_text(owner.token)
    return file


def test_claim_of_live_process_is_respected_until_released(tmp_path):
    with Claims(tmp_path) as ours, Claims(tmp_path) as theirs:
        assert ours.take("a") and ours.take("a") and theirs.take("b")
        assert not theirs.take("a") and not ours.take("b")
        ours.release("a")
        assert theirs.take("a")
        ours.release("a")  # it is not ours any more
        assert not ours.take("a")
    assert not list(tmp_path.glob("*.claim")) and not members(tmp_path)


def test_claim_of_ended_process_on_this_host_is_free_at_once(tmp_path):
    left_by(tmp_path, replace(Owner.this_process(), started=1, token="f" * 32), "a")
    with Claims(tmp_path) as ours:
        assert ours.take("a")


def test_claim_of_process_on_other_host_is_free_after_dead_s(tmp_path):
    left_by(tmp_path, process("n1", 1), "a", "b")
    clock = Clock()
    with Claims(tmp_path, clock=clock) as ours:
        for _ in range(int(DEAD_S)):
            assert not ours.take("a")
            clock.sleep(1)
        assert ours.take("a") and ours.take("b")


def test_claim_of_process_whose_heart_beats_stays(tmp_path):
    file = left_by(tmp_path, process("n1", 1), "a")
    clock = Clock(lambda now: set_beat(file, int(now / 50)))
    with Claims(tmp_path, clock=clock) as ours:
        for _ in range(300):
            assert not ours.take("a")
            clock.sleep(1)


def test_observer_that_looks_rarely_takes_no_claim(tmp_path):
    """Between two looks the heart may have stopped and begun again."""
    left_by(tmp_path, process("n1", 1), "a")
    clock = Clock()
    with Claims(tmp_path, clock=clock) as ours:
        for _ in range(10):
            assert not ours.take("a")
            clock.sleep(DEAD_S)


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "0" * 31, "f" * 10_000])
def test_damaged_claim_is_free_after_dead_s(text, tmp_path):
    """An empty one may just be written."""
    (tmp_path / "a.claim").write_text(text)
    clock = Clock()
    with Claims(tmp_path, clock=clock) as ours:
        for _ in range(int(DEAD_S)):
            assert not ours.take("a")
            clock.sleep(1)
        assert ours.take("a")


def test_living_member_is_found_at_once_on_this_host_and_by_its_heartbeat_on_others(tmp_path):
    assert living_member(tmp_path) is None
    with Claims(tmp_path):
        assert living_member(tmp_path, Clock(), None) == members(tmp_path)[0]
    file = left_by(tmp_path, process("n1", 1))
    clock = Clock()
    assert living_member(tmp_path, clock, clock.sleep) is None and DEAD_S <= clock.now <= DEAD_S + 1
    beating = Clock(lambda now: set_beat(file, 1) if now > DEAD_S - 2 else None)
    assert living_member(tmp_path, beating, beating.sleep).host == "n1"
