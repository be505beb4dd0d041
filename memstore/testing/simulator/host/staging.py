"""Begins what restores bring to one simulated holder (core/holder/stage.py), and is its reader (R23, R25)."""

from __future__ import annotations

import random
from typing import Any

from memstore.core.arena.replica_index import StagedKey
from memstore.core.format.manifest import chunk_digest, decode_manifest
from memstore.core.holder import reads
from memstore.core.holder import stage as procedure
from memstore.core.holder.stage import BringOrder
from memstore.core.holder.state import HolderState
from memstore.core.wire.replies import ShardPlaced
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.driver import Driver
from memstore.testing.simulator.host.rank_link import RankLink
from memstore.testing.simulator.world.virtual_time import Thread

Body = dict[str, Any]
READ_S = (0.0, 0.05)  # until a reader has copied what was staged for it
SLOW_SHARE, SLOW_S = 0.2, 2.0  # of readers that take longer than a broken link takes to come back


class Stager:
    """What is staged on one holder."""

    def __init__(self, holder: HostContext, state: HolderState, driver: Driver) -> None:
        self.holder, self.state, self.driver = holder, state, driver
        self.slowness = random.Random(f"readers {holder.world.scenario.seed} {holder.host_id}")

    def order(self, order: BringOrder) -> None:
        """Stage one shard; the end is reported."""
        procedure.begin(self.state, order)
        self.driver.start(procedure.run(self.state, order))

    def read(self, link: RankLink, call_id: int, pinned: ShardPlaced, body: Body, *, is_range: bool) -> Thread:
        """Copy out what an answer names and digest it again, as a reader does; then let go of it (R7)."""
        holder, rank = self.holder, link.process
        slow_s = self.slowness.uniform(0.0, SLOW_S) if self.slowness.random() < SLOW_SHARE else 0.0
        yield holder.world.network.rng.uniform(*READ_S) + slow_s
        wanted = [index for index, slot in enumerate(pinned.slots) if slot is not None]
        read = rank.read([pinned.slots[index] for index in wanted])
        if rank.link is link and holder.is_up:
            holder.checker.restores.read_whole(rank, is_pinned=pinned.pin in link.pins)
        if isinstance(rank.link, RankLink) and rank.holder is not None and rank.holder.is_up:
            reads.give_back(rank.link, pinned.pin)  # as a rank does, on the link that it has now
        chunks = decode_manifest(pinned.manifest).chunks
        is_lost = not is_range and None in pinned.slots  # a chunk went bad after it was staged
        if is_lost or [chunk_digest(data) for data in read] != [chunks[index].digest for index in wanted]:
            if pinned.report is not None:  # a barrier said: good (R27)
                key = StagedKey(rank.job, rank.rank, "round", pinned.report.round)
                staged_s = self.driver.verified_s.get(key, holder.world.now)
                holder.checker.restores.read_damaged(rank, [n for n in pinned.slots if n is not None], staged_s)
            rank.answered(call_id, body, ("DigestMismatch", "a staged chunk was damaged before it was read"))
            return
        found = dict(zip(wanted, read, strict=True)) if is_range else read
        rank.answered(call_id, {**body, "slots": list(pinned.slots), "manifest": pinned.manifest, "read": found}, None)
