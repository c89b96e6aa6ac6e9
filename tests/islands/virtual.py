"""A cluster of virtual islands with a virtual clock: the protocol under losses, partitions, delays and restarts.

Everything follows from a seed, so a failing run can be repeated. What the ranks of an island do is modelled: computing
rows, offering and reading gradients, healing. `Violation` is raised as soon as a promise of the protocol is broken.
"""

import heapq
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from ndtrain.islands.epoch import Epoch, Member
from ndtrain.islands.island import LOST_WEIGHTS, Island
from ndtrain.islands.messages import Start, from_json, to_json
from ndtrain.islands.orders import Cancel, CatchUp, Heal, Rules, Save, Saved, Send, Stop, Work

DOORS = ("door:1", "door:2")
LONGEST_S = 3000.0  # of virtual time, until a run counts as a hang


def digest(before: int, parts: tuple) -> int:
    """Return a number for a state: the one before, and what was added to it. It is the same in every process."""
    return zlib.crc32(repr((before, [(name, sorted(rows)) for name, rows in parts])).encode())


class Violation(AssertionError):
    """A broken promise of the protocol."""


_NOTHING = Cancel(0)  # epochs are numbered from 1


@dataclass
class Rank:
    """What the ranks of an island do now."""

    kind: str = "idle"  # compute, read, heal, idle
    task: int = 0  # a number of the current work; events of older work are ignored
    order: object = None
    cancelled: Cancel = _NOTHING

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled.covers(self.order.epoch, self.order.step)


@dataclass
class Process:
    """A process of an island, from its start to its end."""

    member: Member
    island: Island
    rank: Rank = field(default_factory=Rank)
    computed: tuple[int, frozenset[int]] = (0, frozenset())  # the rows of a step that are computed
    grads: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)  # (step, epoch) -> offered rows
    history: dict[int, int] = field(default_factory=dict)  # step -> hash of everything up to it
    sums: dict[int, tuple] = field(default_factory=dict)  # step -> the contributions of its sum
    stopped: bool = False


