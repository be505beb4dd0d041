"""To which link the controller's answer to a rank's call goes, and what becomes of one that cannot be read (R4, R7)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from memstore.core.arena.slot_table import Owner
from memstore.core.holder import answers
from memstore.core.holder.effects import SendToRank, Unexpected
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.calls import ReadStep
from memstore.core.wire.codec import encode
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.rank_messages import AskAnswered, AskRefused
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


def answered(link: Link, data: bytes | None, error: tuple[str, str] | None = None) -> list[Any]:
    """Return the effects of an answer to the process OWNER, while this link is in the table."""
    store: Any = None
    state = HolderState(
        HostInfo("me", 1, ()), store, lambda shard, digest: None, Limits(1.0, 3.0), now=lambda: 0.0,
        report=lambda report: None, ask=lambda request: None, is_stopping=lambda: False,
        is_alive=lambda owner: True, pin_numbers=itertools.count(),
    )  # fmt: skip
    table: dict[str, Any] = state.ranks.links
    table[link.nonce] = link
    assert isinstance(READ, ReadStep)
    return list(answers.pass_on(state, answers.Call(OWNER, "n", 5, READ), data, error))


def test_an_answer_goes_to_the_link_on_which_its_process_is_connected() -> None:
    """Under the rank's own number of the call."""
    link: Any = Link()
    assert answered(link, REPLY) == [SendToRank(link, AskAnswered(id=5, reply=REPLY))]


@pytest.mark.parametrize("link", [Link(owner=Owner(8, 1, 1)), Link(nonce="m")])
def test_no_other_process_or_store_gets_the_answer(link: Link) -> None:
    """A process that is started again has calls of its own, with the same numbers."""
    assert answered(link, REPLY) == []


def test_an_error_of_the_controller_is_passed_on() -> None:
    """With its name, by which the rank raises it again."""
    [sent] = answered(Link(), None, ("WorldSizeError", "4 ranks, not 8"))
    assert sent.message == AskRefused(id=5, error="WorldSizeError", message="4 ranks, not 8")


def test_an_answer_that_cannot_be_read_is_answered_all_the_same() -> None:
    """The call is taken out, so the rank would wait for its whole limit."""
    [found, sent] = answered(Link(), b"?")
    assert isinstance(found, Unexpected)
    assert (sent.message.id, sent.message.error) == (5, "InternalError")
