"""Faults on the victim's machine, and the checks that they took effect.

Every function takes and returns plain values, so that it can be called in this process or through a Ray actor. If a
fault did not take effect, it raises a DrillError: a drill that broke nothing proves nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memstore.config import Config
from memstore.core.arena.slot_table import SlotState
from memstore.core.format.manifest import chunk_digest, decode_manifest
from memstore.core.wire.handshake import ProbeIdentity
from memstore.errors import DrillError, TransportError
from memstore.shell.arena.folder import read_secret
from memstore.shell.arena.lock import owner
from memstore.shell.arena.mapping import ARENA_NAME
from memstore.shell.arena.slot_headers import SLOTS_NAME, read_file_header
from memstore.shell.net.listener import connect_tcp
from memstore.shell.net.tls import Tls
from memstore.testing.faults.arena_files import (
    arena_identity,
    arena_nbytes,
    destroy_arena,
    flip_bit,
    manifest_files,
    manifests,
    slot_records,
)
from memstore.testing.faults.processes import (
    GONE_S,
    POLL_S,
    Process,
    freeze,
    kill,
    process_of,
    thaw,
    wait_frozen,
    wait_gone,
)

PROBE_S = 1.0


def holder_process(folder: str) -> Process:
    """Return the live holder of an arena folder; raise DrillError if there is none."""
    holding = owner(folder)
    if holding is None or not holding.is_alive():
        raise DrillError(f"no live holder owns {folder}: the store was not healthy before the drill")
    return holding.pid, holding.start_time


def freeze_in_put(process: Process, mark: str, timeout_s: float = GONE_S) -> int:
    """Stop a rank while one of its puts is under way, as its mark file shows; return the step of that put.

    The mark is read after the process has stopped; so it cannot change before the process is killed.

    Raises:
        DrillError: the rank was between two puts each time it was stopped.
    """

    def step() -> int | None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(Path(mark).read_text())
        return None

    return _freeze_when(process, step, "inside a put", timeout_s)


def freeze_in_persist(process: Process, folder: str, timeout_s: float = GONE_S) -> int:
    """Stop the controller while the newest durable step of a job has parts but no marker; return the step.

    Only the controller orders the marker; so no marker can appear between the look and the kill.

    Raises:
        DrillError: no step was half written any time the controller was stopped.
    """

    def step() -> int | None:
        found = [path for path in Path(folder).glob("*/*") if path.name.isdigit() and path.is_dir()]
        newest = max(found, key=lambda path: (int(path.parent.name), int(path.name)), default=None)
        names = {path.name for path in newest.iterdir()} if newest is not None else set()
        is_half = "marker" not in names and any(name.startswith("rank-") for name in names)
        return int(newest.name) if newest is not None and is_half else None

    return _freeze_when(process, step, "with a durable step half written", timeout_s)


def _freeze_when(process: Process, step: Callable[[], int | None], when: str, timeout_s: float) -> int:
    """Stop and continue a process until it is stopped at the right moment; leave it stopped."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        freeze(process)
        wait_frozen(process)
        if (found := step()) is not None:
            return found
        thaw(process)
        time.sleep(POLL_S / 5)
    raise DrillError(f"pid {process[0]} was never met {when} in {timeout_s:g} s: the fault did not take effect")


def remove_mark(mark: str) -> None:
    """Remove the file in which a rank marks that a put is under way."""
    Path(mark).unlink(missing_ok=True)


def secret_of(folder: str) -> bytes:
    """Return the store's secret, for a handshake with a holder; raise DrillError if the folder has none."""
    secret = read_secret(Path(folder))
    if secret is None:
        raise DrillError(f"{folder} has no secret: this is not the arena of a started store")
    return secret


def check_destroyed(folder: str, before: tuple[int, int] | None) -> None:
    """Raise DrillError if the arena file from before the fault is still there."""
    if before is None:
        raise DrillError(f"{folder} had no arena file before the fault: there was nothing to lose")
    if arena_identity(folder) == before:
        raise DrillError(
            f"the arena file in {folder} is still there: a host that keeps its memory is not lost, so this run would "
            "prove nothing"
        )


def check_silent(host: str, record: dict[str, Any], config: Config, secret: bytes) -> None:
    """Raise DrillError if the holder of a host still answers at the victim's address.

    Another program may have got the port since; so an open port proves nothing, only a handshake with the store's
    secret does.
    """
    with contextlib.suppress(TransportError):
        connect_tcp(
            str(record["address"]), int(record["port"]), secret=secret, store=config.store,
            identity=ProbeIdentity(), timeout_s=PROBE_S, host=host, tls=Tls.load(config),
        ).close()  # fmt: skip
        raise DrillError(
            f"the holder at {record['address']}:{record['port']} still answers: the fault did not take effect"
        )


