"""exit.json is true at any moment, also on a full disk, and its readers know what `running` means."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from ndtrain.device.process_owner import LAUNCH
from ndtrain.run import exit_status, folder_lock, launch_query
from tests.lib.disks import tmpfs
from tests.lib.helpers import checkpoint_of


@pytest.fixture
def full_disk(tmp_path) -> Path:
    """A run folder that has begun, on a disk that has no byte left."""
    with tmpfs(tmp_path / "run") as mount:
        folder = mount("size=16k")
        exit_status.begin(folder)
        fill(folder)
        yield folder


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


@pytest.mark.parametrize("why", ["finished", "stopped", "failed", "died"])
def test_exit_json_is_written_on_full_disk(why, full_disk):
    exit_status.write(full_disk, why, step=4)
    ending = exit_status.read(full_disk)
    assert (ending.why, ending.code, ending.step) == (why, exit_status.CODES[why], 4)
    assert [p.name for p in sorted(full_disk.iterdir())] == ["exit.json", "filler"]


def test_a_long_error_on_a_full_disk_keeps_its_last_lines(full_disk):
    exit_status.write(full_disk, "failed", error='File "a"\n' * 5000 + "ValueError: the cause")
    ending = exit_status.read(full_disk)
    assert ending.why == "failed" and ending.error.endswith("ValueError: the cause") and len(ending.error) > 2000
    assert ending.error.startswith("[...]") and (full_disk / "exit.json").stat().st_size == exit_status.SIZE


def test_a_long_error_is_whole_where_the_disk_has_room(tmp_path):
    exit_status.write(tmp_path, "failed", error="x" * 20_000)
    assert len(exit_status.read(tmp_path).error) == 20_000


def test_begin_fails_if_exit_json_cannot_be_reserved(tmp_path):
    with tmpfs(tmp_path / "run") as mount:
        folder = mount("size=4k")
        fill(folder)
        with pytest.raises(OSError, match="No space left"):
            exit_status.begin(folder)
        assert [p.name for p in folder.iterdir()] == ["filler"]


@pytest.mark.parametrize("at", [300, 512])
def test_torn_exit_json_is_detected(at, tmp_path):
    """The file has the first bytes of one state and the rest of another state."""
    files = []
    for error in ("a" * 600, "b" * 600):
        exit_status.write(tmp_path, "failed", error=error)
        files.append((tmp_path / "exit.json").read_bytes())
    torn = files[0][:at] + files[1][at:]
    assert json.loads(torn)["why"] == "failed", "a parser alone would not notice"
    (tmp_path / "exit.json").write_bytes(torn)
    assert exit_status.read(tmp_path) is None


def test_exit_json_is_plain_json(tmp_path):
    exit_status.begin(tmp_path)
    content = json.loads((tmp_path / "exit.json").read_text())
    assert (content["why"], content["code"], content["requeue"]) == ("running", 75, True)


def test_exit_json_names_newest_checkpoint(tmp_path):
    for step in (8, 400):
        checkpoint_of(tmp_path, step).mkdir(parents=True)
    exit_status.write(tmp_path, "hang", step=410)
    assert exit_status.read(tmp_path).checkpoint == str(checkpoint_of(tmp_path, 400))


def test_write_first_keeps_first_error(tmp_path):
    exit_status.begin(tmp_path)
    exit_status.write_first(tmp_path, "failed", error="the cause")
    exit_status.write_first(tmp_path, "died", error="a peer has left")
    assert exit_status.read(tmp_path).error == "the cause"


def test_running_without_a_process_means_killed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(LAUNCH, "n0-1-2")
    exit_status.begin(tmp_path)
    assert launch_query.ended(tmp_path, 0) == 75
    assert "the run was killed" in capsys.readouterr().err


def test_launch_query_waits_for_ranks_that_outlive_torchrun(tmp_path, capsys):
    claim = folder_lock.acquire(tmp_path)
    exit_status.begin(tmp_path)

    def end() -> None:
        time.sleep(3 * launch_query.POLL_S)
        exit_status.write(tmp_path, "died", rank=0, error="torchrun was killed")
        claim.release()

    rank = threading.Thread(target=end)
    rank.start()
    assert launch_query.ended(tmp_path, 1) == 75
    assert not rank.is_alive() or claim.is_lost() is False
    rank.join()
    said = capsys.readouterr().err
    assert "torchrun has ended before its ranks" in said and "rank 0 ended this run: torchrun was killed" in said


def test_exit_json_of_older_version_is_read(tmp_path):
    (tmp_path / "exit.json").write_text('{"why": "stopped", "code": 85}')
    assert exit_status.read(tmp_path).code == 85


@pytest.mark.parametrize("content", [b"", b"[1]", b"null", b"\xff", b"[" * 200_000, b" " * (exit_status.LONGEST + 1)])
def test_damaged_exit_json_reads_as_none(content, tmp_path):
    (tmp_path / "exit.json").write_bytes(content)
    assert exit_status.read(tmp_path) is None
    assert os.listdir(tmp_path) == ["exit.json"]
