"""How often hosts, and what many of them share, fail: published figures, each with its source.

Pure: no torch, ray, socket, clock, environment or file access. Read `losses.py` for what follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

DAYS_A_YEAR = 365.25
DAY_S = 86_400.0
# What many hosts share, by the usual name of its label. Dean, "Designs, Lessons and Advice from Building Large
# Distributed Systems" (LADIS 2009), on the first year of a new cluster, of 1,800 servers as he said at Google I/O 2008:
# 20 rack failures and 5 racks that lose half their packets, of 40 to 80 machines each, so of 30 racks; 1 failure of
# power for 500 to 1,000 machines, so of 2.4 feeds; 0.5 of cooling, for all. No newer figures are public.
DEAN_DOMAINS = {"rack": 20 / 30, "switch": 5 / 30, "power": 1 / 2.4, "zone": 0.5}


@dataclass(frozen=True, slots=True)
class Rates:
    """How often a cluster loses what, how long it takes to have it back, and how failures come."""

    failures_per_1000_host_days: float  # of a host, of any cause that ends a job
    memory_share: float = 1.0  # of these, take the host's memory with them, or cut it off: what copies are for
    domain_losses_per_year: Mapping[str, float] = field(default_factory=lambda: dict(DEAN_DOMAINS))  # of one, by level
    # Until another host is in a lost one's place. Wan et al., ByteRobust (SOSP 2025): requeueing a job of 16,384 GPUs
    # takes 454 to 768 s, starting it again with warm standbys 46 to 65 s.
    replace_s: float = 768.0
    # Until a lost host is back itself. StepFun, InfiniteHBD-Trace (400 servers, 349 days): 0.85 days in the median.
    host_repair_s: float = 0.85 * DAY_S
    source: str = ""
    process_share: float = 0.0  # of the failures: the processes end, the host stays
    burst_weights: tuple[float, ...] = (1.0,)  # of bursts of 1 host, of 2, and so on
    is_even: bool = False  # one as long after another as the next, not at random
    is_replay: bool = False  # of a trace, and the rates are what it comes to

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        for name, value in {
            **{each.name: getattr(self, each.name) for each in fields(self) if each.type == "float"},
            **{f"domain_losses_per_year of {level}": rate for level, rate in self.domain_losses_per_year.items()},
        }.items():
            most = 1.0 if name.endswith("_share") else math.inf
            if not (0 <= value <= most and math.isfinite(value)):
                raise ValueError(f"{name} is {value:g}, must be a number from 0 to {most:g}")
        if not self.burst_weights or min(self.burst_weights) < 0 or not 0 < sum(self.burst_weights) < math.inf:
            raise ValueError(f"burst_weights are {self.burst_weights}, must be numbers from 0, not all of them 0")

    @property
    def host_losses_per_s(self) -> float:
        """Return how often one host is lost with its memory."""
        return self.failures_per_1000_host_days / 1000 * self.memory_share / DAY_S

    def domain_losses_per_s(self, level: str) -> float:
        """Return how often one domain of a level is lost whole; 0 where no rate is known."""
        return self.domain_losses_per_year.get(level, 0.0) / DAYS_A_YEAR / DAY_S


_STEPFUN = Rates(
    467 / (400 * 349) * 1000,
    285 / 466,
    source="InfiniteHBD-Trace (StepFun), 400 servers, 349 days, 467 faults in service",
)
# 419 unexpected interruptions in 54 days on 2,048 hosts. Copies are for the 88 of maintenance, power, chassis, boards,
# CPU, memory and SSD (46), or of switch, cable and NIC (42). After the others, of GPUs and software, memory is there
# and can be read; software, NCCL's watchdog and dependencies (63) leave the host where it is.
_LLAMA3 = Rates(
    419 / (2048 * 54) * 1000,
    88 / 419,
    source="Llama 3 405B, 16,384 H100 (Meta, arXiv 2407.21783, table 5)",
    process_share=63 / 419,
)
PRESETS = {
    "llama3": _LLAMA3,
    "llama3-16k": _LLAMA3,
    # 6.50 failures in 1,000 node-days. Which of them leave the memory is not published: all are counted.
    "rsc": Rates(6.50, source="RSC-1, 16,000 A100 (Kokolis et al., HPCA 2025, arXiv 2410.21680)"),
    # 401 bursts of faults at most 10 minutes apart. What is unknown counts as lost memory.
    "stepfun-bursts": replace(_STEPFUN, process_share=23 / 466, burst_weights=(361, 29, 6, 1, 2, 1, 0, 0, 1)),
    "stepfun-trace": replace(_STEPFUN, is_replay=True),
    "gemini": Rates(15.0, source="Gemini (SOSP 2023), 1.5 % of the machines a day", is_even=True),
}
