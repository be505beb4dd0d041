"""Would it help to know which servers failed lately? `python -m benchmarks.prediction fault_trace.json`.

Replays a trace of faults (StepFun's InfiniteHBD-Trace) against rules such as "a server that failed twice within a week
fails again": how many of their alarms come true, how many faults they foresee, and what acting on them would have
saved. An alarm is raised when a server comes back into service; faults of one server that overlap are one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memstore.core.forecast import MEMSTORE_DETECTS_S, STANDBY_S

DAY_S = 86_400.0
NOT_IN_SERVICE = {"Stress Test Failure", "Test", "Change", "Training Task Troubleshooting"}  # classes of the trace
PUT_S, DURABLE_S = 78.0, 1800.0  # put_every="auto" of 2,048 hosts (`memstore simulate`); durable_every's default
#: Another server takes its place before it fails, or after: standby, and what had to be noticed and trained again.
MOVED_S, FAILED_S = STANDBY_S, STANDBY_S + MEMSTORE_DETECTS_S + PUT_S / 2


class Fault(NamedTuple):
    """A server was out of service, in seconds since the trace began."""

    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Rule:
    """An alarm: so many faults within a time foretell another one within a time."""

    faults: int
    within_days: float
    ahead_days: float


RULES = [Rule(1, 0, 1), Rule(1, 0, 7), Rule(2, 7, 1), Rule(2, 7, 7), Rule(2, 30, 7), Rule(3, 30, 7), Rule(3, 30, 30)]


@dataclass(frozen=True, slots=True)
class Score:
    """What became of a rule's alarms."""

    alarms: int
    true_alarms: int
    foreseen: int  # faults within the time of some alarm
    faults: int
    within_put: int  # faults so soon after an alarm that a put ahead of its turn is newer than the last one
    within_durable: int  # the same of a durable write

    @property
    def precision(self) -> float:
        """Return the share of alarms that come true."""
        return self.true_alarms / self.alarms if self.alarms else 0.0

    @property
    def recall(self) -> float:
        """Return the share of faults that were foreseen."""
        return self.foreseen / self.faults if self.faults else 0.0

    @property
    def moving_saves_s(self) -> float:
        """Return the seconds saved if every alarm replaced its server: of true alarms less those of false ones."""
        return self.true_alarms * (FAILED_S - MOVED_S) - (self.alarms - self.true_alarms) * MOVED_S


def faults_of(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Fault]]:
    """Return each server's faults in service, in order; what overlaps is one."""
    found: dict[str, list[Fault]] = {}
    since: dict[str, list[float]] = {}
    for event in sorted(events, key=lambda each: (each["event_time"], each["event_type"] == "fault_end")):
        if event["fault_type"]["Class"] in NOT_IN_SERVICE:
            continue
        open_s, at_s = since.setdefault(event["node_id"], []), event["event_time"] * DAY_S
        if event["event_type"] == "fault_start":
            open_s.append(at_s)
        elif len(open_s) > 1:
            open_s.remove(max(open_s))
        elif open_s:
            found.setdefault(event["node_id"], []).append(Fault(open_s.pop(), at_s))
    return found


def score(servers: Mapping[str, Sequence[Fault]], rule: Rule) -> Score:
    """Return what a rule would have foretold."""
    alarms = true_alarms = within_put = within_durable = 0
    foreseen: set[tuple[str, int]] = set()
    for name, faults in servers.items():
        for number, fault in enumerate(faults):
            recent = [each for each in faults[: number + 1] if fault.ended_s - each.ended_s <= rule.within_days * DAY_S]
            if len(recent) < rule.faults:
                continue
            gaps_s = [each.began_s - fault.ended_s for each in faults[number + 1 :]]
            ahead = [at for at, gap_s in enumerate(gaps_s, number + 1) if gap_s <= rule.ahead_days * DAY_S]
            alarms, true_alarms = alarms + 1, true_alarms + bool(ahead)
            foreseen.update((name, at) for at in ahead)
            within_put += bool(gaps_s) and gaps_s[0] <= PUT_S
            within_durable += bool(gaps_s) and gaps_s[0] <= DURABLE_S
    count = sum(map(len, servers.values()))
    return Score(alarms, true_alarms, len(foreseen), count, within_put, within_durable)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each rule."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__)
    parser.add_argument("trace", type=Path, help="fault_trace.json of stepfun-ai/InfiniteHBD-Trace")
    servers = faults_of(json.loads(parser.parse_args(arguments).trace.read_text(encoding="utf-8")))
    print(f"{sum(map(len, servers.values()))} faults in service on {len(servers)} servers")
    print("rule                                       alarms  precision  recall  in 78 s  in 30 min  moving saves")
    for rule in RULES:
        row = score(servers, rule)
        what = f"{rule.faults} within {rule.within_days:g} d" if rule.faults > 1 else "each"
        name, saves_h = f"{what}: again within {rule.ahead_days:g} d", row.moving_saves_s / 3600
        shares = f"{row.precision:10.3f} {row.recall:7.3f}"
        print(f"{name:42} {row.alarms:6} {shares} {row.within_put:8} {row.within_durable:10} {saves_h:11.1f} h")


if __name__ == "__main__":
    main()
