"""What the holders' journals are given: new facts, what one lacks, what is to stay of them. Pure (R16).

    recorded --end of the event--> sent to all live holders
    a session begins --> what its journal lacks, or all of it
    half of the bytes are not needed --> holders are told what to keep

Read `fact_log.py` for when a fact takes effect, `records.py` for what is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memstore.core.cluster.facts import Fact
from memstore.core.journal.records import Entry, paged

if TYPE_CHECKING:
    from memstore.core.controller.machine import Catalog


class Journals:
    """Keeps the journals of all holders, for the catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.unsent: list[Entry] = []  # facts of this event: they go out together at its end

    def record(self, fact: Fact) -> None:
        """Give a fact its place; it is on its way before anybody is answered."""
        self.unsent.append(self.catalog.log.append(fact))

    def send_facts(self) -> None:
        """Give all live holders the facts that they were not sent yet, in one message."""
        if not self.unsent:
            return
        body = {"reset": False, "records": [entry.record for entry in self.unsent], "seq": self.unsent[-1].seq}
        self.unsent = []
        for host in self.catalog.hosts.live_ids():
            self.catalog.tell(host, "journal", body)

    def send(self, *hosts: str, have: Sequence[Entry] | None = None) -> None:
        """Give hosts the whole journal in place of their own, or what theirs lacks if it is the first part of it."""
        self.send_facts()
        log = self.catalog.log
        missing = log.missing(have) if have is not None else None
        *pages, last = paged(entry.record for entry in (log.entries if missing is None else missing))
        bodies = [{"is_page": True, "records": page} for page in pages]
        for body in (*bodies, {"reset": missing is None, "records": last, "seq": log.last_seq}):
            for host in hosts:
                self.catalog.tell(host, "journal", body)

    def shorten(self) -> None:
        """Have all live holders keep what the log still has: they have it, and are not sent it again."""
        self.send_facts()
        log = self.catalog.log
        body = {
            "keep": [[entry.term, entry.seq] for entry in log.entries], "short": log.shortened_records(),
            "records": [], "seq": log.last_seq,
        }  # fmt: skip
        for host in self.catalog.hosts.live_ids():
            self.catalog.tell(host, "journal", body)