class Cluster:
    """Virtual islands.

    Args:
        seed: of all random choices.
        islands: their number.
        steps: the last step.
        mutate: changes an island when it is created, to test that a fault is found.
    """

    def __init__(
        self, seed: int, islands: int, steps: int = 30, mutate: Callable[[Island], None] = lambda island: None
    ):
        self.random, self.now, self.mutate = Random(seed), 0.0, mutate
        self.names = [f"i{k}" for k in range(islands)]
        grains = [self.random.choice((1, 1, 2)) for _ in self.names]
        self.grain = dict(zip(self.names, grains, strict=True))
        self.rules = Rules(batch=4 * islands, last=steps, count=islands, wait_s=20.0, beat_s=0.5, timeout_s=4.0)
        self.disk: dict[str, Saved] = {}
        self.checkpoints: dict[str, tuple[int, dict[int, int]]] = {}
        self.processes: dict[str, Process] = {}  # by name; the running ones
        self.by_address: dict[str, Process] = {}
        self.addresses_ended: dict[str, bool] = {}  # address -> True if connecting to it is refused
        self.cut: set[frozenset[str]] = set()  # pairs of names that cannot reach each other
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self.lives, self.events = 0, 0, 0
        self.epochs: dict[int, Epoch] = {}
        self.decided_at: dict[int, float] = {}
        self.after: dict[tuple[str, int], int] = {}  # steps that a process finished in a replaced epoch
        self.hashes: dict[tuple[int, int], int] = {}  # (epoch, step) -> hash of the state
        self.over: dict[str, str] = {}  # name -> why its process stopped before the last step

    # ----------------------------------------------------------------------------------------------------------- events

    def later(self, delay: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, action))

    def run(self, until: Callable[[], bool]) -> None:
        """Run until a condition holds.

        Raises:
            Violation: it does not hold within `LONGEST_S`.
        """
        while not until():
            if not self._events or self.now > LONGEST_S:
                raise Violation(f"hang at {self.now:.1f} s: {self.describe()}")
            self.now, _, action = heapq.heappop(self._events)
            self.events += 1
            action()

    def describe(self) -> str:
        """Return the state of all islands as text."""
        states = []
        for name in self.names:
            p = self.processes.get(name)
            states.append(
                f"{name}: " + (f"epoch {p.island.number} done {p.island.done} {p.rank.kind}" if p else "dead")
            )
        return "; ".join(states)

    # ---------------------------------------------------------------------------------------------------------- faults

    def start(self, name: str) -> None:
        """Start a process of an island, unless one is running."""
        if name in self.processes:
            return
        self.lives += 1
        step, history = self.checkpoints.get(name, (0, {0: 0}))
        member = Member(
            name,
            f"{name}#{self.lives}",
            f"{name}:{self.lives}",
            self.grain[name],
            self.random.choice((0.05, 0.5, 1.0, 2.0)),
        )
        founder = name == self.names[0]
        start = Start(step, f"hash {history[step]}", {"model": "tiny"})
        saved = self.disk.get(name)
        doors = [DOORS[0]] if founder else DOORS
        island = Island(member, start, self.rules, saved, founder, doors, self.now, Random(self.random.random()))
        self.mutate(island)
        process = Process(member, island, history=dict(history))
        self.processes[name] = self.by_address[member.address] = process
        self.later(0, lambda: self.tick(process))

    def kill(self, name: str, host: bool = False) -> None:
        """End a process. Its peers find out, unless its host is lost too."""
        process = self.processes.pop(name)
        del self.by_address[process.member.address]
        if not host:
            for other in self.names:
                self.later(
                    self.random.uniform(0, 0.05), lambda other=other: self.find_ended(other, process.member.address)
                )

    def find_ended(self, name: str, address: str) -> None:
        """Tell an island that an address refuses connections, as soon as it can reach it."""
        if frozenset((name, address.split(":")[0])) in self.cut:
            self.later(1.0, lambda: self.find_ended(name, address))
        elif name in self.processes:
            process = self.processes[name]
            process.island.process_ended(address, self.now)
            self.carry_out(process)

    def partition(self, side: set[str]) -> None:
        """Cut all links between one side and the others."""
        self.cut = {frozenset((a, b)) for a in side for b in self.names if b not in side}

    def mend(self) -> None:
        """Mend all links."""
        self.cut = set()

    def is_running(self, process: Process) -> bool:
        return self.by_address.get(process.member.address) is process

    def reaches(self, a: Process, b: Process) -> bool:
        return self.is_running(a) and self.is_running(b) and frozenset((a.member.name, b.member.name)) not in self.cut

    # --------------------------------------------------------------------------------------------------------- messages

    def tick(self, process: Process) -> None:
        if self.is_running(process):
            process.island.tick(self.now)
            self.carry_out(process)
            self.later(self.random.uniform(0.2, 0.3), lambda: self.tick(process))

    def carry_out(self, process: Process) -> None:
        """Carry out the effects of an island, then let its ranks go on."""
        effects = process.island.effects
        while effects:
            match effects.popleft():
                case Send(address, message):
                    self.send(process, address, message)
                case Save(saved):
                    self.disk[process.member.name] = saved
                case Cancel() as given_up:
                    process.rank.cancelled = given_up
        self.check_epoch(process.island.epoch)
        self.go_on(process)

    def send(self, source: Process, address: str, message) -> None:
        if address.startswith("door"):
            holder = self.names[DOORS.index(address)] if DOORS.index(address) < len(self.names) else ""
            target = self.processes.get(holder)
        else:
            target = self.by_address.get(address)
        if target is None or target is source or not self.reaches(source, target):
            return
        if self.random.random() < 0.05:  # all of them would take most of the time
            message = from_json(json.loads(json.dumps(to_json(message))))
        sender = source.island.me

        def deliver() -> None:
            if self.reaches(source, target) or (self.is_running(target) and not self.is_running(source)):
                target.island.receive(sender, message, self.now)
                self.carry_out(target)

        self.later(self.random.uniform(0.001, 0.02) * self.random.choice((1, 1, 1, 10)), deliver)

    # ------------------------------------------------------------------------------------------------------------ ranks

    def go_on(self, process: Process) -> None:
        """Begin the next work of an island whose ranks are idle."""
        if process.rank.kind != "idle" or process.stopped or not self.is_running(process):
            return
        order = process.island.order()
        if order is None:
            return
        rank = process.rank
        rank.task, rank.order = rank.task + 1, order
        task = rank.task
        match order:
            case Stop(reason):
                process.stopped = True
                if reason == LOST_WEIGHTS:
                    self.later(0.1, lambda: self.start_again(process))
                elif reason or (process.island.done or 0) < self.rules.last:
                    self.over[process.member.name] = reason
                    self.later(0.1, lambda: self.is_running(process) and self.kill(process.member.name))
            case Work(step, _, rows, _, _):
                wanted = frozenset(r for start, stop in rows for r in range(start, stop))
                have = process.computed[1] if process.computed[0] == step else frozenset()
                have = have if have <= wanted else frozenset()
                rank.kind = "compute"
                seconds = 0.02 + len(wanted - have) / process.member.speed * self.random.uniform(0.03, 0.06)
                self.later(seconds, lambda: self.offer(process, task, step, wanted))
            case CatchUp(step, _, sources):
                rank.kind = "read"
                self.later(self.random.uniform(0.005, 0.05), lambda: self.catch_up(process, task, step, sources))
            case Heal(step, epoch, sources):
                rank.kind = "heal"
                if sources:
                    process.island.begin_heal()
                self.later(0.005, lambda: self.begin_heal(process, task, step, epoch, sources))

    def start_again(self, process: Process) -> None:
        """End a process that has failed, and start its island again, as a launcher does."""
        if self.is_running(process):
            self.kill(process.member.name)
            self.start(process.member.name)

    def is_current(self, process: Process, task: int) -> bool:
        return self.is_running(process) and process.rank.task == task

    def offer(self, process: Process, task: int, step: int, rows: frozenset[int]) -> None:
        if not self.is_current(process, task):
            return
        process.computed = (step, rows)
        order = process.rank.order
        process.grads = {key: held for key, held in process.grads.items() if key[0] >= step - 1}
        process.grads[step, order.epoch] = rows
        process.island.computed = step
        process.rank.kind = "read"
        left = {(number, s.life) for s in order.sharers for number in range(2)}
        taken: dict[str, frozenset[int]] = {}
        self.later(0.001, lambda: self.read(process, task, left, taken))

    def read(self, process: Process, task: int, left: set[tuple[int, str]], taken: dict[str, frozenset[int]]) -> None:
        """Read what the other sharers offer, with two ranks. Rank 0 asks the leader when it has everything."""
        if not self.is_current(process, task):
            return
        order, leader = process.rank.order, process.island
        if process.rank.is_cancelled and leader._exchanging is None:
            self.end_read(process, order.step, False)
            return
        for sharer in order.sharers:
            other = self.by_address.get(sharer.address)
            held = other and other.grads.get((order.step, order.epoch))
            if held is None or not (other is process or self.reaches(process, other)):
                continue
            for number in range(2):
                if self.random.random() < 0.7:
                    left.discard((number, sharer.life))
                    taken[sharer.name] = held
        if not any(number == 0 for number, _ in left) and leader._exchanging is None:
            verdict = leader.may_finish(order.step, order.epoch)
            if verdict is False:
                self.end_read(process, order.step, False)
                return
        if leader._exchanging is not None and (process.rank.is_cancelled or not left):
            self.later(0.002, lambda: self.end_exchange(process, task, not left, taken))
            return
        self.later(self.random.uniform(0.003, 0.02), lambda: self.read(process, task, left, taken))

    def end_exchange(self, process: Process, task: int, ok: bool, taken: dict[str, frozenset[int]]) -> None:
        if self.is_current(process, task):
            order = process.rank.order
            if ok:
                parts = tuple((s.name, taken[s.name]) for s in order.sharers)
                self.record(process, order.step, order.epoch, parts)
            self.end_read(process, order.step, ok)

    def end_read(self, process: Process, step: int, ok: bool) -> None:
        process.rank.kind = "idle"
        process.island.finish(step, ok, self.now)
        self.carry_out(process)

    def record(self, process: Process, step: int, epoch: int, parts: tuple) -> None:
        """Check a finished step, and add it to the history of the process."""
        rows = sorted(r for _, held in parts for r in held if r < self.rules.batch)
        if rows != list(range(self.rules.batch)):
            raise Violation(f"{process.member.life} step {step} epoch {epoch}: rows {rows}")
        process.sums = {step: parts}
        process.history[step] = digest(process.history[step - 1], parts)
        if self.random.random() < 0.2:
            self.checkpoints[process.member.name] = (step, {step: process.history[step]})
        self.check_hash(process, epoch, step)
        if any(
            number > epoch and e.holders and self.decided_at[number] < self.now for number, e in self.epochs.items()
        ):
            key = (process.member.life, epoch)
            self.after[key] = self.after.get(key, 0) + 1
            if self.after[key] > 1:
                raise Violation(f"{process.member.life} goes on in epoch {epoch}, which has been replaced")

    def catch_up(self, process: Process, task: int, step: int, sources: tuple[Member, ...]) -> None:
        if not self.is_current(process, task):
            return
        found = [o for s in sources if (o := self.by_address.get(s.address)) and self.reaches(process, o)]
        order = process.island.order()
        if order != process.rank.order:
            process.rank.kind = "idle"
            self.go_on(process)
        elif not found:
            self.later(0.05, lambda: self.catch_up(process, task, step, sources))
        else:
            source = self.random.choice(found)
            if step not in source.sums:
                raise Violation(f"{source.member.life} does not have the sum of step {step} any more")
            process.sums = {step: source.sums[step]}
            process.history[step] = digest(process.history[step - 1], source.sums[step])
            if process.history[step] != source.history[step]:
                raise Violation(f"{process.member.life} differs from {source.member.life} after step {step}")
            process.island.finish(step, True, self.now)
            process.rank.kind = "idle"
            self.carry_out(process)

    def begin_heal(self, process: Process, task: int, step: int, epoch: int, sources: tuple[Member, ...]) -> None:
        if not self.is_current(process, task):
            return
        if process.island.order() != process.rank.order:
            process.rank.kind = "idle"
            self.go_on(process)
            return
        found = [o for s in sources if (o := self.by_address.get(s.address)) and self.reaches(process, o)]
        found = [o for o in found if o.island.done is not None and o.island.done >= step and o.rank.kind != "heal"]
        if not found:
            self.later(0.05, lambda: self.begin_heal(process, task, step, epoch, sources))
            return
        source = self.random.choice(found)
        if source.island.done != step and source.island.number > epoch:
            self.later(0.05, lambda: self.begin_heal(process, task, step, epoch, sources))  # it answers: gone
            return
        if source.island.done != step:
            raise Violation(f"{source.member.life} has left step {step} while {process.member.life} heals")
        self.later(self.random.uniform(0.01, 1.0), lambda: self.end_heal(process, task, step, epoch, source))

    def end_heal(self, process: Process, task: int, step: int, epoch: int, source: Process) -> None:
        if not self.is_current(process, task):
            return
        process.rank.kind = "idle"
        if self.reaches(process, source) and source.island.done == step:
            process.history = dict(source.history)
            process.sums = {}
            process.island.heal(step, epoch, self.now)
        elif self.reaches(process, source) and source.island.number == epoch:
            raise Violation(f"{source.member.life} has changed its weights while {process.member.life} read them")
        self.carry_out(process)

    # ----------------------------------------------------------------------------------------------------------- checks

    def check_epoch(self, epoch: Epoch | None) -> None:
        if epoch is None:
            return
        if self.epochs.setdefault(epoch.number, epoch) != epoch:
            raise Violation(f"two epochs with number {epoch.number}: {epoch} and {self.epochs[epoch.number]}")
        self.decided_at.setdefault(epoch.number, self.now)

    def check_hash(self, process: Process, epoch: int, step: int) -> None:
        mine = process.history[step]
        if self.hashes.setdefault((epoch, step), mine) != mine:
            raise Violation(f"{process.member.life} differs from others of epoch {epoch} after step {step}")


