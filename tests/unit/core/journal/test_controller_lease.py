"""A controller records facts while it provably is the newest, and what a socket kept proves nothing (R17)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memstore.config import Config
from memstore.core.wire.messages import Event, HostBeat, HostLost, LeaseRenewed, Tick
from memstore.testing.controller.world import ControllerWorld

LONG_S = 30.0


class SleepyWorld(ControllerWorld):
    """Its controller can be frozen: what comes meanwhile waits in the sockets."""

    def __init__(self, hosts: int, **rules: float) -> None:
        self.is_frozen = False
        self.waiting: list[Event] = []
        super().__init__(hosts, rules=rules)

    def _handle(self, event: Event) -> None:
        if not self.is_frozen:
            super()._handle(event)
        elif not isinstance(event, Tick | LeaseRenewed):
            self.waiting.append(event)

    def wake(self) -> None:
        self.is_frozen = False
        waiting, self.waiting = self.waiting, []
        for event in waiting:
            self._handle(event)

    def recorded_within(self, seconds: float) -> bool:
        """True if the controller may record a fact at any moment of that time."""
        return self.run_until(lambda: self.served.lease.may_record(), seconds)


def without_membership(hosts: int = 3) -> SleepyWorld:
    """All hosts are received, the membership is not."""
    world = SleepyWorld(hosts)
    world.has_lease = False
    world.run(LONG_S)
    return world


def test_a_controller_that_receives_all_hosts_needs_no_membership() -> None:
    """They are asked before the membership's word runs out: there is no gap."""
    world = SleepyWorld(3, lease_s=Config().lease_s)
    world.run(2.0)
    world.has_lease = False
    for _ in range(50):
        world.run(0.2)
        assert world.served.lease.may_record()


def test_hosts_are_not_asked_while_the_membership_answers() -> None:
    world = SleepyWorld(3)
    world.run(LONG_S)
    orders = [kind for holder in world.holders.values() for kind, _ in holder.orders[10:]]
    assert "clock" not in orders


def test_what_was_said_before_a_freeze_is_not_received_when_it_ends() -> None:
    """The far side of a partition said it, and may have elected a newer controller since."""
    world = without_membership()
    world.is_frozen = True
    world.run(1.2)
    world.silence("h2")
    assert any(isinstance(event, HostBeat) and event.host_id == "h2" for event in world.waiting)
    world.run(LONG_S)
    world.wake()
    assert not world.recorded_within(10.0)


def test_a_connection_that_ended_during_a_freeze_says_nothing_of_its_host() -> None:
    """The holder may have given it up for a newer controller, or because it was not read (R17)."""
    world = without_membership()
    world.is_frozen = True
    world.run(LONG_S)
    world.silence("h2")
    world.waiting.append(HostLost("h2", "connection reset"))
    world.wake()
    assert not world.recorded_within(10.0)


def test_a_host_that_ended_before_the_eyes_of_its_controller_is_left_out() -> None:
    """No other process was in charge: its process is gone, and the others decide (D45)."""
    world = without_membership()
    world.kill_host("h2")
    world.run(LONG_S)
    assert world.served.lease.may_record()


def test_a_controller_that_wakes_blames_no_process_and_goes_on() -> None:
    """What arrived counts against suspicion as ever (R28), and every host soon proves that it is here."""
    world = without_membership()
    world.is_frozen = True
    world.run(LONG_S)
    world.wake()
    assert not world.served.lease.may_record()
    assert {state.status for state in world.served.hosts.states.values()} == {"live"}
    assert world.recorded_within(2.0)


@pytest.mark.parametrize("clock_s", [1e12, float("nan")])
def test_an_echo_of_what_was_never_sent_proves_nothing(clock_s: float) -> None:
    world = without_membership()
    reported = world.served.hosts.states["h2"].was_with_us_s
    world._handle(HostBeat("h2", clock_s=clock_s))
    assert world.served.hosts.states["h2"].was_with_us_s == reported


def test_a_successor_waits_from_when_the_first_host_came_to_it() -> None:
    """Up to then that host may have answered the predecessor that it was with it."""
    world = SleepyWorld(2)
    held: list[Callable[[], None]] = []
    dial, world._dial = world._dial, lambda holder: held.append(lambda: dial(holder))  # type: ignore[method-assign]
    world.crash_controller(restart_after_s=0.0)
    world.run(2.5)
    world._dial = dial  # type: ignore[method-assign]
    began_s = world.now
    for work in held:
        work()
    assert world.run_until(lambda: world.served.is_settled, 10.0)
    assert world.now - began_s >= world.rules.outlast_s
