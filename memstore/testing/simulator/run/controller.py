"""Controllers: a real state machine each, with sessions, a lease and its own belief to be in charge."""

from __future__ import annotations

import math

from memstore.core.controller.machine import ControllerMachine
from memstore.core.wire.calls import Called
from memstore.core.wire.codec import Decoder, encode
from memstore.core.wire.messages import (
    AnswerCall,
    DrainsSeen,
    Event,
    HostLost,
    HostUp,
    LeaseRenewed,
    LogLine,
    Received,
    SendOrder,
    Tick,
)
from memstore.core.wire.orders import DropJob, FreeCopies, FreeStep, decode_order
from memstore.core.wire.reports import FactsWritten, HostInventory, Report
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.world.virtual_time import Stream
from memstore.testing.simulator.world.world import AnyHolder, World

decode_inventory: Decoder[HostInventory] = Decoder(HostInventory)
DIAL_S = 0.2
LEASE_S = 2.0
WALL_S = 1e9  # the clock of Ray, which is right


decode_report: Decoder[Report] = Decoder(Report)


def plain_event(event: Event) -> Event:
    """Return the event as the controller reads it from a socket."""
    return Received(event.host_id, decode_report(encode(event.message))) if isinstance(event, Received) else event


class SimSession:
    """One connection of a controller to a holder: a stream each way."""

    def __init__(self, world: World, controller: SimController, holder: AnyHolder) -> None:
        self.controller, self.holder = controller, holder
        names, network = (controller.name, holder.host_id), world.network
        self.down = Stream(network, world.at, *names, lambda: holder.is_up and not holder.is_frozen)
        self.up = Stream(network, world.at, *names[::-1], lambda: controller.is_alive and not controller.is_frozen)
        self.world, self.opened_s = world, world.now
        self.clock_s = -math.inf  # the controller's clock, as it last sent it to the holder

    @property
    def is_open(self) -> bool:
        """Return whether both ends use it."""
        return self.down.is_open

    def close(self) -> None:
        """End both directions; what was under way is lost."""
        self.down.is_open = self.up.is_open = False

    def replaced(self) -> None:
        """End the session from the holder's side; the controller learns whether a newer one took its place (R17)."""
        self.down.is_open = False
        self.up.send(self.world.now, self._end_replaced)

    def _end_replaced(self) -> None:
        old, host = self.controller, self.holder.host_id
        if old.sessions.get(host) is self:
            old.machine.lease.is_outranked |= self.holder.term > old.term
            old.lose(host, "the holder obeys another controller")

    def reset(self) -> None:
        """End the session as a broken connection does."""
        self.controller.lose(self.holder.host_id, "connection reset")

    def report(self, event: Event) -> None:
        """Send an event from the holder to the controller; a fault may double a report."""
        self.up.send(self.world.now, lambda: self.controller.handle(plain_event(event)))
        is_report = isinstance(event, Received) and not isinstance(event.message, Called | FactsWritten)
        if is_report and self.world.network.take("doubles"):
            self.up.send(self.world.now, lambda: self.controller.handle(plain_event(event)))


class SimController:
    """The controller of one term (R17)."""

    def __init__(self, world: World, checker: Checker, term: int, skew_s: float) -> None:
        self.world, self.checker, self.term, self.name = world, checker, term, f"controller-{term}"
        self.is_alive, self.is_frozen = True, False
        self.sessions: dict[str, SimSession] = {}
        self.machine = ControllerMachine(
            term=term,
            now=world.now,
            wall_offset_s=WALL_S + skew_s,
            rules=world.rules,
            expected_hosts=sorted(world.holders),
        )

    def handle(self, event: Event) -> None:
        """Give the state machine an event and carry out its actions."""
        if not self.is_alive:
            return
        actions = self.machine.handle(self.world.now, event)
        assert not self.machine.parts.recorder.problem, self.machine.parts.recorder.problem
        for action in actions:
            if isinstance(action, LogLine):
                self.world.note(f"{self.name}: {action.text}")
                continue
            if isinstance(action, SendOrder) and isinstance(action.order, FreeCopies | FreeStep | DropJob):
                self.checker.drops.ordered(self, action.host_id, action.order)
            session = self.sessions.get(action.host_id)
            if session is not None:
                session.down.send(self.world.now, lambda a=action, s=session: self._arrive(s, a))  # type: ignore[misc]
        for host, session in list(self.sessions.items()):
            state = self.machine.hosts.states.get(host)
            if (
                state is not None
                and state.status == "dead"
                and state.info.incarnation == session.holder.info.incarnation
            ):
                self.lose(host, None)  # dead by silence: it needs a new session

    def _arrive(self, session: SimSession, action: SendOrder | AnswerCall) -> None:
        holder = session.holder
        if holder.session is not session:
            return
        if isinstance(action, SendOrder):
            holder.obey(decode_order(encode(action.order)))
        else:
            data = b"" if action.reply is None else encode(action.reply)
            holder.answer(action.call_id, data, action.error)

    def tick(self) -> None:
        """Let time pass, and open the sessions that are missing."""
        if not self.is_alive or self.is_frozen:
            return
        self.handle(Tick())
        if self.world.drains and self.world.has_kv:
            self.handle(DrainsSeen({host: WALL_S + until_s for host, until_s in self.world.drains.items()}))
        for host, holder in sorted(self.world.holders.items()):
            is_free = host not in self.sessions and holder.is_serving
            if is_free and self.world.network.talks(self.name, host):
                self.greet(holder)

    def renew(self) -> None:
        """Renew the lease while no controller has a higher term and Ray's store answers."""
        if self.is_alive and not self.is_frozen and self.term == self.world.term and self.world.has_kv:
            self.handle(LeaseRenewed(self.world.now + LEASE_S))

    def greet(self, holder: AnyHolder) -> None:
        """Open a session; a holder that obeys a newer term refuses this controller (R17)."""
        session = SimSession(self.world, self, holder)
        if not holder.accept(session):
            self.world.note(f"{self.name} is sent away by {holder.host_id}")
            self.stop()
            return
        self.sessions[holder.host_id] = session
        sent = decode_inventory(encode(holder.hello()))
        session.report(HostUp.of(holder.host_id, sent, self.world.now))
        holder.calls.ask_again()

    def lose(self, host: str, why: str | None) -> None:
        """End a session; with `why` the state machine gets the event of a reset connection (R28)."""
        session = self.sessions.pop(host, None)
        if session is None:
            return
        session.close()
        session.holder.sessions.end(session)
        if why is not None:
            self.handle(HostLost(host, why))

    def stop(self) -> None:
        """End the process, and its sessions with it."""
        self.is_alive = False
        for host in list(self.sessions):
            self.lose(host, None)
