"""To which link the controller's answer to a rank's call goes, and what becomes of one that cannot be read (R4, R7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from holder_io import ScriptedIo

from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks
from memstore.core.wire.calls import ReadStep
from memstore.core.wire.codec import encode
from memstore.core.wire.orders import CallAnswered
from memstore.core.wire.replies import NothingStored
from memstore.testing.requests import request_of

OWNER = Owner(7, 1, 1)
READ = request_of("read_step", {"job": "job", "rank": 0}, step=None, of_attempt=None)
REPLY = encode(NothingStored())


@dataclass(eq=False)
class Link:
    """A connection of a rank's process."""

    owner: Owner = OWNER
    nonce: str = "n"
    pins: dict[int, Any] = field(default_factory=dict)


def answered(link: Link, data: bytes, error: tuple[str, str] | None = None) -> list[tuple[Any, ...]]:
    """Return the calls for an answer to the process OWNER, while this link is in the table."""
    io = ScriptedIo()
    table: dict[str, Any] = io.state.ranks.links
    table[link.nonce] = link
    assert isinstance(READ, ReadStep)
    io.play(ranks.pass_on(io, io.state, ranks.ForwardedCall(OWNER, "n", 5, READ), data, error))
    return io.calls


def test_an_answer_goes_to_the_link_on_which_its_process_is_connected() -> None:
    """Under the rank's own number of the call."""
    link: Any = Link()
    assert answered(link, REPLY) == [("send_to_rank", link, CallAnswered(id=5, reply=REPLY))]


@pytest.mark.parametrize("link", [Link(owner=Owner(8, 1, 1)), Link(nonce="m")])
def test_no_other_process_or_store_gets_the_answer(link: Link) -> None:
    """A process that is started again has calls of its own, with the same numbers."""
    assert answered(link, REPLY) == []


def test_an_error_of_the_controller_is_passed_on() -> None:
    """With its name, by which the rank raises it again."""
    [(_, _, message)] = answered(Link(), b"", ("WorldSizeError", "4 ranks, not 8"))
    assert message == CallAnswered(id=5, reply=b"", error=("WorldSizeError", "4 ranks, not 8"))


def test_an_answer_that_cannot_be_read_is_answered_all_the_same() -> None:
    """The call is taken out, so the rank would wait for its whole limit."""
    [(noted, *_), (_, _, message)] = answered(Link(), b"?")
    assert noted == "unexpected"
    assert (message.id, message.error[0]) == (5, "InternalError")
