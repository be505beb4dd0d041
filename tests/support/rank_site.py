"""A holder with one rank's link, whose slots are filled and submitted."""

from __future__ import annotations

import os
import shutil

from memstore.client.put import Put
from memstore.client.steps import Steps
from memstore.config import Config
from memstore.core.arena.slot_table import PeerShare
from memstore.core.wire.orders import StepLevel
from memstore.core.wire.rank_messages import HolderEvent, PutTerms
from memstore.shell.holder.holder import Holder
from memstore.shell.host.identity import HostIdentity, read_boot_id
from memstore.shell.rank.admin_link import store_root
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.store_name import scratch_store_name
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
WAIT_S = 60.0
SHARE_SLOTS = 6
STEP = 5
SHARD = ShardId("job", 1, STEP, 0)


class Site:
    """A holder without a controller, and a rank of this process with all of its share leased."""

    def __init__(self) -> None:
        self.config = Config(
            store=scratch_store_name(),
            arena_bytes=4 << 20,
            chunk_bytes=CHUNK_BYTES,
            interface="127.0.0.1",
            scrub_bytes_per_s=0,
        )
        self.begin()
        self.levels: list[tuple[int, str]] = []
        self.link = HolderLink(self.holder.folder, nonce="n", job="job", rank=0, attempt=1)
        self.link.on_event = self._note
        wait_for(lambda: len(self.link.leases.free) == SHARE_SLOTS, "the lease")

    def _note(self, event: HolderEvent) -> None:
        if isinstance(event, StepLevel):
            self.levels.append((event.step, event.level))

    def begin(self) -> None:
        """A holder starts and adopts what is there; the job has claimed its room."""
        identity = HostIdentity("a", read_boot_id(), True, {})
        self.holder = Holder(identity, self.config, secret=b"s" * 32, arena_limit_bytes=4 << 20)
        self.holder.replicas.claim("job", PeerShare(1, {0: SHARE_SLOTS}, 0))

    def begin_put(self, step: int = STEP) -> Put:
        """Begin a put, which has no slots yet."""
        steps = Steps(self.link)
        return Put(self.link, steps, steps.new(step, 0, 0.0), PutTerms(attempt=1, step=step, world_size=1))

    def stage(self, count: int = 3, step: int = STEP) -> Put:
        """Fill slots, as the training process does."""
        put = self.begin_put(step)
        assert put.extend(count, WAIT_S)
        for number, view in enumerate(put.views()):
            view[:] = bytes([number + 1]) * CHUNK_BYTES
        return put

    def is_whole(self, stored: int = 0) -> bool:
        """Every slot of the share is free to fill by the rank, but those of what is stored."""
        leases = self.link.leases
        with leases.changed:
            ours = sorted(leases.free)
            is_quiet = not leases.unsealed and leases.held() == ours
        with self.holder.replicas.lock:
            leased = {o.pid: sorted(n) for o, n in self.holder.replicas.table.leases.items() if n}
        return is_quiet and len(set(ours)) == SHARE_SLOTS - stored and leased == {os.getpid(): ours}

    def close(self) -> None:
        self.link.close()
        self.holder.close()
        shutil.rmtree(store_root(self.config), ignore_errors=True)


def send_level(site: Site, level: str) -> None:
    """Wait until the holder has said that the step has reached a level."""
    wait_for(lambda: (STEP, level) in site.levels, f"level {level}")
