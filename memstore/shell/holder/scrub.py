"""Re-digests sealed slots and manifests in the background at a bounded rate, and on demand (R30)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.slot_table import SlotState
from memstore.core.holder.inventory import report_copy
from memstore.core.wire.replies import HostVerified
from memstore.errors import DigestMismatch
from memstore.shell.holder.context import HolderContext
from memstore.shell.threads import lower_thread_priority

log = logging.getLogger("memstore")
IDLE_S = 1.0


class Scrubber:
    """The scrub of one holder: it takes bad slots out and reports bad manifests; repair replaces both."""

    def __init__(self, context: HolderContext) -> None:
        self.context = context
        self.found_count = self.verified_bytes = 0

    def run(self) -> None:
        """Go round the arena for ever; the rate is `scrub_bytes_per_s`."""
        lower_thread_priority()
        rate = self.context.config.scrub_bytes_per_s
        stopping = self.context.stopping
        while not stopping.wait(IDLE_S):
            for check in self.checks() if rate > 0 else ():
                check()
                if stopping.wait(self.context.config.chunk_bytes / rate):
                    return

    def checks(self) -> Iterator[Callable[[], object]]:
        """Yield what one round looks at: every sealed slot, then every manifest."""
        for number in range(len(self.context.replicas.table.slots)):
            if self.context.replicas.table.slots[number].state is SlotState.SEALED:
                yield partial(self._check, number)
        for stored in self._stored(None):
            yield partial(self._check_manifest, stored)

    def _stored(self, job: str | None) -> list[StoredReplica]:
        replicas = self.context.replicas
        with replicas.lock:
            return [s for s in replicas.index.shards.values() if job in (None, s.shard.job) and not s.is_doomed]

    def _check_manifest(self, stored: StoredReplica) -> bool:
        """Compare a copy's manifest with its digest; True if it is damaged, which was not known."""
        replicas = self.context.replicas
        try:
            replicas.manifest(stored)
        except FileNotFoundError:  # dropped meanwhile
            return False
        except DigestMismatch as exc:
            if not replicas.lose_manifest(stored):
                return False
            self.found_count += 1
            log.warning("host %s: %s", self.context.host_id, exc)
            report_copy(self.context.state, stored)
            return True
        return False

    def _check(self, number: int) -> int:
        damaged = self.context.replicas.verify_slot(number)
        if damaged:
            self.found_count += 1
            log.warning(
                "host %s: slot %d is damaged, and with it %d copies", self.context.host_id, number, len(damaged)
            )
        for stored in damaged:
            report_copy(self.context.state, stored)
        return len(damaged)

    def verify_all(self, job: str | None) -> HostVerified:
        """Re-digest everything (of one job) now; return the counts of checked and damaged chunks."""
        shards = self._stored(job)
        with self.context.replicas.lock:
            numbers = sorted({n for s in shards for n in s.slots if n is not None})
        damaged = 0
        for number in numbers:
            damaged += self._check(number) > 0
            self.verified_bytes += self.context.config.chunk_bytes
        manifests = sum(1 for stored in shards if self._check_manifest(stored))
        return HostVerified(shards=len(shards), chunks=len(numbers), damaged=damaged, damaged_manifests=manifests)
