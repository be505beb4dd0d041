"""How much memory the arena may take on this machine: measured numbers, then pure decisions (R9).

`/dev/shm` is often as large as RAM, so that the OOM killer comes before ENOSPC, or 64 MB in a
container. Hence the smallest of three rooms: the file system's, the cgroup's, and what Ray's memory
monitor leaves before it starts to kill workers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memstore.config import Config
from memstore.core.arena.claimed_memory import gib
from memstore.errors import ConfigError
from memstore.shell.arena.folder import held_bytes

MONITOR_SHARE = 0.9  # stay this far below Ray's memory-monitor threshold
FREE_SHARE = 0.9  # share of the free bytes of arena_dir, for "auto"
ENLARGE = "enlarge arena_dir (mount -o remount,size=..., docker --shm-size, a larger emptyDir) or set another one"
RESTART = "`memstore down` and `memstore up`"  # replicas stay; limits are measured again
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Everything admission looks at, in bytes."""

    arena_dir: str
    ram_total_bytes: int
    ram_used_bytes: int  # total less available, as Ray's monitor counts
    fs_total_bytes: int
    fs_free_bytes: int
    ray_object_store_bytes: int = 0  # length of Ray's object store files in the same file system
    ray_object_store_claim_bytes: int = 0  # bytes they have still to claim there: they are sparse
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None  # without reclaimable page cache
    ray_threshold: float = 0.95
    hosts_on_machine: int = 1
    held_bytes: int = 0  # pages of this host's own arena, which are not free and yet its own
    beside_bytes: tuple[int, ...] = ()  # pages of each other arena of the store on this machine


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit, how much it leaves, and how it adds up."""

    name: str
    limit_bytes: int
    room_bytes: int
    words: str


def measure(
    arena_dir: str | os.PathLike[str],
    *,
    hosts_on_machine: int = 1,
    ray_threshold: float = 0.95,
    ray_object_store_bytes: int | None = None,
    folder: Path | None = None,
    cgroup_root: str | os.PathLike[str] = "/sys/fs/cgroup",
    proc_root: str | os.PathLike[str] = "/proc",
) -> MemoryLimits:
    """Read the numbers of this machine.

    Args:
        arena_dir: Where arenas lie.
        hosts_on_machine: Holders that share this machine's memory.
        ray_threshold: Value of RAY_memory_usage_threshold.
        ray_object_store_bytes: Object store of this machine's Ray nodes as the cluster reports it; what
            the files in `arena_dir` do not show of it counts as still to be claimed. None: unknown.
        folder: This host's arena folder, beside those of the store's other hosts; None: nothing is held.
        cgroup_root: Where cgroups are mounted.
        proc_root: Where proc is mounted.

    Raises:
        ConfigError: `arena_dir` cannot be read, or a number is out of range.
    """
    if hosts_on_machine < 1 or not 0 < ray_threshold <= 1:
        raise ConfigError(
            f"hosts_on_machine={hosts_on_machine} must be at least 1 and ray_threshold={ray_threshold} in (0, 1]"
        )
    try:
        room = os.statvfs(arena_dir)
        device = os.stat(arena_dir).st_dev
    except OSError as error:
        raise ConfigError(
            f"arena_dir={os.fspath(arena_dir)!r} cannot be used: {error.strerror}; set arena_dir"
        ) from error
    proc = Path(proc_root)
    meminfo = meminfo_bytes(proc)
    ram_total = meminfo["MemTotal"]
    ram_available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    is_unlimited = room.f_blocks == 0  # a tmpfs of size=0
    found, resident = _ray_object_store(proc, device)
    store = max(found, ray_object_store_bytes or 0)
    held = {each.parent: held_bytes(each.parent) for each in folder.parent.glob("*/arena")} if folder else {}
    limit, used = _tightest_cgroup(proc, Path(cgroup_root), sum(held.values()))
    return MemoryLimits(
        arena_dir=os.fspath(arena_dir),
        ram_total_bytes=ram_total,
        ram_used_bytes=ram_total - ram_available,
        fs_total_bytes=ram_total if is_unlimited else room.f_blocks * room.f_frsize,
        fs_free_bytes=ram_available if is_unlimited else room.f_bavail * room.f_frsize,
        ray_object_store_bytes=store,
        ray_object_store_claim_bytes=max(0, store - resident),
        cgroup_limit_bytes=limit,
        cgroup_used_bytes=used,
        ray_threshold=ray_threshold,
        hosts_on_machine=hosts_on_machine,
        held_bytes=held.pop(folder, 0) if folder else 0,
        beside_bytes=tuple(held.values()),
    )


def auto_bytes(limits: MemoryLimits) -> int:
    """Return what `arena_bytes="auto"` means: a ceiling for one host's arena, not a promise of room.

    Half of the memory limit without Ray's object store, at most 0.9 of the bytes that would be free in `arena_dir`
    with Ray's own claimed and the store's arenas empty: parted evenly among the hosts on this machine, but for those
    that hold more than such a part already. They keep it, and the others part the rest.
    """
    return max(
        limits.held_bytes,
        even_part(_auto_pool(limits), (limits.held_bytes, *limits.beside_bytes), limits.hosts_on_machine),
    )


def auto_reason(limits: MemoryLimits) -> str:
    """Say what decides `auto_bytes`."""
    if _beside_ray(limits) <= _free_share(limits):
        what = "pod memory limit (cgroup)" if limits.cgroup_limit_bytes else "memory of this machine"
        total = min(limits.ram_total_bytes, limits.cgroup_limit_bytes or limits.ram_total_bytes)
        text = f"half of the {what}, {gib(total)}"
        text += (
            f" less Ray's object store, {gib(limits.ray_object_store_bytes)}" if limits.ray_object_store_bytes else ""
        )
    else:
        text = f"{FREE_SHARE:g} of what {limits.arena_dir}, {gib(limits.fs_total_bytes)}, has free"
        text += (
            f" with Ray's object store, {gib(limits.ray_object_store_bytes)}" if limits.ray_object_store_bytes else ""
        )
    hosts = max(limits.hosts_on_machine, 1 + len(limits.beside_bytes))
    return text + (f", for {hosts} hosts on this machine" if hosts > 1 else "")


def beyond_limit(why: str) -> str:
    """Return the remedies where an arena's limit is reached, given what set it."""
    enlarge = f"{ENLARGE}, then {RESTART} · " if "has free" in why else ""
    return (
        f"{enlarge}{RESTART} with --arena-bytes SIZE for a larger limit · `memstore rm` a job that is not needed · "
        "spread the job over more hosts · lower replicas or keep_steps, if either is above 1"
    )


