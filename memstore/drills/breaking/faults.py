"""Faults on the victim's machine, and the checks that they took effect.

Every function takes and returns plain values, so that it can be called in this process or through a Ray actor. If a
fault did not take effect, it raises a DrillError: a drill that broke nothing proves nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memstore.config import Config
from memstore.core.format.manifest import Manifest, chunk_digest, decode_manifest
from memstore.errors import DrillError, MemstoreError, TransportError
from memstore.shell.arena.folder import check_folder, open_file, read_secret
from memstore.shell.arena.lock import is_alive, owner, process_start_time
from memstore.shell.arena.manifests import MANIFESTS_NAME
from memstore.shell.arena.mapping import ARENA_NAME
from memstore.shell.arena.slot_headers import HEADER_NBYTES, RECORD_DTYPE, SLOTS_NAME, SlotState, read_file_header
from memstore.shell.net.listener import connect_tcp
from memstore.shell.net.tls import Tls

GONE_S = 20.0
POLL_S = 0.01
PROBE_S = 1.0

Process = tuple[int, int]  # pid and start time; with the pid alone, a later process could be taken for it


def holder_process(folder: str) -> Process:
    """Return the live holder of an arena folder; raise DrillError if there is none."""
    holding = owner(folder)
    if holding is None or not holding.is_alive():
        raise DrillError(f"no live holder owns {folder}: the store was not healthy before the drill")
    return holding.pid, holding.start_time


def process_of(pid: int) -> Process:
    """Return a live process with its start time; raise DrillError if it is gone."""
    start = process_start_time(pid)
    if start is None:
        raise DrillError(f"pid {pid} is gone already")
    return pid, start


def kill(processes: list[Process]) -> int:
    """Send SIGKILL to the processes that still run; return how many did."""
    count = 0
    for pid, start in processes:
        if is_alive(pid, start):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                count += 1
    return count


def wait_gone(processes: list[Process], timeout_s: float = GONE_S) -> int:
    """Wait until all processes are gone; return how many. Raise DrillError if one still runs after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while left := [pid for pid, start in processes if is_alive(pid, start)]:
        if time.monotonic() > deadline_s:
            raise DrillError(f"pids {left[:10]} still run {timeout_s:g} s after SIGKILL: the fault did not take effect")
        time.sleep(POLL_S)
    return len(processes)


def freeze(process: Process) -> None:
    """Stop a process with SIGSTOP; raise DrillError if it is gone."""
    pid, start = process
    if not is_alive(pid, start):
        raise DrillError(f"pid {pid} was gone before it was frozen")
    os.kill(pid, signal.SIGSTOP)


def wait_frozen(process: Process, timeout_s: float = GONE_S) -> None:
    """Wait until a process is stopped; raise DrillError if it runs on or is gone."""
    deadline_s = time.monotonic() + timeout_s
    while (state := process_state(process[0])) != "T" or not is_alive(*process):
        if time.monotonic() > deadline_s or state is None:
            raise DrillError(f"pid {process[0]} is in state {state} after SIGSTOP: the fault did not take effect")
        time.sleep(POLL_S)


def freeze_in_put(process: Process, mark: str, timeout_s: float = GONE_S) -> int:
    """Stop a rank while one of its puts is under way, as its mark file shows; return the step of that put.

    The mark is read after the process has stopped; so it cannot change before the process is killed.

    Raises:
        DrillError: the rank was between two puts each time it was stopped.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        freeze(process)
        wait_frozen(process)
        with contextlib.suppress(FileNotFoundError):
            step = Path(mark).read_text()
            if step:
                return int(step)
        thaw(process)
        time.sleep(POLL_S / 10)
    raise DrillError(f"pid {process[0]} was never met inside a put in {timeout_s:g} s: the fault did not take effect")


def freeze_in_persist(process: Process, folder: str, timeout_s: float = GONE_S) -> int:
    """Stop the controller while the newest durable step of a job has parts but no marker; return the step.

    Only the controller orders the marker; so no marker can appear between the look and the kill.

    Raises:
        DrillError: no step was half written any time the controller was stopped.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        freeze(process)
        wait_frozen(process)
        found = [path for path in Path(folder).glob("*/*") if path.name.isdigit() and path.is_dir()]
        newest = max(found, key=lambda path: (int(path.parent.name), int(path.name)), default=None)
        names = {path.name for path in newest.iterdir()} if newest is not None else set()
        if newest is not None and "marker" not in names and any(name.startswith("rank-") for name in names):
            return int(newest.name)
        thaw(process)
        time.sleep(POLL_S / 5)
    raise DrillError(f"no durable step was met half written in {timeout_s:g} s: the fault did not take effect")


