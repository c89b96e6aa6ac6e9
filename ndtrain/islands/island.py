"""The protocol of an island's leader: who is a member, and what the island does next.

There are no sockets, no threads and no clock here. The caller passes messages and the time, and carries out the effects
in their order. The tests drive thousands of islands this way, with losses and partitions at every point.

The islands agree on one epoch after another. The members of an epoch decide the next one by Paxos (Lamport, "Paxos made
simple", 2001). A member that promises to take part in a decision also promises where it stops: it finishes no step
after a limit before it knows the next epoch. A step needs the gradients of all members of its epoch. If the network
splits, at most one side can decide the next epoch. The other side finishes no further step.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from ndtrain.islands import messages as m
from ndtrain.islands.epoch import Epoch, Member, quorum, speeds_of, split_rows
from ndtrain.islands.messages import LOWEST, Ballot, Message, Start
from ndtrain.islands.next_epoch import Report, planned_epoch, unplanned_epoch
from ndtrain.islands.orders import (
    Cancel,
    CatchUp,
    Effect,
    Heal,
    Order,
    Rules,
    Save,
    Saved,
    Send,
    Stop,
    Tell,
    Work,
)
from ndtrain.islands.peers import Peers

PER_DOOR = 4  # signs of life for each message to the known addresses
LOST_WEIGHTS = "the island with the newest weights was lost while they were read: start this one again"
UNEVEN = 1.25  # shares are changed if the slowest island then gets faster by this factor
SETTLED = 50  # steps after which a new epoch's shares may be changed


@dataclass
class Proposal:
    """An epoch that this island tries to have decided.

    Attributes:
        limit: the last step that members may finish before the decision; 0: none, because a member was lost.
        promises: name -> the member and its promise.
        chosen: the epoch; None: there are not enough promises yet.
        accepted: names of the members that have accepted it.
    """

    ballot: Ballot
    limit: int
    began: float
    promises: dict[str, tuple[Member, m.Promise]] = field(default_factory=dict)
    chosen: Epoch | None = None
    accepted: set[str] = field(default_factory=set)


class Island:
    """The state of one island in the protocol.

    Args:
        start: the state with which the process has started.
        saved: what an earlier process of this island has saved; None: there is no file.
        founder: True if this island may found the run: it listens at the first of the known addresses.
        doors: the known addresses at which an island of the run may listen.

    Attributes:
        epoch: the newest epoch that it knows.
        done: the number of finished steps; None: it has no weights of this run.
        computed: the last step whose gradient it offers; 0: none.
        effects: what the caller has to do, in order. The caller empties it.
    """

    def __init__(
        self,
        me: Member,
        start: Start,
        rules: Rules,
        saved: Saved | None,
        founder: bool,
        doors: Sequence[str],
        now: float,
        random: Random,
    ):
        self.me, self.start, self.rules, self.founder, self.doors = me, start, rules, founder, doors
        self.saved, self.previous = saved or Saved(), None
        self.done: int | None = None
        self.computed = 0
        self.leaving, self.refused = False, ""
        self.effects: deque[Effect] = deque()
        self._random, self._began, self._now = random, now, now
        self._limit: int | None = None  # finish no step after it; None: any
        self._healed_at: int | None = None  # the step after which it has read its weights
        self._exchanging: int | None = None  # the step that may be finished at any moment
        self._asked: tuple[str, m.Prepare] | None = None  # a question for a promise that is not answered yet
        self._proposal: Proposal | None = None
        self._remembers = saved is not None
        self._round, self._needed_since, self._quiet_until = 0, None, now
        self._peers = Peers(me.life, rules.timeout_s)
        self._joiners: dict[str, tuple[Member, Start]] = {}
        self._next_beat, self._beats_sent, self._told = now, 0, ""
        self._inbox: deque[Message] = deque()  # messages to itself
        self._met: dict[str, Member] = {}  # name -> another island outside of the epoch
        if saved is None:
            self._save()

    # -------------------------------------------------------------------------------------------------- what to do next

    @property
    def epoch(self) -> Epoch | None:
        return self.saved.epoch

    @property
    def number(self) -> int:
        """The number of the newest epoch, 0 before the first one."""
        return self.epoch.number if self.epoch else 0

    def order(self) -> Order | None:
        """Return what the island has to do now; None: wait, and ask again after the next event."""
        if self.refused:
            return Stop(self.refused)
        epoch = self.epoch
        if epoch is None or (self.done is None and not epoch.has_life(self.me.life)):
            return Stop("") if self.leaving else None
        if self.done is None:
            teachers = epoch.holders or [name for name in epoch.names if name not in epoch.learners]
            return Heal(epoch.begin - 1, epoch.number, self._living(epoch, teachers))
        if self.done >= self.rules.last or (self.leaving and self._has_left()):
            return Stop("") if self._others_are_done() else None
        return self._order_of(self.done + 1)

    def _order_of(self, step: int) -> Order | None:
        epoch = self._governing(step)
        if epoch is None or (self._limit is not None and step > self._limit):
            return None
        if step < epoch.begin:
            return CatchUp(step, epoch.number, self._living(epoch, epoch.summed))
        rows = epoch.rows(step)
        sharers = tuple(member for member in epoch.members if member.name in rows)
        teaches = step == epoch.begin and bool(epoch.learners)
        return Work(step, epoch.number, rows.get(self.me.name, ()), sharers, teaches)

    def _governing(self, step: int) -> Epoch | None:
        """Return the epoch of a step; None: this island has no part in it."""
        epoch = self.epoch
        if epoch and step < epoch.begin and not epoch.holders and self.previous:
            epoch = self.previous
        return epoch if epoch and epoch.has_life(self.me.life) else None

    def _living(self, epoch: Epoch, names: Sequence[str]) -> tuple[Member, ...]:
        """Return the other members with these names that are alive."""
        return tuple(x for x in epoch.members if x.name in names and x.life != self.me.life and self._is_alive(x))

    def _has_left(self) -> bool:
        """Return True if this island has no part in the next step, or is the last one that leaves."""
        alone = len(self.epoch.members) == 1 and self.done >= self.epoch.begin - 1
        return alone or not self._governing(self.done + 1)

    def _others_are_done(self) -> bool:
        """Return True if no other member needs this island's gradients any more."""
        others = [x for e in (self.epoch, self.previous) if e for x in e.members if x.life != self.me.life]
        last = self.done or 0
        behind = lambda x: (done := self._peers.done(x)) is None or done < last
        return not any(self._is_alive(x) and behind(x) for x in others)

    def may_finish(self, step: int, epoch: int) -> bool | None:
        """Return True if the island may finish a step whose gradients its leader has read.

        Return False if another epoch governs the step now, and None if a member has not finished the step before. After
        True, `finish` has to be called.
        """
        if self._limit is not None and step > self._limit:
            return False
        governing = self._governing(step)
        if governing is None or governing.number != epoch or self.done != step - 1:
            return False
        if not all(self._keeps_up(x, step, governing) for x in governing.members):
            return None
        self._exchanging = step
        return True

    def _keeps_up(self, member: Member, step: int, epoch: Epoch) -> bool:
        """Return True if a member has finished all steps before this one.

        The gradient of a sharer shows it. A member without a share, such as a learner, has to say so. Otherwise the
        others would no longer have what it reads.
        """
        if member.life == self.me.life or member.name in epoch.rows(step):
            return True
        beat = self._peers.beats.get(member.life)
        return beat is not None and beat.number >= epoch.number and beat.done is not None and beat.done >= step - 1

    def awaited(self, step: int) -> str:
        """Return the islands that a step waits for, and why, as the end of a sentence; empty: this island has no part
        in the step."""
        epoch = self._governing(step)
        if epoch is None:
            return ""
        others = [x for x in epoch.members if x.life != self.me.life]
        sharers = [x for x in others if x.name in epoch.rows(step)]
        late = [x for x in sharers if self._peers.computed(x) < step]
        behind = [x for x in others if not self._keeps_up(x, step, epoch)]
        if late:
            return _named(late, f"not computed step {step}")
        if behind:
            return _named(behind, f"not read the weights before step {step}")
        return _named(sharers, f"not sent all gradients of step {step}")

    def finish(self, step: int, ok: bool, now: float) -> None:
        """Record that all ranks of the island have finished a step, or that some could not."""
        self._now, self._exchanging = now, None
        if ok:
            self.done = step
            self._beat()
        self._answer()
        self._work_off()

    def begin_heal(self) -> None:
        """Record that the ranks begin to read another island's state. It replaces the one they have started with."""
        self.start = Start(0, "", self.start.plan)

    def heal(self, step: int, epoch: int, now: float) -> bool:
        """Record that all ranks have the state after a step. Return False if it is of no use any more."""
        self._now = now
        is_learner = self.epoch is not None and self.epoch.has_life(self.me.life) and self.done is None
        if not is_learner or epoch != self.number or self._limit is not None:  # it may have promised to have no weights
            return False
        self.done = self._healed_at = step
        self._beat()
        self._work_off()
        return True

    def leave(self, now: float) -> None:
        """Ask for an epoch without this island."""
        self._now, self.leaving = now, True
        self._beat()
        self._work_off()

    def is_late(self, step: int, now: float) -> bool:
        """Return True if other members have offered their gradients of a step for longer than the grace time."""
        others = [x for x in self.epoch.members if x.life != self.me.life] if self.epoch else []
        return any(self._peers.offered_s(x, step, now) > self.rules.grace_s for x in others)

    def set_speed(self, rows_per_s: float) -> None:
        """Set the measured speed of this island."""
        self.me = self.me._replace(speed=rows_per_s)

    # ----------------------------------------------------------------------------------------------------------- events

    def process_ended(self, address: str, now: float) -> None:
        """Record that nobody listens at an address any more, so the process that did has ended."""
        self._now = now
        for member in self.epoch.members if self.epoch else ():
            if member.address == address and member.life != self.me.life:
                self._peers.ended[member.life] = True
        self._joiners = {name: j for name, j in self._joiners.items() if j[0].address != address}
        self._act()

    def tick(self, now: float) -> None:
        """Do what is due at this time. Call it several times in `Rules.beat_s`."""
        self._now = now
        if now >= self._next_beat:
            self._next_beat = now + self.rules.beat_s
            self._beat()
            self._beats_sent += 1
            if self.epoch and self._beats_sent % PER_DOOR == 0:
                self._show_up()
            is_outside = self.epoch is None or not self.epoch.has_life(self.me.life)
            if is_outside and not self.leaving and not self.refused:
                self._ask_to_join()
                if not self.founder and self._peers.are_silent:
                    self._tell(f"waits for an island at {' or '.join(self.doors)}")
        self._joiners = {n: j for n, j in self._joiners.items() if self._peers.has_spoken(j[0].life, self._now)}
        self._act()

    def receive(self, sender: Member, message: Message, now: float) -> None:
        """Handle a message from another island."""
        self._now = now
        if sender.life == self.me.life:
            return  # it listens at a known address itself
        if sender.life in self._peers.ended:
            if not isinstance(message, m.Join):
                return  # it was on its way when its process ended
            del self._peers.ended[sender.life]
        self._peers.hear(sender.life, now)
        self._handle(sender, message)
        self._act()

    def _act(self) -> None:
        self._found()
        self._propose_if_needed()
        self._work_off()

    def _work_off(self) -> None:
        while self._inbox:
            self._handle(self.me, self._inbox.popleft())

    def _handle(self, sender: Member, message: Message) -> None:
        match message:
            case m.Beat():
                self._peers.take(sender.life, message, self._now)
                if message.number < self.number:
                    self._send(sender.address, m.Decided(self.epoch))
            case m.Join(start):
                self._on_join(sender, start)
            case m.Refuse(reason) if self.done is None and (self.epoch is None or sender.name in self.epoch.names):
                self.refused = self.refused or reason
            case m.Meet(members):
                self._met |= {x.name: x for x in members if x.life != self.me.life}
            case m.Prepare():
                self._on_prepare(sender, message)
            case m.Promise():
                self._on_promise(sender, message)
            case m.Busy(number, ballot) if number == self.number + 1:
                self._round = max(self._round, ballot[0])
            case m.Accept(ballot, epoch):
                self._on_accept(sender, ballot, epoch)
            case m.Accepted(number, ballot):
                self._on_accepted(sender, number, ballot)
            case m.Decided(epoch) if epoch.number < self.number:
                self._send(sender.address, m.Decided(self.epoch))
            case m.Decided(epoch):
                self._adopt(epoch)

    def _send(self, address: str, message: Message) -> None:
        if address == self.me.address:
            self._inbox.append(message)
        else:
            self.effects.append(Send(address, message))

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self.effects.append(Tell(text))

    def _save(self, **changes) -> None:
        self.saved = replace(self.saved, **changes)
        self.effects.append(Save(self.saved))

    # ---------------------------------------------------------------------------------------------------- signs of life

    def _beat(self) -> None:
        beat = m.Beat(self.number, self.done, self.me.speed, self.leaving, self.computed)
        for other in self._others():
            self._send(other.address, beat)

    def _show_up(self) -> None:
        """Tell the epoch to whoever listens at the known addresses. A restarted island may know no other one."""
        for address in self.doors:
            self._send(address, m.Decided(self.epoch))

    def _others(self) -> list[Member]:
        """Return all other islands that take part in this epoch or in the rest of the previous one."""
        known = {x.life: x for e in (self.previous, self.epoch) if e for x in e.members}
        known |= {x.life: x for x, _ in self._joiners.values()}
        return [x for life, x in known.items() if life != self.me.life and not self._peers.ended.get(life)]

    def _is_alive(self, member: Member) -> bool:
        return self._peers.is_alive(member, self._now)

    def _current(self, name: str) -> Member | None:
        """Return the process of an island that is alive now: the member, or a restarted one that wants to join."""
        if name == self.me.name:
            return self.me
        member = self.epoch.member(name) if self.epoch else None
        if name in self._joiners:
            return self._joiners[name][0]
        return member if member and self._is_alive(member) else None

    # ---------------------------------------------------------------------------------------------------------- joining

    def _ask_to_join(self) -> None:
        members = self.epoch.members if self.epoch else ()
        known = [x.address for x in (*members, *self._met.values()) if x.life != self.me.life]
        for address in dict.fromkeys([*known, *self.doors]):
            if address != self.me.address:
                self._send(address, m.Join(self.start))

    def _on_join(self, sender: Member, start: Start) -> None:
        if reason := self._objection(sender, start):
            self._send(sender.address, m.Refuse(reason))
            return
        if self.epoch and self.epoch.has_life(sender.life):
            self._send(sender.address, m.Decided(self.epoch))
            return
        if self.done is not None and self.done >= self.rules.last:
            self._send(sender.address, m.Refuse(f"the other islands have finished step {self.done}, the last one"))
            return
        if self.epoch:
            self._send(sender.address, m.Decided(self.epoch))  # it then turns to all members
        old = self.epoch and self.epoch.member(sender.name)
        if old and old.address == sender.address:
            self._peers.ended[old.life] = True  # another process listens there now
        if old is None or not self._is_alive(old):
            self._joiners[sender.name] = (sender, start)
        if self.epoch is None or not self.epoch.has_life(self.me.life):
            self._met[sender.name] = sender
            outside = tuple(x for x, _ in self._joiners.values() if x.life != sender.life)
            self._send(sender.address, m.Meet(outside))

    def _objection(self, sender: Member, start: Start) -> str:
        """Return why an island can never join, or an empty text."""
        if sender.name == self.me.name and sender.life != self.me.life:
            return f"the name {sender.name} is taken by another island: give another islands.name"
        mine, keys = self.start.plan, sorted(self.start.plan.keys() | start.plan.keys())
        if differing := [key for key in keys if mine.get(key) != start.plan.get(key)]:
            key = differing[0]
            more = f" (and {len(differing) - 1} more keys)" if len(differing) > 1 else ""
            here, there = mine.get(key, "nothing"), start.plan.get(key, "nothing")
            return (
                f"island {self.me.name} has {key}={here}, this one has {there}{more}: islands train one model and plan"
            )
        return ""

    def _found(self) -> None:
        """Decide the first epoch, if this island may and enough islands have come."""
        came = 1 + len(self._joiners)
        if self.epoch is not None or not self.founder:
            return
        if came < self.rules.count and self._now - self._began < self.rules.wait_s:
            self._tell(
                f"{came} of {self.rules.count} islands are here: waits at most {self.rules.wait_s:g} s for the rest"
            )
            return
        reports = [Report(self.me, None, False, self.start)]
        reports += [Report(joiner, None, False, start) for joiner, start in self._joiners.values()]
        self._decide(unplanned_epoch(1, reports, self.rules.batch, None, self.rules.learners_share))

    # -------------------------------------------------------------------------------------------------------- proposing

    def _propose_if_needed(self) -> None:
        epoch, proposal = self.epoch, self._proposal
        if not self._votes():
            return
        if proposal is not None:
            self._push(proposal)
            return
        lost = self._lost(epoch)
        if not lost and not self._wants_change(epoch):
            self._needed_since = None
            return
        if self._needed_since is None:
            self._needed_since = self._now
        alive = [name for name in epoch.names if self._current(name)]
        turn = self._needed_since + 2 * self.rules.beat_s * alive.index(self.me.name)
        if self._now >= max(turn, self._quiet_until):
            self._propose(0 if lost else max(self._positions(epoch)) + self.rules.ahead)

    def _votes(self) -> bool:
        """Return True if this island takes part in the decision about the next epoch.

        A restarted island does, unless it has lost what it promised before.
        """
        epoch = self.epoch
        return epoch is not None and (epoch.has_life(self.me.life) or (self._remembers and self.me.name in epoch.names))

    def _lost(self, epoch: Epoch) -> list[Member]:
        """Return the lost members of the epoch, and of the previous one while its last steps are not finished."""
        governing = self._governing(self.done + 1) if self.done is not None else None
        members = (*epoch.members, *(governing.members if governing else ()))
        return [x for x in members if not self._is_alive(x)]

    def _positions(self, epoch: Epoch) -> list[int]:
        """Return the numbers of steps that the members have finished, as far as known."""
        known = (self.done, *map(self._peers.done, epoch.members))
        return [done for done in known if done is not None] or [0]

    def _wants_change(self, epoch: Epoch) -> bool:
        """Return True if the islands or their shares should change, and all members are able to."""
        beats = [self._peers.beats.get(x.life) for x in epoch.members if x.life != self.me.life]
        if self.done is None or any(b is None or b.done is None for b in beats) or self._limit is not None:
            return self._limit is not None  # somebody wanted a change and has not completed it
        if self.done < epoch.begin or max(self._positions(epoch)) + self.rules.ahead >= self.rules.last:
            return False
        leaving = [self.leaving, *(b.leaving for b in beats)]
        return bool(self._joiners) or (any(leaving) and len(leaving) > 1) or self._is_uneven(epoch)

    def _is_uneven(self, epoch: Epoch) -> bool:
        """Return True if other shares would make the slowest island clearly faster."""
        now = [self._with_speed(x) for x in epoch.members]
        slowest = lambda sizes: max(n / speed for n, speed in zip(sizes, speeds_of(now), strict=True))
        if self.done - epoch.begin < SETTLED:
            return False
        return slowest(epoch.shares) > UNEVEN * slowest(split_rows(self.rules.batch, now))

    def _with_speed(self, member: Member) -> Member:
        if member.life == self.me.life:
            return self.me
        beat = self._peers.beats.get(member.life)
        return member._replace(speed=beat.speed) if beat and beat.speed else member

    def _propose(self, limit: int) -> None:
        self._round = max(self._round, self.saved.promised[0]) + 1
        self._proposal = Proposal((self._round, self.me.name), limit, self._now)
        for name in self.epoch.names:
            if member := self._current(name):
                self._send(member.address, m.Prepare(self.number + 1, self._proposal.ballot, limit))

    def _push(self, proposal: Proposal) -> None:
        """Go on with a proposal that has waited for answers, or give it up."""
        waited = self._now - proposal.began
        if proposal.chosen is None and waited > 4 * self.rules.beat_s:
            self._choose(proposal, all_of_them=False)
            if proposal.chosen is None and self._proposal is proposal:
                self._tell_who_is_missing(proposal)
        if self._proposal is proposal and waited > 8 * self.rules.beat_s:
            self._proposal = None
            self._quiet_until = self._now + self._random.uniform(0, 4 * self.rules.beat_s)

    def _tell_who_is_missing(self, proposal: Proposal) -> None:
        here = {*proposal.promises, self.me.name}
        missing = [name for name in self.epoch.names if name not in here]
        if missing:
            of = f"{len(here)} of {len(self.epoch.names)} islands"
            self._tell(
                f"waits: {of} ({', '.join(sorted(here))}) cannot go on alone, because {', '.join(missing)} may still "
                "train: they go on when more than half are here"
            )

    def _on_promise(self, sender: Member, promise: m.Promise) -> None:
        proposal = self._proposal
        if proposal and promise.ballot == proposal.ballot and promise.number == self.number + 1:
            proposal.promises[sender.name] = (sender, promise)
            if proposal.chosen is None:
                self._choose(proposal, all_of_them=True)

    def _choose(self, proposal: Proposal, all_of_them: bool) -> None:
        """Choose the epoch to propose, if there are enough promises.

        Args:
            all_of_them: True to wait for the promises of all members that are alive.
        """
        epoch, came = self.epoch, set(proposal.promises)
        if all_of_them and any(self._current(name) for name in epoch.names if name not in came):
            return
        if not quorum(epoch, came, self._peers.ended, self.me.life):
            return
        promises = [p for _, p in proposal.promises.values()]
        newest = max(promises, key=lambda p: p.accepted_ballot)
        if newest.accepted is None and proposal.limit and not self._all_can_go_on(proposal):
            self._propose(0)
            return
        proposal.chosen = newest.accepted or self._compose(proposal)
        for member, _ in proposal.promises.values():
            self._send(member.address, m.Accept(proposal.ballot, proposal.chosen))

    def _all_can_go_on(self, proposal: Proposal) -> bool:
        """Return True if all members have promised, and are able to go on in this epoch up to the limit."""
        able = lambda p: p.done is not None and p.limit >= proposal.limit
        lives = {member.life for member, p in proposal.promises.values() if able(p)}
        return all(x.life in lives for x in self.epoch.members)

    def _compose(self, proposal: Proposal) -> Epoch:
        epoch, number, batch = self.epoch, self.number + 1, self.rules.batch
        promised = [proposal.promises[name] for name in epoch.names if name in proposal.promises]
        joiners = [Report(j, None, False, s) for name, (j, s) in self._joiners.items() if name not in proposal.promises]
        if proposal.limit:
            stay = [Report(self._with_speed(x), p.done, p.has_sum, p.start) for x, p in promised if not self._leaves(x)]
            if not stay:  # all leave: one stays until the others have left
                stay = [Report(x, p.done, p.has_sum, p.start) for x, p in promised if x.life == self.me.life]
            begin = 1 + max([proposal.limit, *(p.done for _, p in promised)])
            return planned_epoch(number, begin, [*stay, *joiners], batch, self.rules.learners_share)
        reports = [Report(self._with_speed(x), p.done, p.has_sum, p.start) for x, p in promised]
        positions = [r.done for r in reports if r.done is not None]
        old = self._epoch_of(max(positions) + 1) if positions else None
        rows = old.rows(max(positions) + 1) if old else None
        return unplanned_epoch(number, [*reports, *joiners], batch, rows, self.rules.learners_share)

    def _leaves(self, member: Member) -> bool:
        if member.life == self.me.life:
            return self.leaving
        return self._peers.is_leaving(member)

    def _epoch_of(self, step: int) -> Epoch | None:
        """Return the epoch in which the members began a step that is not finished."""
        if step >= self.epoch.begin:
            return self.epoch
        return self.previous if self.previous and step >= self.previous.begin else None

    # --------------------------------------------------------------------------------------------------------- deciding

    def _on_prepare(self, sender: Member, question: m.Prepare) -> None:
        if not self._votes():
            return
        if question.number <= self.number:
            self._send(sender.address, m.Decided(self.epoch))
        elif question.number == self.number + 1 and question.ballot < self.saved.promised:
            self._send(sender.address, m.Busy(question.number, self.saved.promised))
        elif question.number == self.number + 1:
            self._save(promised=question.ballot)
            if sender.life != self.me.life:
                self._proposal, self._quiet_until = None, self._now + 8 * self.rules.beat_s
            self._limit = question.limit if self._limit is None else min(self._limit, question.limit)
            self._asked = (sender.address, question)
            if self.done is not None and self._limit <= self.done:
                self.effects.append(Cancel(self.number))
            self._answer()

    def _answer(self) -> None:
        """Give the promise that was asked for. A step that may be finished at any moment has to end first."""
        if self._asked is None or (self._exchanging is not None and self._exchanging > self._limit):
            return
        (address, question), self._asked = self._asked, None
        saved = self.saved
        promise = m.Promise(
            question.number,
            question.ballot,
            self._limit,
            self.done,
            self.done is not None and self.done != self._healed_at,
            self.start,
            saved.accepted_ballot,
            saved.accepted,
        )
        self._send(address, promise)

    def _on_accept(self, sender: Member, ballot: Ballot, epoch: Epoch) -> None:
        if not self._votes() or epoch.number != self.number + 1:
            return
        if ballot < self.saved.promised:
            self._send(sender.address, m.Busy(epoch.number, self.saved.promised))
            return
        self._save(promised=ballot, accepted_ballot=ballot, accepted=epoch)
        self._send(sender.address, m.Accepted(epoch.number, ballot))

    def _on_accepted(self, sender: Member, number: int, ballot: Ballot) -> None:
        proposal = self._proposal
        if proposal and proposal.chosen and ballot == proposal.ballot and number == self.number + 1:
            proposal.accepted.add(sender.name)
            if quorum(self.epoch, proposal.accepted, self._peers.ended, self.me.life):
                self._decide(proposal.chosen)

    def _decide(self, epoch: Epoch) -> None:
        old = self.epoch.members if self.epoch else ()
        self._adopt(epoch)
        for address in dict.fromkeys(x.address for x in (*old, *epoch.members) if x.life != self.me.life):
            self._send(address, m.Decided(epoch))

    def _adopt(self, epoch: Epoch) -> None:
        """Begin to follow a decided epoch."""
        if epoch.number <= self.number:
            return
        old, self.previous = self.epoch, self.epoch if self.number == epoch.number - 1 else None
        self._save(epoch=epoch, promised=LOWEST, accepted_ballot=LOWEST, accepted=None)
        self._limit, self._asked, self._proposal, self._needed_since = None, None, None, None
        self._quiet_until, self._round = self._now, 0
        self._joiners = {name: j for name, j in self._joiners.items() if not epoch.has_life(j[0].life)}
        for member in epoch.members:
            self._peers.hear(member.life, self._now)
        # Without a loss the previous epoch goes on, although a promise may have cancelled it: the promise was for an
        # epoch without a lost member, and a planned one that had been accepted before was decided in its place.
        # Its steps from the new epoch's first one on are begun again, although a rank may have missed that promise.
        self.effects.append(Cancel(epoch.number - 1) if epoch.holders else Cancel(epoch.number - 2, epoch.begin))
        self._take_place(epoch)
        self._tell(_description(old, epoch))

    def _take_place(self, epoch: Epoch) -> None:
        """Set the position of this island to its place in a new epoch."""
        name, is_member = self.me.name, epoch.has_life(self.me.life)
        if is_member and self.done is None and name in epoch.holders:
            if self.start.weights:
                self.done = epoch.begin - 1
            else:
                self.refused = LOST_WEIGHTS
        elif is_member and name in epoch.learners:
            self.done = None
        elif not is_member and self.done is not None and not (self.leaving and not epoch.holders):
            self.start = Start(self.done, f"{self.me.life} {self.done}", self.start.plan)
            self.done = None
            self.effects.append(Cancel(epoch.number))


def _named(members: Sequence[Member], lacks: str) -> str:
    """Return the names of islands, and what they have not done."""
    names, several = ", ".join(x.name for x in members), len(members) > 1
    return f"island{'s' * several} {names}, which {'have' if several else 'has'} {lacks}"


def _description(old: Epoch | None, new: Epoch) -> str:
    """Return a line about the change from one epoch to the next."""
    before = {x.life: x.name for x in old.members} if old else {}
    came = [x.name for x in new.members if x.life not in before]
    left = [name for life, name in before.items() if not new.has_life(life)]
    changes = [f"without {', '.join(left)}"] * bool(left) + [f"with {', '.join(came)}"] * bool(came and old)
    shares = ", ".join(f"{x.name} {n}" for x, n in zip(new.members, new.shares, strict=True))
    return f"islands from step {new.begin} {' and '.join(changes)}: {shares} rows".replace("  ", " ").replace(" :", ":")