def most_bytes(limits: MemoryLimits) -> tuple[int, str]:
    """Return the bytes an arena could have with nothing else running, and the reason of that bound."""
    found = [(limits.fs_total_bytes, f"size of the file system {limits.arena_dir}")]
    found.append(
        (_usable(limits, limits.ram_total_bytes), "memory of this machine less what Ray's memory monitor keeps")
    )
    if limits.cgroup_limit_bytes is not None:
        usable = _usable(limits, limits.cgroup_limit_bytes)
        found.append((usable, "pod memory limit (cgroup) less what Ray's memory monitor keeps"))
    return min(found)


def _usable(limits: MemoryLimits, nbytes: int) -> int:
    return int(nbytes * MONITOR_SHARE * limits.ray_threshold)


def _auto_pool(limits: MemoryLimits) -> int:
    """Return what all arenas of the store on this machine may have together."""
    return min(_beside_ray(limits), _free_share(limits))


def _beside_ray(limits: MemoryLimits) -> int:
    memory = min(limits.ram_total_bytes, limits.cgroup_limit_bytes or limits.ram_total_bytes)
    return max(0, memory - limits.ray_object_store_bytes) // 2


def _free_share(limits: MemoryLimits) -> int:
    without_us = limits.fs_free_bytes + limits.held_bytes + sum(limits.beside_bytes)
    return int(FREE_SHARE * max(0, without_us - limits.ray_object_store_claim_bytes))


def even_part(pool: int, helds: Sequence[int], count: int) -> int:
    """Return the part of each of `count` holders that together have `pool`, where some hold more than that already.

    >>> even_part(8, [5, 0], 2), even_part(8, [1, 1], 2), even_part(8, [9, 0], 2)
    (3, 4, 0)
    """
    rest, left = pool, max(count, len(helds))
    for held in sorted(helds, reverse=True):
        if held * left <= rest:
            break
        rest, left = rest - held, left - 1
    return max(0, rest) // max(1, left)


