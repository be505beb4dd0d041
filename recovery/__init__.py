"""What can be rebuilt from what survived, and how fastest? Pure.

Reading order: inventory, lineage, candidates, balance, transfers, planner.
"""

from __future__ import annotations

from recovery.candidates import Rejected
from recovery.inventory import CommitFact, Copy, DurableMarker, Inventory, ShardId, ShardSpec, StepId
from recovery.lineage import AttemptFact, Span, in_lineage, lineage
from recovery.planner import RecoveryPlan, lose, plan, relaunch, what_if
from recovery.transfers import Transfer

__all__ = [
    "AttemptFact",
    "CommitFact",
    "Copy",
    "DurableMarker",
    "Inventory",
    "RecoveryPlan",
    "Rejected",
    "ShardId",
    "ShardSpec",
    "Span",
    "StepId",
    "Transfer",
    "in_lineage",
    "lineage",
    "lose",
    "plan",
    "relaunch",
    "what_if",
]
