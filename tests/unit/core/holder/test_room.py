"""A share that is claimed for a first put while the holder has no file descriptor left (R10)."""

from __future__ import annotations

import errno
from dataclasses import dataclass

import pytest
from holder_io import ScriptedIo

from memstore.core.arena.slot_table import PeerShare
from memstore.core.holder import orders
from memstore.core.wire.orders import Reserve, TermNumber
from memstore.core.wire.reports import Reserved
from memstore.errors import ConfigError

ORDER = Reserve(job="j", attempt=1, ranks={0: 4}, peer_slots=4, world_size=1, versions=2, number=TermNumber(1, 3))


@dataclass(eq=False)
class Host(ScriptedIo):
    """A holder where claiming fails for so long."""

    problem: Exception
    lasts_s: float

    async def claim_room(self, job: str, share: PeerShare) -> None:
        if self.now < self.lasts_s:
            raise self.problem


def claimed(problem: Exception, lasts_s: float) -> tuple[Reserved, float, list[Exception]]:
    """Carry the order out where claiming fails for so long; return the report, when it came, and what was logged."""
    host = Host(problem, lasts_s)
    host.play(orders.reserve(host, host.state, ORDER))
    [report] = host.reports
    assert isinstance(report, Reserved)
    return report, host.now, [error for _, error in host.of("unexpected")]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_lack_of_descriptors_that_passes_is_waited_out(number: int) -> None:
    """The claim is tried again, and no rank gets an error."""
    report, took_s, logged = claimed(OSError(number, "Too many open files"), lasts_s=2.0)
    assert (report.problem, report.is_fault, logged) == (None, False, [])
    assert 2.0 <= took_s < 2.0 + 2 * orders.RETRY_S


def test_a_lack_of_descriptors_that_lasts_is_reported_as_that() -> None:
    """After a time that a first put has: with the cause and what to raise; also where a file's opener says it."""
    report, took_s, [logged] = claimed(OSError(errno.EMFILE, "Too many open files"), lasts_s=1e9)
    assert report.is_fault
    assert "no file descriptor left for 10 s" in str(report.problem)
    assert "raise its limit" in str(report.problem)
    assert isinstance(logged, OSError)
    assert orders.DESCRIPTORS_S <= took_s < orders.DESCRIPTORS_S + 2 * orders.RETRY_S
    error = ConfigError("cannot open slots")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert claimed(error, lasts_s=2.0)[0].problem is None


def test_another_fault_is_reported_at_once() -> None:
    """Waiting would not help."""
    report, took_s, logged = claimed(OSError(errno.EIO, "Input/output error"), lasts_s=2.0)
    assert (report.is_fault, took_s, len(logged)) == (True, 0.0, 1)
    assert "failed to claim room" in str(report.problem)