def rooms(limits: MemoryLimits) -> tuple[MemoryLimit, ...]:
    """Return the limits with the bytes each still leaves; the smallest decides."""
    claim = limits.ray_object_store_claim_bytes
    found = [
        MemoryLimit(
            f"file system {limits.arena_dir}",
            limits.fs_total_bytes,
            limits.fs_free_bytes - claim,
            f"free {gib(limits.fs_free_bytes)}, of which Ray's object store claims {gib(claim)} more",
        ),
        _memory_room(limits, "memory of this machine", limits.ram_total_bytes, limits.ram_used_bytes),
    ]
    if limits.cgroup_limit_bytes is not None:
        found.append(
            _memory_room(limits, "pod memory limit (cgroup)", limits.cgroup_limit_bytes, limits.cgroup_used_bytes or 0)
        )
    return tuple(found)


def admission(limits: MemoryLimits, *, asked_bytes: int, claimed_bytes: int) -> str | None:
    """Say why an arena may not grow to `asked_bytes`, with the numbers and the remedy; None if it may.

    `claimed_bytes` of it are claimed already, so they are among the used bytes of `limits`.
    """
    growth = asked_bytes - claimed_bytes
    table = rooms(limits)
    tight = min(table, key=lambda room: room.room_bytes)
    if growth <= 0 or growth <= tight.room_bytes:
        return None
    may_take = claimed_bytes + max(0, tight.room_bytes)
    lines = [
        f"the arena needs {gib(asked_bytes)} ({gib(claimed_bytes)} claimed already), may take {gib(may_take)}:"
        f" the {tight.name} is the tightest"
    ]
    lines += [f"  {room.name} {gib(room.limit_bytes)}: {room.words}; leaves {gib(room.room_bytes)}" for room in table]
    lines.append("  do one of: " + " · ".join(_remedies(limits, table, growth)))
    return "\n".join(lines)


def _memory_room(limits: MemoryLimits, name: str, limit: int, used: int) -> MemoryLimit:
    usable = _usable(limits, limit)
    claim = limits.ray_object_store_claim_bytes
    words = (
        f"used {gib(used)}, Ray's object store claims {gib(claim)} more,"
        f" kept free for Ray's memory monitor {gib(limit - usable)}"
    )
    return MemoryLimit(name, limit, usable - used - claim, words)


def _remedies(limits: MemoryLimits, table: tuple[MemoryLimit, ...], growth: int) -> Iterator[str]:
    for room in table:
        missing = growth - room.room_bytes
        if missing <= 0:
            continue
        if room.name.startswith("file system"):
            yield (
                f"enlarge {limits.arena_dir} to {gib(room.limit_bytes + missing)}"
                " (mount -o remount,size=..., docker --shm-size, a larger emptyDir) or set arena_dir"
            )
        else:
            needed = room.limit_bytes + int(missing / (MONITOR_SHARE * limits.ray_threshold)) + 1
            yield f"raise the {room.name} to {gib(needed)}"
    if limits.ray_object_store_claim_bytes:
        yield f"start Ray with a smaller --object-store-memory (now {gib(limits.ray_object_store_bytes)})"
    yield "spread the job over more hosts, or lower replicas or keep_steps, if either is above 1"


def meminfo_bytes(proc: Path) -> dict[str, int]:
    """Return /proc/meminfo in bytes."""
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        table = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines if line)}
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"cannot read {proc / 'meminfo'}: {error}; memstore needs Linux with proc mounted") from error
    if "MemTotal" not in table:
        raise ConfigError(f"{proc / 'meminfo'} has no MemTotal; memstore needs Linux with proc mounted")
    return table


def _ray_object_store(proc: Path, device: int) -> tuple[int, int]:
    """Return (length, resident bytes) of Ray's object store files on a device.

    Ray unlinks `plasmaXXXXXX` as soon as it made it, so no listing of `/dev/shm` shows it: it is
    found among the open files of the processes that we may look into.
    """
    seen: dict[int, tuple[int, int]] = {}
    for process in proc.glob("[0-9]*"):
        try:
            for entry in os.scandir(process / "fd"):
                name = os.path.basename(os.readlink(entry.path))
                if name.startswith("plasma"):
                    status = os.stat(entry.path)
                    if status.st_dev == device:
                        seen[status.st_ino] = (status.st_size, status.st_blocks * 512)
        except OSError:
            continue  # another user's process, or one that just ended
    return sum(size for size, _ in seen.values()), sum(resident for _, resident in seen.values())


def _tightest_cgroup(proc: Path, root: Path, held: int) -> tuple[int | None, int | None]:
    """Return (limit, used) of the cgroup around us that leaves least, v1 or v2; (None, None) without a limit."""
    found = [pair for folder in _cgroup_folders(proc, root) if (pair := _cgroup_pair(folder, held)) is not None]
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, None))


