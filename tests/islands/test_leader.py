"""Leaders of islands over real sockets: founding, refusals, losses, the known addresses, and their files."""

import json
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ndtrain.islands.epoch import Epoch, Member
from ndtrain.islands.leader import FILE, Leader, reachable_host, read_saved, write_saved
from ndtrain.islands.messages import Start
from ndtrain.islands.orders import Heal, Rules, Saved, Stop, Work
from ndtrain.islands.wire import Place, WireError
from tests.islands.runs import free_port
from tests.lib.helpers import wait_for

PLAN = {"model.hidden_size": "64"}


class Leaders:
    """Leaders of one run. The steps that they train are empty, and take some milliseconds."""

    def __init__(self, folder: Path, count: int, steps: int = 10**6, token: str = "secret"):
        self.folder, self.token = folder, token
        self.doors = tuple(f"127.0.0.1:{free_port()}" for _ in range(2))
        self.rules = Rules(8, steps, count, wait_s=60, beat_s=0.1, timeout_s=2)
        self.leaders: dict[str, Leader] = {}
        self.ends: dict[str, str] = {}
        self.lines: dict[str, list[str]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Leaders":
        return self

    def __exit__(self, *error) -> None:
        for name in list(self.leaders):
            self.stop(name)

    def start(self, name: str, folder: str = "", plan: dict | None = None, token: str | None = None) -> Leader:
        folder = folder or name
        (self.folder / folder).mkdir(exist_ok=True)
        place = Place("127.0.0.1", self.token if token is None else token, self.doors)
        start = Start(0, "seed", plan or PLAN)
        leader = Leader(name, 1, start, self.rules, place, [], self.folder / folder)
        self.leaders[folder], self.lines[folder] = leader, []
        threading.Thread(target=self._train, args=(folder, leader), daemon=True).start()
        return leader

    def stop(self, folder: str) -> None:
        """End an island as a kill does: it tells nobody, and nobody listens at its address any more."""
        self.leaders.pop(folder).close()

    def done(self, folder: str) -> int:
        return self.leaders[folder].island.done or 0

    def _train(self, folder: str, leader: Leader) -> None:
        while self.leaders.get(folder) is leader:
            order = leader.wait_for_order(0.2)
            self.lines[folder] += leader.messages()
            match order:
                case Stop(reason):
                    self.ends[folder] = reason
                    return
                case Heal(step, epoch, _):
                    leader.heal(step, epoch)
                case Work(step, epoch, _, _, _):
                    time.sleep(0.005)
                    leader.finish(step, leader.may_finish(step, epoch))


@pytest.fixture
def leaders(tmp_path):
    with Leaders(tmp_path, 2) as made:
        made.start("a")
        made.start("b")
        wait_for(lambda: min(made.done("a"), made.done("b")) > 3, "the first steps")
        yield made


def test_leader_of_a_lost_island_is_noticed_and_it_returns(leaders):
    began = time.monotonic()
    leaders.stop("b")
    wait_for(lambda: leaders.leaders["a"].island.epoch.names == ("a",), "the others to go on")
    assert time.monotonic() - began < leaders.rules.timeout_s  # the refused connection is the proof
    at = leaders.done("a")
    wait_for(lambda: leaders.done("a") > at + 3, "steps of one island")
    leaders.start("b")
    wait_for(lambda: leaders.done("b") > at, "the island that has returned")
    assert leaders.leaders["a"].island.epoch.names == ("a", "b")


def test_leader_at_the_first_address_lost_another_one_listens_there(leaders):
    leaders.stop("a")
    wait_for(lambda: leaders.doors[0] in leaders.leaders["b"]._doors, "the address to be taken over")
    leaders.start("c")
    wait_for(lambda: leaders.done("c") > 0, "a new island that knows only this address")


@pytest.mark.parametrize(
    ("name", "plan", "why"),
    [
        ("a", PLAN, "the name a is taken by another island: give another islands.name"),
        ("c", {"model.hidden_size": "128"}, "has model.hidden_size=64, this one has 128: islands train one model"),
        ("c", PLAN | {"optim.lr": "1"}, "has optim.lr=nothing, this one has 1"),
    ],
)
def test_leader_that_does_not_fit_is_refused_with_the_reason(leaders, name, plan, why):
    leaders.start(name, folder="new", plan=plan)
    wait_for(lambda: "new" in leaders.ends, "the refusal")
    assert why in leaders.ends["new"] and "\n" not in leaders.ends["new"]
    assert "a" not in leaders.ends and leaders.leaders["a"].island.epoch.names in (("a", "b"), ("b", "a"))


@pytest.mark.parametrize("token", ["another", ""])
def test_leader_with_another_token_is_told_and_never_becomes_a_member(leaders, token):
    leaders.start("c", token=token)
    wait_for(lambda: any("token" in line for line in leaders.lines["c"]), "the line about the token")
    assert leaders.leaders["c"].island.epoch is None
    assert set(leaders.leaders["a"].island.epoch.names) == {"a", "b"}


def test_leader_whose_run_is_finished_stops(tmp_path):
    with Leaders(tmp_path, 2, steps=5) as leaders:
        leaders.start("a")
        leaders.start("b")
        wait_for(lambda: len(leaders.ends) == 2, "the end")
        assert leaders.ends == {"a": "", "b": ""} and leaders.done("a") == leaders.done("b") == 5


EPOCH = Epoch(3, (Member("a", "x", "host:1", 2, 1.5), Member("b", "y", "host:2")), 7, (6, 2), ("b",), ("a",))
SAVED = [Saved(), Saved(EPOCH), Saved(EPOCH, (4, "b"), (3, "a"), EPOCH)]


@pytest.mark.parametrize("saved", SAVED)
def test_read_saved_returns_what_write_saved_has_written(tmp_path, saved):
    assert read_saved(tmp_path / FILE) is None
    write_saved(tmp_path / FILE, saved)
    assert read_saved(tmp_path / FILE) == saved
    assert [p.name for p in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"epoch": 3}', "[" * 100_000, '{"epoch": null, "promised": 1}'])
def test_read_saved_damaged_file_raises_value_error(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ValueError):
        read_saved(tmp_path / FILE)


def test_read_saved_of_every_cut_raises_value_error(tmp_path):
    write_saved(tmp_path / FILE, SAVED[2])
    whole = (tmp_path / FILE).read_text()
    json.loads(whole)
    for end in range(0, len(whole), 7):
        (tmp_path / FILE).write_text(whole[:end])
        with pytest.raises(ValueError):
            read_saved(tmp_path / FILE)


def test_reachable_host_of_loopback_is_loopback():
    assert reachable_host("127.0.0.1:29600") == "127.0.0.1"
    with pytest.raises(WireError):
        reachable_host("no port")
