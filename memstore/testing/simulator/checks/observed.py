"""What the checks have seen themselves: the truth that the store is held against."""

from __future__ import annotations

from memstore.core.cluster.facts import StepCommitted
from recovery.inventory import ShardId, StepId

Replica = tuple[ShardId, str]  # a shard and the digest of its manifest


class Observed:
    """Everything that happened in one simulation so far, as far as some check needs it."""

    def __init__(self) -> None:
        self.contents: dict[ShardId, list[list[bytes]]] = {}  # what ranks put under a name, chunk by chunk
        self.facts: dict[StepId, StepCommitted] = {}
        self.acked: set[StepId] = set()  # commits that some ticket was sent
        self.decided: dict[tuple[int, str], StepId | None] = {}  # (attempt, key of the launch) -> step of its get
        self.ever: dict[Replica, set[str]] = {}  # -> hosts that ever had all of it, spoilt or not
        self.whole: dict[str, set[Replica]] = {}  # host -> replicas whose every byte is right
        self.believed: dict[str, set[Replica]] = {}  # host -> the same and those that rot: that is noticed later
        self.injected: dict[str, int] = {}  # kind of fault -> how many
        self.cause = ""  # the fault that is being done at this moment
        self.is_healed = False  # all faults are over
        self.starts_over = False  # everything was lost, beyond the promise: the user says connect(fresh=True)
        self.steps_put = self.restores = self.acked_after_heal = 0
        self.degraded = ""  # why the newest commit has too few copies
