"""Runs core/holder/puts/seal.py, which turns submissions into sealed shards, on one thread for each link."""

from __future__ import annotations

import threading

from memstore.core.holder.puts import seal as procedure
from memstore.core.holder.state import HolderState
from memstore.core.wire.rank_messages import PutReady
from memstore.shell.holder.blocking_io import BlockingIo
from memstore.shell.holder.rank_connections import RankConnection
from memstore.shell.threads.priority import lower_thread_priority


class Sealer:
    """The submissions of all links of one holder."""

    def __init__(self, io: BlockingIo, state: HolderState) -> None:
        self.io, self.state = io, state

    def start(self, link: RankConnection) -> None:
        """Serve a link until None is queued."""
        threading.Thread(target=self._run, args=(link,), name=f"memstore-seal-{link.nonce}", daemon=True).start()

    def add(self, link: RankConnection, ready: PutReady) -> None:
        """Queue a submission that came completely; a fence that comes now waits for it (R21)."""
        with self.io.state():
            put = procedure.add(self.state, link, ready)
            if put is not None:
                link.submitted_puts.put(put)

    def _run(self, link: RankConnection) -> None:
        lower_thread_priority()
        while (put := link.submitted_puts.get()) is not None:
            self.io.run(procedure.run, self.state, put)
