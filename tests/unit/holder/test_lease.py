"""How long a controller may record facts that no other process may be recording too (R17)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from link_site import Site

from memstore.config import Config
from memstore.errors import TransportError
from memstore.shell.controller.controller import Controller
from memstore.testing.clusters.directory_membership import DirectoryMembership
from memstore.testing.clusters.processes import wait_for

WAIT_S = 60.0


class SlowMembership(DirectoryMembership):
    """A membership that names the newest controller once, when ordered to, and is out of reach after that."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked_s: list[float] = []
        self.go = threading.Event()

    def claim_term(self, above: int) -> int:
        return above + 1

    def newest_term(self) -> int:
        self.asked_s.append(time.monotonic())
        if len(self.asked_s) > 1:
            raise TransportError("the membership is out of reach")
        assert self.go.wait(WAIT_S)
        return 1


def test_beats_keep_a_controller_in_charge_while_the_membership_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hosts are asked before the membership's word runs out, and echo what they were sent (D130)."""
    site = Site(tmp_path, ["a", "b"], monkeypatch)

    def away() -> int:
        raise TransportError("the membership is out of reach")

    try:
        machine = site.controller.machine
        monkeypatch.setattr(site.controller.membership, "newest_term", away)
        wait_for(
            lambda: machine.state.now > machine.lease.until_s + site.config.lease_s, "the lease to be the hosts' alone"
        )
        wait_for(machine.lease.may_record, "an echo")
        first_s = min(state.was_with_us_s for state in machine.hosts.states.values())
        wait_for(lambda: min(s.was_with_us_s for s in machine.hosts.states.values()) > first_s, "newer echoes")
        assert first_s > machine.lease.until_s - site.config.lease_s
    finally:
        site.close()


def test_a_lease_counts_from_the_question_not_from_the_answer(tmp_path: Path) -> None:
    """While the answer was under way another controller may have been elected, and have waited out this lease."""
    membership = SlowMembership(tmp_path)
    config = Config(store="lease", detect=0.3)
    controller = Controller(config, membership, secret=b"s" * 32)
    began_s = controller.machine.lease.until_s
    try:
        wait_for(lambda: membership.asked_s and time.monotonic() > membership.asked_s[0] + config.lease_s, "the lease")
        membership.go.set()
        wait_for(lambda: controller.machine.lease.until_s > began_s, "the renewal")
        assert controller.machine.lease.until_s <= membership.asked_s[0] + config.lease_s
    finally:
        membership.go.set()
        controller.close()
