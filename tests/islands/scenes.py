"""Scenes: a virtual cluster whose faults a test puts in by hand or in storms, and that notes what its islands say."""

from dataclasses import replace
from random import Random

from ndtrain.islands.epoch import Member
from ndtrain.islands.island import Island
from ndtrain.islands.messages import Start
from ndtrain.islands.orders import Tell
from tests.islands.virtual import Cluster, Process, Violation, restore


class Scene(Cluster):
    """A cluster that notes what its islands say, and which steps they finish.

    Attributes:
        lines: name -> the lines for the user.
        finished: life -> the steps that the process has finished itself, in order.
        trace: a text for each time an island has acted.
    """

    def __init__(self, seed: int, islands: int, steps: int = 30):
        super().__init__(seed, islands, steps)
        self.lines: dict[str, list[str]] = {name: [] for name in self.names}
        self.finished: dict[str, list[int]] = {}
        self.trace: list[str] = []

    def carry_out(self, process: Process) -> None:
        effects = process.island.effects
        self.lines[process.member.name] += [e.text for e in effects if isinstance(e, Tell)]
        self.trace.append(f"{self.now!r} {process.member.life} {list(effects)}")
        super().carry_out(process)

    def record(self, process: Process, step: int, epoch: int, parts: tuple) -> None:
        self.finished.setdefault(process.member.life, []).append(step)
        super().record(process, step, epoch, parts)

    # ---------------------------------------------------------------------------------------------------------- actions

    def start_all(self) -> None:
        for name in self.names:
            self.start(name)

    def island(self, name: str) -> Island:
        return self.processes[name].island

    def done(self, name: str) -> int:
        """Return the number of steps that an island has finished, 0 without a process."""
        return (self.processes[name].island.done or 0) if name in self.processes else 0

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        self.later(seconds, lambda: None)
        self.run(lambda: self.now >= end)

    def run_to_step(self, step: int, *names: str) -> None:
        self.run(lambda: all(self.done(name) >= step for name in names or self.names))

    def run_to_end(self, *names: str) -> None:
        """Run until islands have finished the last step, with the same state."""
        names = names or tuple(self.names)
        self.run_to_step(self.rules.last, *names)
        ends = {self.processes[name].history[self.rules.last] for name in names}
        assert len(ends) == 1, self.describe()

    def leave(self, name: str) -> None:
        self.island(name).leave(self.now)
        self.carry_out(self.processes[name])

    def begin_at(self, name: str, step: int, history: dict[int, int]) -> None:
        """Give an island the checkpoint after a step."""
        self.checkpoints[name] = (step, {step: history[step]})

    def start_twin(self, name: str) -> Process:
        """Start another island that has been given the name of a running one, on a disk of its own."""
        member = Member(name, f"{name}#twin", f"{name}:twin")
        start = Start(0, "hash 0", {"model": "tiny"})
        island = Island(member, start, self.rules, None, False, ["door:1", "door:2"], self.now, Random(1))
        twin = Process(member, island, history={0: 0})
        self.by_address[member.address] = twin
        self.later(0, lambda: self.tick_twin(twin))
        return twin

    def tick_twin(self, twin: Process) -> None:
        """Let a twin act. Its disk and its name's entry among the processes are not touched."""
        saved = dict(self.disk)
        self.tick(twin)
        self.disk = saved


def is_training(cluster: Cluster, name: str) -> bool:
    """Return True if an island can be killed now."""
    return name in cluster.processes and not cluster.processes[name].stopped


def storm(seed: int, islands: int, bursts: int, steps: int = 60, cluster: type[Cluster] = Scene) -> Cluster:
    """Run islands through bursts of faults that come close together, mend everything, and check that all end.

    A burst cuts the network, kills up to two islands within a second and restarts them soon, so that decisions are
    interrupted at every point.

    Raises:
        Violation: a promise of the protocol is broken.
    """
    made, random = cluster(seed, islands, steps), Random(~seed)
    made.rules = replace(made.rules, wait_s=5.0)
    for name in made.names:
        made.later(random.uniform(0, 1), lambda name=name: made.start(name))
    at = 1.5
    for _ in range(bursts):
        at += random.choice((0.3, 1.0, 3.0, 6.0)) * random.random()
        made.later(at, lambda: burst(made, random))
    made.later(at + 6, lambda: restore(made))
    over = lambda name: name in made.processes and made.processes[name].stopped
    told = lambda name: "finished" in made.over.get(name, "")
    try:
        made.run(lambda: made.now > at + 6 and all(over(name) or told(name) for name in made.names))
    except Violation as e:
        if not e.args[0].startswith("hang") or any(door in made.processes for door in made.names[:2]):
            raise
    return made


