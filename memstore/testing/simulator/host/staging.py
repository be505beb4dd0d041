"""Begins what restores bring to one simulated holder (core/holder/stage.py), and is its reader (R23, R25)."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import cast

from memstore.core.arena.replica_index import StagedKey
from memstore.core.format.manifest import chunk_digest, decode_manifest
from memstore.core.holder import answers, effects, reads
from memstore.core.holder import stage as procedure
from memstore.core.holder.answers import Call
from memstore.core.holder.stage import BringOrder
from memstore.core.holder.state import HolderState
from memstore.core.wire.calls import RankCall, ReadRanges
from memstore.core.wire.codec import reply_decoder
from memstore.core.wire.rank_messages import AskAnswered, AskRefused
from memstore.core.wire.replies import ShardPlaced, decode_placed
from memstore.errors import ProtocolError
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.driver import Driver, Waits
from memstore.testing.simulator.host.rank_link import RankLink
from memstore.testing.simulator.world.processes import CallFailed, ShardRead
from memstore.testing.simulator.world.virtual_time import Thread

READ_S = (0.0, 0.05)  # until a reader has copied what was staged for it
SLOW_SHARE, SLOW_S = 0.2, 2.0  # of readers that take longer than a broken link takes to come back


class Stager:
    """What is staged on one holder."""

    def __init__(self, holder: HostContext, state: HolderState, driver: Driver) -> None:
        self.holder, self.state, self.driver = holder, state, driver
        self.answer_driver = driver.extended({effects.SendToRank: self._send})
        self.slowness = random.Random(f"readers {holder.world.scenario.seed} {holder.host_id}")

    def order(self, order: BringOrder) -> None:
        """Stage one shard; the end is reported."""
        procedure.begin(self.state, order)
        self.driver.start(procedure.run(self.state, order))

    def pass_on(self, call: Call, data: bytes | None, error: tuple[str, str] | None) -> None:
        """Pass on what the controller answered to a rank."""
        self.answer_driver.start(answers.pass_on(self.state, call, data, error))

    def _send(self, effect: effects.SendToRank) -> Waits[None]:
        """Let a rank take an answer; if it is a read, on a thread of its own."""
        yield from ()
        link, answer = cast(RankLink, effect.link), cast(AskAnswered | AskRefused, effect.message)
        request = link.process.calls.get(answer.id)
        if not link.is_open:
            return
        if isinstance(answer, AskRefused):
            link.process.answered(answer.id, CallFailed(f"{answer.error}: {answer.message}"))
        elif request is None:
            with suppress(ProtocolError):  # the answer to another call
                reads.give_back(link, decode_placed(answer.reply).pin)  # its reader has given up
        else:
            reply = reply_decoder(type(request))(answer.reply)
            if isinstance(reply, ShardPlaced):
                self.holder.world.spawn(self._read(link, answer.id, request, reply), link.process)
            else:
                link.process.answered(answer.id, reply)

    def _read(self, link: RankLink, call_id: int, request: RankCall, placed: ShardPlaced) -> Thread:
        """Copy out what an answer names and digest it again, as a reader does; then let go of it (R7)."""
        holder, rank = self.holder, link.process
        is_whole = not isinstance(request, ReadRanges)
        slow_s = self.slowness.uniform(0.0, SLOW_S) if self.slowness.random() < SLOW_SHARE else 0.0
        yield holder.world.network.rng.uniform(*READ_S) + slow_s
        wanted = [index for index, slot in enumerate(placed.slots) if slot is not None]
        read = rank.read([placed.slots[index] for index in wanted])
        if rank.link is link and holder.is_up:
            holder.checker.restores.read_whole(rank, is_pinned=placed.pin in link.pins)
        if isinstance(rank.link, RankLink) and rank.holder is not None and rank.holder.is_up:
            reads.give_back(rank.link, placed.pin)  # as a rank does, on the link that it has now
        chunks = decode_manifest(placed.manifest).chunks
        is_lost = is_whole and None in placed.slots  # a chunk went bad after it was staged
        if is_lost or [chunk_digest(data) for data in read] != [chunks[index].digest for index in wanted]:
            if placed.report is not None:  # a barrier said: good (R27)
                key = StagedKey(rank.job, rank.rank, "round", placed.report.round)
                staged_s = self.driver.verified_s.get(key, holder.world.now)
                holder.checker.restores.read_damaged(rank, [n for n in placed.slots if n is not None], staged_s)
            rank.answered(call_id, CallFailed("DigestMismatch: a staged chunk was damaged before it was read"))
            return
        rank.answered(call_id, ShardRead(placed, dict(zip(wanted, read, strict=True))))
