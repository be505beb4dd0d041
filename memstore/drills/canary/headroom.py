"""The check whether a scratch job fits into the memory that is free on hosts and machines. Pure: plain values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memstore.cli.output import size_text
from memstore.config import Config
from memstore.core.wire.status_rows import HostRow

STATES = 4  # bytes of a rank's process per byte of its shard: state, restored state, fresh state, slack
MEMORY_SHARE = 0.8  # the canary may take this share of a machine's free memory; the rest is for the cluster's users


def copies_nbytes(nbytes: int, config: Config) -> int:
    """Return how many arena bytes one rank's shard may claim on a host.

    That is the README's memory bill, and one more peer share, because groups may be uneven.
    """
    versions = config.keep_steps + 1
    slots = -(-nbytes // config.chunk_bytes) + 1
    return (config.replicas * versions + 1 + versions) * slots * config.chunk_bytes


def store_refusals(hosts: Sequence[HostRow], need: int) -> list[str]:
    """Return, as text, each host whose arena has less than `need` bytes that are not reserved."""
    found = []
    for row in hosts:
        free = row.stats.limit_bytes - row.stats.reserved_bytes if row.stats is not None else 0
        if free < need:
            found.append(
                f"{row.host} has {size_text(max(0, free))} of its arena left, the canary needs {size_text(need)}"
            )
    return found


def machine_refusals(hosts: Sequence[HostRow], need: int, nbytes: int, available: Mapping[str, int]) -> list[str]:
    """Return, as text, each machine that lacks memory for the growth of its arenas and the states of its ranks.

    Args:
        hosts: Rows of the store's status; hosts with the same `machine` share its memory.
        need: Arena bytes per host.
        nbytes: Bytes of one rank's shard.
        available: By host, the bytes that its machine's processes can still take.
    """
    wanted: dict[str, int] = {}
    names: dict[str, str] = {}
    for row in hosts:
        machine = row.machine or row.host
        unclaimed = row.stats.reserved_bytes - row.stats.claimed_bytes if row.stats is not None else 0
        growth = max(0, unclaimed + need)
        wanted[machine] = wanted.get(machine, 0) + growth + STATES * nbytes
        names.setdefault(machine, row.host)
    found = []
    for machine, nbytes_wanted in wanted.items():
        left = available[names[machine]]
        if nbytes_wanted > MEMORY_SHARE * left:
            found.append(
                f"the machine of {names[machine]} has {size_text(left)} of memory left, of which the canary would take "
                f"{size_text(nbytes_wanted)} and may take {size_text(MEMORY_SHARE * left)}"
            )
    return found
