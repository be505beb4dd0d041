"""Which failures of the training function end the job: those that come again at the same step."""

from __future__ import annotations

import pytest

from memstore.inplace.meeting import Failures, failure_of


def raised(kind: type[Exception] = ValueError, *, elsewhere: bool = False) -> Exception:
    """Return an exception that was raised at one line, or at another one."""
    try:
        if elsewhere:
            raise kind("a bug")
        raise kind("a bug")
    except kind as error:
        return error


def hopeless(*failures: tuple[Exception, int, int | None]) -> list[bool]:
    """Take failures, each an exception, its generation and its step."""
    known = Failures()
    return [
        known.is_hopeless(failure_of(error, run="run", generation=generation, rank=0, step=step))
        for error, generation, step in failures
    ]


def test_the_third_equal_failure_at_one_step_is_hopeless() -> None:
    """The first two may have come of something that passes."""
    assert hopeless(*((raised(), generation, 7) for generation in range(4))) == [False, False, True, True]


@pytest.mark.parametrize(
    "other", [(raised(TypeError), 2, 7), (raised(elsewhere=True), 2, 7), (raised(), 2, 8), (raised(), 1, 7)]
)
def test_another_failure_is_not_the_same(other: tuple[Exception, int, int | None]) -> None:
    """Of another class, from another line, after another step, or on another rank of the same generation."""
    assert hopeless((raised(), 0, 7), (raised(), 1, 7), other) == [False, False, False]


def test_the_text_has_the_users_traceback() -> None:
    """It is what the job's error shows."""
    failure = failure_of(raised(), run="run", generation=0, rank=3, step=None)
    assert failure.text.endswith("ValueError: a bug\n")
    assert "in raised" in failure.text
    assert failure.kind.startswith("ValueError in ")
