"""How long a controller may record facts that nobody else may be recording too (R17)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from memstore.config import Config
from memstore.errors import TransportError
from memstore.shell.controller import Controller
from memstore.shell.membership import DirectoryMembership
from memstore.testing.processes import wait_for

WAIT_S = 60.0


class SlowMembership(DirectoryMembership):
    """Its first answer to who is the newest comes when told to; after that it is out of reach."""

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


def test_a_lease_counts_from_the_question_not_from_the_answer(tmp_path: Path) -> None:
    """While the answer was under way another controller may have been elected, and have waited out this lease."""
    membership = SlowMembership(tmp_path)
    config = Config(store="lease", heartbeat_s=0.05, suspect_after_s=0.1, repair_after_s=0.3)
    controller = Controller(config, membership, secret=b"s" * 32)
    began_s = controller.catalog.lease_until_s
    try:
        wait_for(lambda: membership.asked_s and time.monotonic() > membership.asked_s[0] + config.lease_s, "the lease")
        membership.go.set()
        wait_for(lambda: controller.catalog.lease_until_s > began_s, "the renewal")
        assert controller.catalog.lease_until_s <= membership.asked_s[0] + config.lease_s
    finally:
        membership.go.set()
        controller.close()