def _cgroup_folders(proc: Path, root: Path) -> Iterator[Path]:
    """Yield our memory cgroup's folder and every one above it, down from the hierarchy's root."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top = root
        elif "memory" in controllers.split(","):
            top = root / "memory"
        else:
            continue
        yield top  # in a container whose own path is not mounted, this is its cgroup
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(1, len(parts) + 1):
            yield top.joinpath(*parts[:depth])


def _cgroup_pair(folder: Path, held: int) -> tuple[int, int] | None:
    """Return (limit, used) of one cgroup, or None.

    A page of memory belongs to the cgroup that wrote it first. The `held` bytes of arenas that a container before this
    one wrote are not in this one's count, and yet take room of the pod's: what is missing is added (D304).
    """
    for limit_name, used_name, cache_name, shared_name in (
        ("memory.max", "memory.current", "inactive_file", "shmem"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_shmem"),
    ):
        try:
            limit = (folder / limit_name).read_text(encoding="ascii").strip()
            used = int((folder / used_name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        if limit == "max" or int(limit) >= _UNLIMITED_BYTES:
            return None
        elsewhere = max(0, held - _stat_value(folder, shared_name, held))
        return int(limit), max(0, used - _stat_value(folder, cache_name, 0)) + elsewhere
    return None


def _stat_value(folder: Path, name: str, unknown: int) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return unknown
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), unknown)


# -- arena limit --------------------------------------------------------------------------------------
# How large one host's arena may become, and why: said at `memstore up`, in status and in each refusal (R9).


log = logging.getLogger("memstore")
SMALL_BYTES = 1 << 30  # an "auto" limit below this is seldom wanted


@dataclass(frozen=True, slots=True)
class ArenaLimit:
    """The ceiling of one arena."""

    nbytes: int
    why: str = "arena_bytes"
    warning: str = ""  # it is small, or more than is available now; with the remedy


def arena_limit(config: Config, folder: Path, *, hosts_on_machine: int = 1) -> ArenaLimit:
    """Measure this machine and return the limit of the arena in `folder`.

    Raises:
        ConfigError: There is no room for one chunk, or a new arena is to have more than this machine could ever give.
    """
    limits = measure(config.arena_dir, hosts_on_machine=hosts_on_machine, folder=folder)
    found = _auto(limits) if config.arena_bytes == "auto" else _asked(limits, int(config.arena_bytes))
    if found.nbytes < config.chunk_bytes:
        raise ConfigError(
            f"arena_bytes={found.nbytes} ({found.why}) has no room for one chunk of chunk_bytes={config.chunk_bytes}; "
            f"do one of: {ENLARGE}, a smaller ray start --object-store-memory, "
            "or say how much: `memstore up --arena-bytes SIZE`",
            field="arena_bytes",
            value=found.nbytes,
        )
    if found.warning:
        log.warning("memstore: %s", found.warning)
    return found


def _auto(limits: MemoryLimits) -> ArenaLimit:
    nbytes, why = auto_bytes(limits), auto_reason(limits)
    small = ""
    if nbytes < SMALL_BYTES:
        small = (
            f"the arena's limit is only {gib(nbytes)}: {why}. If that is too little: {ENLARGE}, then {RESTART}, with "
            "--arena-bytes SIZE for a limit of your own"
        )
    return ArenaLimit(nbytes, why, small)


def _asked(limits: MemoryLimits, nbytes: int) -> ArenaLimit:
    most, name = most_bytes(limits)
    remedy = f"{ENLARGE}, or a smaller --arena-bytes"
    if nbytes > most:
        why = f"arena_bytes is {gib(nbytes)}, and {gib(most)} can ever be had here: the {name}; do one of: {remedy}"
        if not limits.held_bytes:
            raise ConfigError(why, field="arena_bytes", value=nbytes)
        return ArenaLimit(nbytes, warning=why)  # stored replicas must not be lost for a wrong limit
    now = limits.held_bytes + max(0, min(room.room_bytes for room in rooms(limits)))
    if nbytes > now:
        tight = min(rooms(limits), key=lambda room: room.room_bytes)
        why = f"arena_bytes is {gib(nbytes)}, and {gib(now)} can be had now: the {tight.name}, {tight.words}; "
        return ArenaLimit(nbytes, warning=f"{why}if it does not become free: {remedy}")
    return ArenaLimit(nbytes)
