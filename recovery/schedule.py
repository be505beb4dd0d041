"""In which order do transfers run, and how long will they take? Keeps every link within its limit.

Pure. Imports `planner` and `transfers`.
"""

from __future__ import annotations

from collections.abc import Iterable

from recovery.planner import RecoveryPlan
from recovery.transfers import DURABLE, LOCAL, Transfer


def waves(transfers: Iterable[Transfer], *, inflight_max: int = 4) -> tuple[tuple[Transfer, ...], ...]:
    """Return the transfers in waves in which no source sends and no target receives more than `inflight_max`.

    Local runs use no link and go first. Each other transfer goes, in the order given, to the first wave that has
    room at both its ends. A wave is passed over only because one end is full there, so a busiest end with d transfers
    makes at most 2 * ceil(d / inflight_max) - 1 waves; ceil(d / inflight_max) is the least possible.

    Raises:
        ValueError: `inflight_max` is below 1.

    Source: first-fit edge colouring; the bound is counted above (ours).
    """
    if inflight_max < 1:
        raise ValueError(f"inflight_max is {inflight_max}; it must be 1 or more")
    ordered: list[list[Transfer]] = []
    busy: list[dict[tuple[str, str], int]] = []  # per wave: end of a link -> transfers there
    for transfer in transfers:
        ends = _ends(transfer)
        number = 0
        while number < len(busy) and any(busy[number].get(end, 0) >= inflight_max for end in ends):
            number += 1
        if number == len(busy):
            ordered.append([])
            busy.append({})
        ordered[number].append(transfer)
        for end in ends:
            busy[number][end] = busy[number].get(end, 0) + 1
    return tuple(tuple(wave) for wave in ordered)


def _ends(transfer: Transfer) -> tuple[tuple[str, str], ...]:
    if transfer.tier == LOCAL:
        return ()
    into = ("in", transfer.target_host)
    return (into,) if transfer.source is None else (("out", transfer.source), into)


def predict_seconds(
    plan: RecoveryPlan,
    *,
    link_bytes_per_s: float,
    durable_bytes_per_s: float | None = None,
    verify_bytes_per_s: float | None = None,
) -> float:
    """Return a lower estimate of the seconds that staging the plan takes.

    The busiest of: a host's sending or receiving side at `link_bytes_per_s`; durable storage at its aggregate
    `durable_bytes_per_s`; digesting on the host that stages most at `verify_bytes_per_s` (None: free). All overlap.

    Raises:
        ValueError: a rate is not above zero, or the plan reads durable storage and its rate is not given.
    """
    if plan.bytes_durable and durable_bytes_per_s is None:
        raise ValueError(f"the plan reads {plan.bytes_durable} bytes from durable storage; give durable_bytes_per_s")
    for name, rate in (("link", link_bytes_per_s), ("durable", durable_bytes_per_s), ("verify", verify_bytes_per_s)):
        if rate is not None and not rate > 0:
            raise ValueError(f"{name}_bytes_per_s is {rate}; it must be above zero")
    links: dict[tuple[str, str], int] = {}
    staged: dict[str, int] = {}
    for transfer in plan.transfers:
        staged[transfer.target_host] = staged.get(transfer.target_host, 0) + transfer.nbytes
        for end in _ends(transfer):
            links[end] = links.get(end, 0) + transfer.nbytes
    seconds = max(links.values(), default=0) / link_bytes_per_s
    if durable_bytes_per_s is not None:
        durable = sum(transfer.nbytes for transfer in plan.transfers if transfer.tier == DURABLE)
        seconds = max(seconds, durable / durable_bytes_per_s)
    if verify_bytes_per_s is not None:
        seconds = max(seconds, max(staged.values(), default=0) / verify_bytes_per_s)
    return seconds
