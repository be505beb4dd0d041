"""Where should the copies go: topology, replica groups, moves and odds. Pure."""

from __future__ import annotations

from placement.groups import Placement, ReplicaGroup, Strategy, Unmet, place
from placement.odds import group_odds, survival_odds
from placement.rebalance import Move, Rebalanced, rebalance
from placement.scatter import scattered
from placement.topology import Host, SpreadLevel, Topology, is_finer, spread_level

__all__ = [
    "Host",
    "Move",
    "Placement",
    "Rebalanced",
    "ReplicaGroup",
    "SpreadLevel",
    "Strategy",
    "Topology",
    "Unmet",
    "group_odds",
    "is_finer",
    "place",
    "rebalance",
    "scattered",
    "spread_level",
    "survival_odds",
]
