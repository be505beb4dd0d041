"""The calls of one collective call, by rank. Plain data; read `collective.py` for the rules."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from memstore.core.cluster.job import Call
from memstore.core.wire.codec import Request
from memstore.core.wire.replies import Reply

Q = TypeVar("Q", bound=Request[Any])


class Replies(Protocol):
    """Takes the replies to calls."""

    def answer(self, call: Call[Any], reply: Reply) -> None:
        """Answer a call."""

    def refuse(self, call: Call[Any], error: str, message: str) -> None:
        """Answer a call with an error."""


class RankCalls(dict[int, Call[Q]], Generic[Q]):
    """Rank -> its call."""

    def answer_all(self, out: Replies, reply: Reply) -> None:
        """Answer every rank alike."""
        for call in self.values():
            out.answer(call, reply)

    def refuse_all(self, out: Replies, error: str, message: str) -> None:
        """Refuse every rank alike."""
        for call in self.values():
            out.refuse(call, error, message)
