"""Where should the copies go: topology, replica groups, moves and odds. Pure."""

from __future__ import annotations

from placement.groups import Placement, ReplicaGroup, Strategy, Unmet, place
from placement.odds import Bond, Odds, bonds_of, bonds_of_placement, survival_odds
from placement.rebalance import Move, Rebalanced, rebalance
from placement.scatter import scattered
from placement.topology import Host, SpreadLevel, Topology, is_finer, spread_level

__all__ = [
    "Bond",
    "Host",
    "Move",
    "Odds",
    "Placement",
    "Rebalanced",
    "ReplicaGroup",
    "SpreadLevel",
    "Strategy",
    "Topology",
    "Unmet",
    "bonds_of",
    "bonds_of_placement",
    "is_finer",
    "place",
    "rebalance",
    "scattered",
    "spread_level",
    "survival_odds",
]
