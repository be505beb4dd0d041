"""What can be rebuilt from what survived, and how fastest? Pure.

Reading order: inventory, lineage, candidates, balance, transfers, planner, simulate, schedule, metrics.
"""

from __future__ import annotations

from recovery.candidates import Rejected
from recovery.inventory import CommitFact, Copy, DurableMarker, Inventory, ShardId, ShardSpec, StepId
from recovery.lineage import AttemptFact, Span, in_lineage, lineage
from recovery.metrics import PHASES, Event, Recovery, ettr, expected_ettr, recoveries, stalls_s
from recovery.planner import RecoveryPlan, plan
from recovery.schedule import predict_seconds, waves
from recovery.simulate import lose, relaunch, what_if
from recovery.transfers import Transfer

__all__ = [
    "PHASES",
    "AttemptFact",
    "CommitFact",
    "Copy",
    "DurableMarker",
    "Event",
    "Inventory",
    "Recovery",
    "RecoveryPlan",
    "Rejected",
    "ShardId",
    "ShardSpec",
    "Span",
    "StepId",
    "Transfer",
    "ettr",
    "expected_ettr",
    "in_lineage",
    "lineage",
    "lose",
    "plan",
    "predict_seconds",
    "recoveries",
    "relaunch",
    "stalls_s",
    "waves",
    "what_if",
]