def run(
    seed: int, islands: int, faults: int, steps: int = 30, mutate: Callable[[Island], None] = lambda i: None
) -> Cluster:
    """Run islands through random faults, mend everything, and check that all of them finish.

    Raises:
        Violation: a promise of the protocol is broken.
    """
    cluster = Cluster(seed, islands, steps, mutate)
    random = Random(~seed)
    for name in cluster.names:
        cluster.later(random.uniform(0, 5), lambda name=name: cluster.start(name))
    at = 0.0
    for _ in range(faults):
        at += random.expovariate(1 / 4) + 0.05
        cluster.later(at, lambda: inject(cluster, random))
    cluster.later(at + 10, lambda: restore(cluster))
    ended = at + 10

    def is_over(name: str) -> bool:
        process = cluster.processes.get(name)
        if process and not process.stopped:
            no_door = not any(door in cluster.processes for door in cluster.names[: len(DOORS)])
            return no_door and process.island.done is None  # it waits until somebody listens there
        return process is not None or "finished" in cluster.over.get(name, "")

    done = lambda: cluster.now > ended and all(is_over(name) for name in cluster.names)
    cluster.run(done)
    return cluster


def inject(cluster: Cluster, random: Random) -> None:
    """Let a random fault happen."""
    running = [name for name in cluster.names if name in cluster.processes and not cluster.processes[name].stopped]
    dead = [name for name in cluster.names if name not in cluster.processes]
    kind = random.choice(("kill", "kill", "kill", "host", "revive", "revive", "revive", "cut", "mend", "mend", "leave"))
    if kind in ("kill", "host") and running:
        cluster.kill(random.choice(running), host=kind == "host")
    elif kind == "revive" and dead:
        cluster.start(random.choice(dead))
    elif kind == "cut":
        cluster.partition(set(random.sample(cluster.names, random.randint(1, max(1, len(cluster.names) - 1)))))
    elif kind == "mend":
        cluster.mend()
    elif kind == "leave" and running:
        process = cluster.processes[random.choice(running)]
        process.island.leave(cluster.now)
        cluster.carry_out(process)


def restore(cluster: Cluster) -> None:
    """End all faults: mend the links and start everything that does not run."""
    cluster.mend()
    for name in cluster.names:
        process = cluster.processes.get(name)
        if process and (process.stopped or process.island.leaving) and (process.island.done or 0) < cluster.rules.last:
            cluster.kill(name)
        cluster.start(name)
