"""The process that forks ranks and readers of the nemesis."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from memstore.testing.nemesis.rank_process import LOG_VARIABLE
from memstore.testing.ranks.rank_process import RankNursery, RankProcess


class NemesisNursery(RankNursery):
    """A `RankNursery` for the nemesis's own rank program."""

    def __init__(self) -> None:
        super().__init__("memstore.testing.nemesis.rank_process")
        self.log = Path(os.devnull)  # the log of the current round's ranks

    def __enter__(self) -> NemesisNursery:
        return self

    def start(self, rank: int, env: Mapping[str, str], *, namespace: str = "") -> RankProcess:
        """Fork a rank or reader that logs into the current round's file."""
        return super().start(rank, {LOG_VARIABLE: str(self.log), **env}, namespace=namespace)
