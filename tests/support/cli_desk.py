"""The `memstore` command against the real controller in virtual time, whose hosts hang and die when a test says so."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memstore import errors
from memstore.cli import main
from memstore.cli.options import ASK_S, Where
from memstore.core.wire.calls import RankCall
from memstore.core.wire.codec import tag_of
from memstore.testing.controller.holder import DirectedRank
from memstore.testing.controller.world import ControllerWorld


class Desk:
    """Takes what the command asks to the controller of a world, through one of its ranks."""

    def __init__(self, patch: pytest.MonkeyPatch, world: ControllerWorld, rank: DirectedRank) -> None:
        self.world, self.rank = world, rank
        patch.setattr(Where, "ask", lambda where, request, limit_s=ASK_S: self.ask(request, limit_s))
        clock = SimpleNamespace(monotonic=lambda: world.now, sleep=world.run)
        patch.setattr(import_module("memstore.cli.lifecycle"), "time", clock)

    def ask(self, request: RankCall, limit_s: float) -> Any:
        """As `Where.ask`, in the world's time."""
        verb = tag_of(request)
        said, refused = self.rank.answers.setdefault(verb, []), self.rank.errors.setdefault(verb, [])
        before = len(said), len(refused)
        self.rank.relay(request)
        if not self.world.run_until(lambda: (len(said), len(refused)) != before, limit_s):
            raise errors.PeerTimeout(verb, operation=verb, waited_s=limit_s, limit_s=limit_s)
        if len(refused) > before[1]:
            kind, message = refused[-1]
            raise getattr(errors, kind)(message)
        return self.rank.last_reply

    def run(self, *typed: str) -> Result:
        """Type a command."""
        return CliRunner().invoke(main, typed)