def remove_mark(mark: str) -> None:
    """Remove the file in which a rank marks that a put is under way."""
    Path(mark).unlink(missing_ok=True)


def thaw(process: Process) -> bool:
    """Let a frozen process go on (SIGCONT); return False if it is gone, because its successor has killed it (R2)."""
    pid, start = process
    if not is_alive(pid, start):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return True


def process_state(pid: int) -> str | None:
    """Return the state letter of a process in /proc, such as R, S or T; None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def arena_identity(folder: str) -> tuple[int, int] | None:
    """Return device and inode of the arena file, or None if there is none. A newly made arena has other ones."""
    try:
        status = (Path(folder) / ARENA_NAME).lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def secret_of(folder: str) -> bytes:
    """Return the store's secret, for a handshake with a holder; raise DrillError if the folder has none."""
    secret = read_secret(Path(folder))
    if secret is None:
        raise DrillError(f"{folder} has no secret: this is not the arena of a started store")
    return secret


def arena_nbytes(folder: str) -> int:
    """Return the memory that the files of an arena folder take, in bytes."""
    return sum(p.stat().st_blocks * 512 for p in Path(folder).rglob("*") if p.is_file())


def destroy_arena(folder: str) -> int:
    """Remove an arena folder with all its files, also while a holder has it; return its size in bytes."""
    path = Path(folder)
    if not path.exists():
        return 0
    nbytes = arena_nbytes(folder)
    # Rename it first, which is one step: so a successor that starts right now finds no folder or its own new one.
    doomed = check_folder(path).with_name(f"{path.name}-lost-{time.time_ns()}")
    path.rename(doomed)
    shutil.rmtree(doomed)
    return nbytes


def check_destroyed(folder: str, before: tuple[int, int] | None) -> None:
    """Raise DrillError if the arena file from before the fault is still there."""
    now = arena_identity(folder)
    if before is None:
        raise DrillError(f"{folder} had no arena file before the fault: there was nothing to lose")
    if now == before:
        raise DrillError(
            f"the arena file in {folder} is still there: a host that keeps its memory is not lost, so this run would "
            "prove nothing"
        )


