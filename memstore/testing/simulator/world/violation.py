"""The exception for a broken rule."""

from __future__ import annotations


class Violation(AssertionError):
    """A rule of PROTOCOL.md (R) or an invariant (I) that a run broke."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
