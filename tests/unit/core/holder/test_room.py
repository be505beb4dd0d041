"""A share that is claimed for a first put while the holder has no file descriptor left (R10)."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from memstore.core.holder import effects, room
from memstore.core.wire.orders import RankSlots, Reserve
from memstore.core.wire.reports import Reserved
from memstore.errors import ConfigError

ORDER = Reserve(job="j", attempt=1, ranks=(RankSlots(0, 4),), peer_slots=4, world_size=1, versions=2)


def claimed(problem: Exception, lasts_s: float) -> tuple[Reserved, float, list[Exception]]:
    """Carry the order out where claiming fails for so long; return the report, when it came, and what was logged."""
    reported, logged, clock = [], [], [0.0]
    state: Any = SimpleNamespace(
        now=lambda: clock[0], report=reported.append, ranks=SimpleNamespace(of_job=lambda job: [])
    )
    work = room.reserve(state, ORDER)
    answer: Any = None
    try:
        effect = next(work)
        while True:
            match effect:
                case effects.ClaimRoom() if clock[0] < lasts_s:
                    effect = work.throw(problem)
                    continue
                case effects.Sleep(seconds):
                    clock[0] += seconds
                case effects.Unexpected(_, error):
                    logged.append(error)
                case effects.BeginConnect():
                    answer = lambda: True  # noqa: E731
            effect = work.send(answer)
            answer = None
    except StopIteration:
        pass
    [report] = reported
    return report, clock[0], logged


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_lack_of_descriptors_that_passes_is_waited_out(number: int) -> None:
    """The claim is tried again, and no rank gets an error."""
    report, took_s, logged = claimed(OSError(number, "Too many open files"), lasts_s=2.0)
    assert (report.problem, report.is_fault, logged) == (None, False, [])
    assert 2.0 <= took_s < 2.0 + 2 * room.RETRY_S


def test_a_lack_of_descriptors_that_lasts_is_reported_as_that() -> None:
    """After a time that a first put has: with the cause and what to raise; also where a file's opener says it."""
    report, took_s, [logged] = claimed(OSError(errno.EMFILE, "Too many open files"), lasts_s=1e9)
    assert report.is_fault
    assert "no file descriptor left for 10 s" in str(report.problem)
    assert "raise its limit" in str(report.problem)
    assert isinstance(logged, OSError)
    assert room.DESCRIPTORS_S <= took_s < room.DESCRIPTORS_S + 2 * room.RETRY_S
    error = ConfigError("cannot open slots")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert claimed(error, lasts_s=2.0)[0].problem is None


def test_another_fault_is_reported_at_once() -> None:
    """Waiting would not help."""
    report, took_s, logged = claimed(OSError(errno.EIO, "Input/output error"), lasts_s=2.0)
    assert (report.is_fault, took_s, len(logged)) == (True, 0.0, 1)
    assert "failed to claim room" in str(report.problem)