def check_silent(record: dict[str, Any], config: Config, secret: bytes) -> None:
    """Raise DrillError if a holder of the store still answers at the victim's address.

    Another program may have got the port since; so an open port proves nothing, only a handshake with the store's
    secret does.
    """
    with contextlib.suppress(TransportError):
        connect_tcp(
            str(record["address"]), int(record["port"]), secret=secret, store=config.store,
            identity={"role": "probe"}, timeout_s=PROBE_S, tls=Tls.load(config),
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
        chunk, slot, offset (in the file), digest (hex, from before the flip), nbytes.

    Raises:
        DrillError: the shard or its slot is missing, or the chunk has its old digest after the write.
    """
    shard = next(
        (m for m in _manifests(folder) if (m.shard.job, m.shard.step, m.shard.rank) == (job, step, rank)), None
    )
    if shard is None:
        raise DrillError(f"{folder} holds no shard of rank {rank} of step {step}: there is nothing to corrupt")
    index = int(where * len(shard.chunks))
    chunk = shard.chunks[index]
    slot, chunk_bytes = _sealed_slot(folder, chunk.digest)
    at = slot * chunk_bytes + int(where * 997) % chunk.nbytes
    fd = open_file(Path(folder), ARENA_NAME, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([byte ^ 0x40]), at)
        damaged = os.pread(fd, chunk.nbytes, slot * chunk_bytes)
    finally:
        os.close(fd)
    if chunk_digest(damaged) == chunk.digest:
        raise DrillError(f"slot {slot} of {folder} has its old digest after a byte was flipped")
    return {"chunk": index, "slot": slot, "offset": at, "digest": chunk.digest.hex(), "nbytes": chunk.nbytes}


def tear_manifest(folder: str, job: str, step: int, rank: int, where: float) -> dict[str, Any]:
    """Cut the manifest file of a shard short; return its path, and its size in bytes before and after.

    Args:
        where: 0 <= where < 1; the share of the file that stays.

    Raises:
        DrillError: the manifest is missing, or the rest of it can still be read as a manifest.
    """
    for path in sorted((Path(folder) / MANIFESTS_NAME).glob("[0-9a-f]*")):
        data = path.read_bytes()
        shard = decode_manifest(data).shard
        if (shard.job, shard.step, shard.rank) == (job, step, rank):
            os.truncate(path, int(where * len(data)))
            if has_manifest(folder, job, step, rank):
                raise DrillError(f"{path} is still a manifest after it was cut short: the fault did not take effect")
            return {"path": str(path), "nbytes": len(data), "left_nbytes": path.stat().st_size}
    raise DrillError(f"{folder} holds no shard of rank {rank} of step {step}: there is nothing to tear")


def has_manifest(folder: str, job: str, step: int, rank: int) -> bool:
    """Return whether the folder has a whole manifest of a shard."""
    return any((m.shard.job, m.shard.step, m.shard.rank) == (job, step, rank) for m in _manifests(folder))


def is_sealed_damage(folder: str, flipped: dict[str, Any]) -> bool:
    """Return whether the slot table still lists the damaged slot as sealed with the chunk's digest; it must not."""
    fd = open_file(Path(folder), SLOTS_NAME, os.O_RDONLY)
    arena = open_file(Path(folder), ARENA_NAME, os.O_RDONLY)
    try:
        chunk_bytes = read_file_header(fd, Path(folder)).chunk_bytes
        record = np.frombuffer(
            os.pread(fd, RECORD_DTYPE.itemsize, HEADER_NBYTES + flipped["slot"] * RECORD_DTYPE.itemsize), RECORD_DTYPE
        )[0]
        data = os.pread(arena, flipped["nbytes"], flipped["slot"] * chunk_bytes)
    finally:
        os.close(fd)
        os.close(arena)
    is_claimed = record["state"] == SlotState.SEALED and record["digest"].tobytes().hex() == flipped["digest"]
    return bool(is_claimed) and chunk_digest(data).hex() != flipped["digest"]


def _manifests(folder: str) -> list[Manifest]:
    """Return the manifests of an arena whose holder lives; change nothing there."""
    found = []
    for path in sorted((Path(folder) / MANIFESTS_NAME).glob("[0-9a-f]*")):
        with contextlib.suppress(OSError, MemstoreError):  # the holder dropped this one just now
            found.append(decode_manifest(path.read_bytes()))
    return found


def _sealed_slot(folder: str, digest: bytes) -> tuple[int, int]:
    """Return the slot that is sealed with a digest, and the size of a slot in bytes."""
    fd = open_file(Path(folder), SLOTS_NAME, os.O_RDONLY)
    try:
        header = read_file_header(fd, Path(folder))
        table = np.frombuffer(os.pread(fd, header.slots_count * RECORD_DTYPE.itemsize, HEADER_NBYTES), RECORD_DTYPE)
    finally:
        os.close(fd)
    for slot in np.flatnonzero(table["state"] == SlotState.SEALED).tolist():
        if table[slot]["digest"].tobytes() == digest:
            return slot, header.chunk_bytes
    raise DrillError(f"no sealed slot of {folder} has digest {digest.hex()}: the shard lacks a chunk")


#: The functions that a drill may call on the victim's machine, by name.
REMOTE_FAULTS: dict[str, Callable[..., Any]] = {
    work.__name__: work
    for work in (
        holder_process, process_of, kill, wait_gone, arena_identity, arena_nbytes, destroy_arena, check_destroyed,
        secret_of, check_silent, flip_chunk, is_sealed_damage, freeze, wait_frozen, thaw, memory_available,
        freeze_in_put, freeze_in_persist, remove_mark, tear_manifest, has_manifest,
    )
}  # fmt: skip
