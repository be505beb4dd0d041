"""Whether a scratch job fits beside what is there, from what hosts and machines say. Decides only, on plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memstore.config import Config
from memstore.drills.model.report import gib

STATES = 4  # bytes of a rank's process per byte of its shard: state, restored state, one made anew, slack
MEMORY_SHARE = 0.8  # of what a machine has left; the rest is for those whose cluster it is


def copies_nbytes(nbytes: int, config: Config) -> int:
    """Return what one rank's shard may claim a host: the README's memory bill, and one more guest for uneven groups."""
    versions = config.keep_steps + 1
    slots = -(-nbytes // config.chunk_bytes) + 1
    return (config.replicas * versions + 1 + versions) * slots * config.chunk_bytes


def store_refusals(hosts: Sequence[Mapping[str, Any]], need: int) -> list[str]:
    """Return, in words, each host whose arena has less than `need` bytes that nobody reserved."""
    found = []
    for row in hosts:
        stats = row["stats"]
        free = int(stats.get("limit_bytes", 0)) - int(stats.get("reserved_bytes", 0))
        if free < need:
            found.append(f"{row['host']} has {gib(max(0, free))} of its arena left, the canary needs {gib(need)}")
    return found


def machine_refusals(
    hosts: Sequence[Mapping[str, Any]], need: int, nbytes: int, available: Mapping[str, int]
) -> list[str]:
    """Return, in words, each machine that lacks memory for the arenas' growth and the ranks' states.

    Args:
        hosts: Rows of the store's status; those with one `machine` share its memory.
        need: Arena bytes per host.
        nbytes: Bytes of one rank's shard.
        available: By host, the bytes its machine can still give to processes.
    """
    wanted: dict[str, int] = {}
    names: dict[str, str] = {}
    for row in hosts:
        stats, machine = row["stats"], str(row["machine"] or row["host"])
        growth = max(0, int(stats.get("reserved_bytes", 0)) + need - int(stats.get("claimed_bytes", 0)))
        wanted[machine] = wanted.get(machine, 0) + growth + STATES * nbytes
        names.setdefault(machine, str(row["host"]))
    return [
        f"the machine of {names[machine]} has {gib(available[names[machine]])} of memory left, of which the canary "
        f"would take {gib(nbytes_wanted)} and may take {gib(MEMORY_SHARE * available[names[machine]])}"
        for machine, nbytes_wanted in wanted.items()
        if nbytes_wanted > MEMORY_SHARE * available[names[machine]]
    ]