def burst(cluster: Cluster, random: Random) -> None:
    """Let faults happen within a second."""
    kind = random.choice(("cut", "cut", "kill", "kill", "kill", "join", "leave"))
    names = random.sample(cluster.names, min(len(cluster.names), random.choice((1, 1, 2))))
    if kind == "cut":
        side = set(random.sample(cluster.names, random.randint(1, max(1, len(cluster.names) - 1))))
        cluster.partition(side)
        cluster.later(random.choice((0.2, 2.0, 8.0)) * random.random(), cluster.mend)
    for name in names if kind in ("cut", "kill", "join") else ():
        if kind != "cut" or random.random() < 0.3:
            host = random.random() < 0.3
            cluster.later(random.random(), lambda name=name, host=host: kill_if_running(cluster, name, host))
            cluster.later(1 + random.choice((0.1, 1.0, 6.0)) * random.random(), lambda name=name: cluster.start(name))
    if kind == "leave" and is_training(cluster, names[0]):
        process = cluster.processes[names[0]]
        process.island.leave(cluster.now)
        cluster.carry_out(process)
        cluster.later(5 * random.random(), lambda: cluster.start(names[0]))


def kill_if_running(cluster: Cluster, name: str, host: bool) -> None:
    if is_training(cluster, name):
        cluster.kill(name, host)


def phase_of(process: Process) -> str:
    """Return what an island does in a step."""
    if process.island._exchanging is not None:
        return "may finish"
    if process.rank.kind == "read" and (process.rank.order.step, process.rank.order.epoch) in process.grads:
        return "offered"
    return process.rank.kind


def roles_of(process: Process) -> set[str]:
    """Return the parts that an island has in the protocol now."""
    island = process.island
    roles = {
        "proposer": island._proposal is not None,
        "accepter": island.saved.accepted is not None,
        "frozen": island._limit is not None,
        "leaver": island.leaving,
        "learner": island.epoch is not None and island.done is None and island.epoch.has_life(island.me.life),
        "sharer": island.done is not None,
    }
    return {role for role, has in roles.items() if has}


def play(point: int, victim: str, cluster: type[Scene] = Scene) -> tuple[Scene, set[str]]:
    """Let i2 join i0 and i1, let i1 leave, and kill an island at an event. Return what it did at that moment.

    Raises:
        Violation: a promise of the protocol is broken.
    """
    scene, seen = cluster(0, 3, 25), set()
    scene.rules = replace(scene.rules, count=2)
    scene.start("i0")
    scene.start("i1")
    scene.later(2.0, lambda: scene.start("i2"))
    scene.later(4.0, lambda: "i1" in scene.processes and scene.leave("i1"))

    def over() -> bool:
        if scene.events == point and victim in scene.processes and not seen:
            process = scene.processes[victim]
            seen.update(roles_of(process), {phase_of(process)})
            scene.kill(victim)
            scene.later(1.0, lambda: scene.start(victim))
        ends = [name for name in scene.names if name in scene.processes and scene.processes[name].stopped]
        return scene.now > 6 and len(ends) == len(scene.processes)

    scene.run(over)
    return scene, seen


class SlowScene(Scene):
    """A cluster whose ranks take longer from the leader's permission to finish a step to its end."""

    def end_exchange(self, process: Process, task: int, ok: bool, taken: dict[str, frozenset[int]]) -> None:
        end = super().end_exchange
        self.later(self.random.choice((0.0, 0.02, 0.3)) * self.random.random(), lambda: end(process, task, ok, taken))


class Ambush(SlowScene):
    """A cluster in which an island is often cut off at the moment when it decides an epoch.

    Nobody else hears of the decision at first. Some of the others are restarted meanwhile.
    """

    def carry_out(self, process: Process) -> None:
        known = len(self.epochs)
        super().carry_out(process)
        if known and len(self.epochs) > known and self.random.random() < 0.5:
            self.partition({process.member.name})
            self.later(8 * self.random.random(), self.mend)
            for name in self.names:
                if name != process.member.name and self.random.random() < 0.4:
                    self.later(self.random.random(), lambda name=name: kill_if_running(self, name, False))
                    self.later(1 + self.random.random(), lambda name=name: self.start(name))


class RareExchanges(Ambush):
    """A cluster with the rules of `islands.sync=diloco`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rules = replace(self.rules, ahead=1, learners_share=True)


class FixedAddresses(Ambush):
    """A cluster whose islands listen at the same address after a restart. Messages to the old process reach the new."""

    def start(self, name: str) -> None:
        if name in self.processes:
            return
        super().start(name)
        process = self.processes[name]
        del self.by_address[process.member.address]
        process.member = process.island.me = process.member._replace(address=f"{name}:fixed")
        self.by_address[process.member.address] = process

    def find_ended(self, name: str, address: str) -> None:
        if address not in self.by_address:
            super().find_ended(name, address)

    def catch_up(self, process: Process, task: int, step: int, sources: tuple[Member, ...]) -> None:
        super().catch_up(process, task, step, self.same_lives(sources))

    def begin_heal(self, process: Process, task: int, step: int, epoch: int, sources: tuple[Member, ...]) -> None:
        super().begin_heal(process, task, step, epoch, self.same_lives(sources))

    def same_lives(self, sources: tuple[Member, ...]) -> tuple[Member, ...]:
        """Return the sources whose process still listens at its address. A reader names the life that it wants."""
        lives = {p.member.life for p in self.by_address.values()}
        return tuple(s for s in sources if s.life in lives)
