"""How large one host's arena may become, and why: said at `memstore up`, in status and in each refusal (R9)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from memstore.config import Config
from memstore.core.arena.claimed_memory import gib
from memstore.errors import ConfigError
from memstore.shell.arena.memory_limits import (
    ENLARGE,
    RESTART,
    MemoryLimits,
    auto_bytes,
    auto_reason,
    measure,
    most_bytes,
    rooms,
)

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
            field="arena_bytes", value=found.nbytes,
        )  # fmt: skip
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
