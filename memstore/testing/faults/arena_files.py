"""The files of an arena, read and damaged without their holder, and the checks that the damage is there.

Scenes, sites and nemesis call them. They take and return plain values, so that they may also run on the victim's
machine through a Ray actor. A fault that took no effect raises a DrillError: recovery from nothing proves
nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from memstore.config import Config
from memstore.core.arena.slot_table import SlotState
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest
from memstore.core.wire.handshake import ProbeIdentity
from memstore.errors import DrillError, MemstoreError, TransportError
from memstore.shell.arena.folder import check_folder, read_secret
from memstore.shell.arena.lock import owner
from memstore.shell.arena.manifests import MANIFESTS_NAME
from memstore.shell.arena.mapping import ARENA_NAME
from memstore.shell.arena.slot_headers import HEADER_NBYTES, RECORD_DTYPE, SLOTS_NAME, read_file_header
from memstore.shell.net.listener import connect_tcp
from memstore.shell.net.tls import Tls
from memstore.testing.faults.processes import Process

PROBE_S = 1.0


def arena_identity(folder: str | Path) -> tuple[int, int] | None:
    """Return device and inode of the arena file, or None if there is none. A newly made arena has other ones."""
    try:
        status = (Path(folder) / ARENA_NAME).lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def arena_nbytes(folder: str | Path) -> int:
    """Return the memory that the files of an arena folder take, in bytes."""
    return sum(p.stat().st_blocks * 512 for p in Path(folder).rglob("*") if p.is_file())


def holder_process(folder: str) -> Process:
    """Return the live holder of an arena folder; raise DrillError if there is none."""
    holding = owner(folder)
    if holding is None or not holding.is_alive():
        raise DrillError(f"no live holder owns {folder}: the store was not healthy before the drill")
    return holding.pid, holding.start_time


def secret_of(folder: str) -> bytes:
    """Return the store's secret, for a handshake with a holder; raise DrillError if the folder has none."""
    secret = read_secret(Path(folder))
    if secret is None:
        raise DrillError(f"{folder} has no secret: this is not the arena of a started store")
    return secret


def slot_records(folder: str | Path) -> np.ndarray[Any, Any]:
    """Return the records of all slots, as the slot table has them now."""
    return np.fromfile(Path(folder) / SLOTS_NAME, RECORD_DTYPE, offset=HEADER_NBYTES)


def manifest_files(folder: str | Path) -> dict[Path, bytes]:
    """Return the manifest files of an arena with their bytes, without those that go while they are read."""
    found = {}
    for path in sorted((Path(folder) / MANIFESTS_NAME).glob("[!.]*")):
        with contextlib.suppress(OSError):
            found[path] = path.read_bytes()
    return found


def manifests(folder: str | Path) -> list[Manifest]:
    """Return the manifests of an arena whose holder lives."""
    found = []
    for data in manifest_files(folder).values():
        with contextlib.suppress(MemstoreError):
            found.append(decode_manifest(data))
    return found


def sealed_slots(records: np.ndarray[Any, Any]) -> list[int]:
    """Return the slots with a sealed chunk."""
    return [int(i) for i in np.flatnonzero((records["state"] == SlotState.SEALED) & (records["nbytes"] > 0))]


def has_manifest(folder: str, job: str, step: int, rank: int) -> bool:
    """Return whether the folder has a whole manifest of a shard."""
    return any((m.shard.job, m.shard.step, m.shard.rank) == (job, step, rank) for m in manifests(folder))


# -- damage -----------------------------------------------------------------------------------


def destroy_arena(folder: str | Path) -> int:
    """Remove an arena folder with all its files, also while a holder has it; return its size in bytes."""
    path = Path(folder)
    if not path.exists():
        return 0
    nbytes = arena_nbytes(path)
    # Rename it first, which is one step: so a successor that starts right now finds no folder or its own new one.
    doomed = check_folder(path).with_name(f"{path.name}-lost-{time.time_ns()}")
    path.rename(doomed)
    shutil.rmtree(doomed)
    return nbytes


def remove(folder: str | Path, names: Iterable[str]) -> None:
    """Remove files and folders of an arena folder; "*" is all of it."""
    for path in [Path(folder) if name == "*" else Path(folder) / name for name in names]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def flip_bit(path: str | Path, at: int, bit: int) -> None:
    """Flip one bit of the byte `at` of a file."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ (1 << bit)]), at)
    finally:
        os.close(fd)


def flip_somewhere(rng: random.Random, path: Path) -> bool:
    """Flip a bit of a file's content; return False if it has none."""
    with contextlib.suppress(OSError):
        size = path.stat().st_size
        if size:
            flip_bit(path, rng.randrange(size), rng.randrange(8))
            return True
    return False


def flip_in_slot(folder: str | Path, slot: int, at: int, bit: int) -> None:
    """Flip one bit of the byte `at` of a slot."""
    flip_bit(Path(folder) / ARENA_NAME, slot * _chunk_bytes(folder) + at, bit)


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
    slots = [i for i in sealed_slots(records) if records[i]["digest"].tobytes() == chunk.digest]
    if not slots:
        raise DrillError(f"no sealed slot of {folder} has digest {chunk.digest.hex()}: the shard lacks a chunk")
    flip_in_slot(folder, slots[0], int(where * 997) % chunk.nbytes, 6)
    if chunk_digest(_slot_bytes(folder, slots[0], chunk.nbytes)) == chunk.digest:
        raise DrillError(f"slot {slots[0]} of {folder} has its old digest after a byte was flipped")
    return {"chunk": index, "slot": slots[0], "digest": chunk.digest.hex(), "nbytes": chunk.nbytes}


def _chunk_bytes(folder: str | Path) -> int:
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


# -- is it there? -----------------------------------------------------------------------------


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
            str(record["address"]),
            int(record["port"]),
            secret=secret,
            store=config.store,
            identity=ProbeIdentity(),
            timeout_s=PROBE_S,
            host=host,
            tls=Tls.load(config),
        ).close()
        raise DrillError(
            f"the holder at {record['address']}:{record['port']} still answers: the fault did not take effect"
        )


def is_sealed_damage(folder: str, flipped: dict[str, Any]) -> bool:
    """Return whether the slot table still lists the damaged slot as sealed with the chunk's digest; it must not."""
    record = slot_records(folder)[flipped["slot"]]
    data = _slot_bytes(folder, flipped["slot"], flipped["nbytes"])
    is_claimed = record["state"] == SlotState.SEALED and record["digest"].tobytes().hex() == flipped["digest"]
    return bool(is_claimed) and chunk_digest(data).hex() != flipped["digest"]
