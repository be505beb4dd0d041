"""Where should the copies go: topology, replica groups, moves and odds. Pure."""

from __future__ import annotations

from placement.groups import Placement, ReplicaGroup, Strategy, Unmet, place
from placement.odds import Odds, Part, parts_of, parts_of_placement, survival_odds
from placement.rebalance import Move, Rebalanced, rebalance
from placement.scatter import scattered
from placement.topology import Host, SpreadLevel, Topology, is_finer, spread_level

__all__ = [
    "Host",
    "Move",
    "Odds",
    "Part",
    "Placement",
    "Rebalanced",
    "ReplicaGroup",
    "SpreadLevel",
    "Strategy",
    "Topology",
    "Unmet",
    "is_finer",
    "parts_of",
    "parts_of_placement",
    "place",
    "rebalance",
    "scattered",
    "spread_level",
    "survival_odds",
]
