"""A put that fails in the holder is given up on all ranks, and the pause after it follows from its cause (R12)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from link_site import WAIT_S, Site, state

from memstore.errors import CapacityError, DigestMismatch
from memstore.testing.clusters.processes import wait_for


@pytest.mark.parametrize(("error", "gap"), [(DigestMismatch("a bit flipped"), 1), (CapacityError("full"), 2)])
def test_only_a_lack_of_room_lengthens_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, gap: int
) -> None:
    """A failure of one put says nothing of the next."""
    site = Site(tmp_path, ["a"], monkeypatch)
    try:
        (store,) = site.connect()
        store.put(1, state(1)).wait("committed", WAIT_S)

        def fails(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(site.replicas, "seal_local", fails)
        ticket = store.put(2, state(2))
        wait_for(lambda: ticket.is_over, "the end of the put")
        attempt = site.controller.machine.jobs["job"].attempts[1]
        wait_for(lambda: attempt.resume_step > 2, "the word of it")
        assert (ticket.level, attempt.resume_gap) == ("failed", gap)
    finally:
        site.close()