def memory_available() -> int:
    """Return how many bytes the processes of this machine can still take: the kernel's MemAvailable."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise DrillError("/proc/meminfo names no MemAvailable")


def flip_chunk(folder: str, job: str, step: int, rank: int, where: float) -> dict[str, Any]:
    """Flip one bit of a sealed chunk of a shard in the arena file, without the holder.

    Args:
        where: 0 <= where < 1; chooses the chunk, and the byte in it.

    Returns:
        chunk, slot, digest (hex, from before the flip), nbytes.

    Raises:
        DrillError: the shard or its slot is missing, or the chunk has its old digest after the write.
    """
    held = {(m.shard.job, m.shard.step, m.shard.rank): m for m in manifests(folder)}
    shard = held.get((job, step, rank))
    if shard is None:
        raise DrillError(f"{folder} holds no shard of rank {rank} of step {step}: there is nothing to corrupt")
    index = int(where * len(shard.chunks))
    chunk, records = shard.chunks[index], slot_records(folder)
    slots = [i for i in _sealed(records) if records[i]["digest"].tobytes() == chunk.digest]
    if not slots:
        raise DrillError(f"no sealed slot of {folder} has digest {chunk.digest.hex()}: the shard lacks a chunk")
    at = slots[0] * _chunk_bytes(folder) + int(where * 997) % chunk.nbytes
    flip_bit(Path(folder) / ARENA_NAME, at, 6)
    if chunk_digest(_slot_bytes(folder, slots[0], chunk.nbytes)) == chunk.digest:
        raise DrillError(f"slot {slots[0]} of {folder} has its old digest after a byte was flipped")
    return {"chunk": index, "slot": slots[0], "digest": chunk.digest.hex(), "nbytes": chunk.nbytes}


def is_sealed_damage(folder: str, flipped: dict[str, Any]) -> bool:
    """Return whether the slot table still lists the damaged slot as sealed with the chunk's digest; it must not."""
    record = slot_records(folder)[flipped["slot"]]
    data = _slot_bytes(folder, flipped["slot"], flipped["nbytes"])
    is_claimed = record["state"] == SlotState.SEALED and record["digest"].tobytes().hex() == flipped["digest"]
    return bool(is_claimed) and chunk_digest(data).hex() != flipped["digest"]


def _sealed(records: np.ndarray[Any, Any]) -> list[int]:
    return [int(i) for i in np.flatnonzero(records["state"] == SlotState.SEALED)]


def _chunk_bytes(folder: str) -> int:
    with (Path(folder) / SLOTS_NAME).open("rb") as file:
        return read_file_header(file.fileno(), Path(folder)).chunk_bytes


def _slot_bytes(folder: str, slot: int, nbytes: int) -> bytes:
    with (Path(folder) / ARENA_NAME).open("rb") as file:
        return os.pread(file.fileno(), nbytes, slot * _chunk_bytes(folder))


def tear_manifest(folder: str, job: str, step: int, rank: int, where: float) -> dict[str, Any]:
    """Cut the manifest file of a shard short; return its path, and its size in bytes before and after.

    Args:
        where: 0 <= where < 1; the share of the file that stays.

    Raises:
        DrillError: the manifest is missing, or the rest of it can still be read as a manifest.
    """
    for path, data in manifest_files(folder).items():
        shard = decode_manifest(data).shard
        if (shard.job, shard.step, shard.rank) == (job, step, rank):
            os.truncate(path, int(where * len(data)))
            if has_manifest(folder, job, step, rank):
                raise DrillError(f"{path} is still a manifest after it was cut short: the fault did not take effect")
            return {"path": str(path), "nbytes": len(data), "left_nbytes": path.stat().st_size}
    raise DrillError(f"{folder} holds no shard of rank {rank} of step {step}: there is nothing to tear")


def has_manifest(folder: str, job: str, step: int, rank: int) -> bool:
    """Return whether the folder has a whole manifest of a shard."""
    return any((m.shard.job, m.shard.step, m.shard.rank) == (job, step, rank) for m in manifests(folder))


#: The functions that a drill may call on the victim's machine, by name.
REMOTE_FAULTS: dict[str, Callable[..., Any]] = {
    work.__name__: work
    for work in (
        holder_process, process_of, kill, wait_gone, arena_identity, arena_nbytes, destroy_arena, check_destroyed,
        secret_of, check_silent, flip_chunk, is_sealed_damage, freeze, wait_frozen, thaw, memory_available,
        freeze_in_put, freeze_in_persist, remove_mark, tear_manifest, has_manifest,
    )
}  # fmt: skip
