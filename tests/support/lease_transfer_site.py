"""A holder with one rank's link, whose slots are filled, offered and submitted, and children of that rank."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from typing import Any

from memstore.client.pending_put import PendingPut
from memstore.client.ticket import Ticket
from memstore.config import Config
from memstore.core.arena.share import PeerShare
from memstore.core.wire.rank_messages import HolderEvent, StepLevel
from memstore.shell.holder.holder import Holder
from memstore.shell.host.identity import HostIdentity, read_boot_id
from memstore.shell.rank.admin_link import store_root
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.processes import kill, wait_for
from memstore.testing.clusters.store_name import scratch_store_name
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
WAIT_S = 60.0
SHARE_SLOTS = 6
STEP = 5
SHARD = ShardId("job", 1, STEP, 0)

CHILD = """
import json, sys
from pathlib import Path
from memstore.errors import MemstoreError
from memstore.shell.rank.holder_link import HolderLink

link, slots = None, []
for line in sys.stdin:
    try:
        if line == "connect\\n":
            link = HolderLink(Path(sys.argv[1]), nonce="n/child", job="job", rank=0, parent="n", attempt=1)
        elif line == "adopt\\n":
            slots = link.adopt(5, 30.0)
        elif line == "submit\\n":
            put = {"attempt": 1, "world_size": 1, "layout": b"", "nbytes": len(slots) * 65536}
            assert link.submit(link.adopter, 5, slots, link.mapping, **put)
        elif line == "bye\\n":
            link.close()
        reply = {"slots": slots}
    except MemstoreError as error:
        reply = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(reply), flush=True)
"""
# Its parent ends, so that it descends from no process that has joined.
ORPHAN = "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\n"


class Child:
    """A process that does what a save process does, one command at a time."""

    def __init__(self, holder: Holder, *, is_orphan: bool = False) -> None:
        source = (ORPHAN if is_orphan else "") + CHILD
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, str(holder.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        kill(self.process)


class Site:
    """A holder without a controller, and a rank of this process with all of its share leased."""

    def __init__(self) -> None:
        self.config = Config(
            store=scratch_store_name(), arena_bytes=4 << 20, chunk_bytes=CHUNK_BYTES, interface="127.0.0.1",
            scrub_bytes_per_s=0,
        )  # fmt: skip
        self.children: list[Child] = []
        self.begin()
        self.levels: list[tuple[int, str]] = []
        self.link = HolderLink(self.holder.folder, nonce="n", job="job", rank=0, attempt=1)
        self.link.on_event = self._note
        wait_for(lambda: len(self.link.pool) == SHARE_SLOTS, "the lease")

    def _note(self, event: HolderEvent) -> None:
        if isinstance(event, StepLevel):
            self.levels.append((event.step, event.level))

    def begin(self) -> None:
        """A holder starts and adopts what is there; the job has claimed its room."""
        identity = HostIdentity("a", read_boot_id(), True, {})
        self.holder = Holder(identity, self.config, secret=b"s" * 32, arena_limit_bytes=4 << 20)
        self.holder.replicas.claim("job", PeerShare(1, {0: SHARE_SLOTS}, 0))

    def child(self, **options: Any) -> Child:
        self.children.append(Child(self.holder, **options))
        return self.children[-1]

    def stage(self, count: int = 3) -> PendingPut:
        """Fill slots, as the training process does."""
        room = PendingPut(self.link, Ticket(STEP), world_size=1)
        assert room.extend(count, WAIT_S)
        for number, view in enumerate(room.views()):
            view[:] = bytes([number + 1]) * CHUNK_BYTES
        return room

    def offer_slots(self, count: int = 3) -> PendingPut:
        room = self.stage(count)
        room.offer_slots()
        wait_for(lambda: self.holder.state.ranks.offered, "the offer")
        return room

    def is_whole(self, stored: int = 0) -> bool:
        """Every slot of the share is free to fill by the rank, but those of what is stored."""
        with self.link.room:
            ours = sorted(self.link.pool)
            is_quiet = not (self.link.in_copy or self.link.offered or self.link.granting or self.link.unsealed_puts)
        with self.holder.replicas.lock:
            leases = {o.pid: sorted(n) for o, n in self.holder.replicas.table.leases.items() if n}
        return is_quiet and len(set(ours)) == SHARE_SLOTS - stored and leases == {os.getpid(): ours}

    def close(self) -> None:
        for child in self.children:
            child.close()
        self.link.close()
        self.holder.close()
        shutil.rmtree(store_root(self.config), ignore_errors=True)


def send_level(site: Site, level: str) -> None:
    """The parent's side of Puts.on_level: its child is done with the step."""
    wait_for(lambda: (STEP, level) in site.levels, f"level {level}")
