"""Opens the replica store of one host, on an arena folder."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from memstore.core.arena.claimed_memory import Limit
from memstore.core.arena.replica_store import ReplicaStore
from memstore.shell.arena.arena import Arena
from memstore.shell.arena.lock import is_alive
from memstore.shell.arena.manifests import ManifestFolder

HostStore = ReplicaStore[Arena, ManifestFolder]


def open_store(folder: Path, *, chunk_bytes: int, limit: Limit) -> HostStore:
    """Create the replica store of a host in an arena folder, or adopt an earlier holder's (R6)."""
    arena = Arena.open(folder, limit_bytes=limit.nbytes, chunk_bytes=chunk_bytes)
    return ReplicaStore(
        arena, ManifestFolder.open(folder), chunk_bytes=chunk_bytes, limit=limit, clock=time, is_alive=is_alive,
        lock=threading.RLock(), room_lock=threading.Lock(),
    )  # fmt: skip
