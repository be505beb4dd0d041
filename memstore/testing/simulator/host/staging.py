"""Begins what restores bring to one simulated holder (core/holder/stage.py), and is its reader (R23, R25)."""

from __future__ import annotations

from typing import Any

from memstore.core.format.manifest import chunk_digest, decode_manifest
from memstore.core.holder import partial_read
from memstore.core.holder import stage as procedure
from memstore.core.holder.state import HolderState
from memstore.core.wire.messages import shard_from_wire
from memstore.errors import DigestMismatch, IntegrityError
from memstore.testing.simulator.host.context import HostContext
from memstore.testing.simulator.host.driver import Driver
from memstore.testing.simulator.world.processes import Rank

Body = dict[str, Any]


class Stager:
    """What is staged on one holder."""

    def __init__(self, holder: HostContext, state: HolderState, driver: Driver) -> None:
        self.holder, self.state, self.driver = holder, state, driver

    def order(self, body: Body) -> None:
        """Stage one shard; the end is reported."""
        procedure.begin(self.state, body)
        self.driver.start(procedure.run(self.state, body))

    def read(self, rank: Rank, body: Body) -> tuple[Body, tuple[str, str] | None]:
        """Copy out what an answer names, checked as client/checkpoint.py does (R7); with the error, if there is one."""
        replicas, checker = self.holder.replicas, self.holder.checker
        pinned = replicas.pin(shard_from_wire(body["shard"]), str(body["digest"]), is_reader=True)
        if pinned is None:
            return body, ("RecoveryError", "the staged shard was dropped before it could be read: call get() again")
        shelved, error = pinned[0], None
        try:
            body = {**body, "slots": list(shelved.slots), "manifest": replicas.manifest(shelved)}
        except DigestMismatch as exc:
            replicas.unpin(*pinned)
            return body, ("DigestMismatch", str(exc))
        body["read"] = rank.read(body["slots"])
        if [chunk_digest(data) for data in body["read"]] != list(shelved.digests):
            error = ("DigestMismatch", "a staged chunk was damaged before it was read: call get() again")
            if "round" in body:  # else no barrier has said that it is good (R27)
                staged_s = self.driver.verified_s.get((rank.job, int(body["round"]), rank.rank), self.holder.world.now)
                checker.restores.read_damaged(rank, [n for n in shelved.slots if n is not None], staged_s)
        replicas.unpin(*pinned)
        return body, error

    def read_part(self, rank: Rank, body: Body) -> tuple[Body, tuple[str, str] | None]:
        """Copy out the chunks that an answer names, digest them again, and let them go, as a reader of ranges does."""
        number = int(body["excerpt"])
        try:
            excerpt = partial_read.take(self.state, number)
        except IntegrityError as exc:
            return body, ("RecoveryError", str(exc))
        wanted, manifest = list(excerpt.draft.wanted), decode_manifest(excerpt.manifest)
        read = rank.read([excerpt.draft.slots[index] for index in wanted])
        partial_read.release(self.state, number)
        if [chunk_digest(data) for data in read] != [manifest.chunks[index].digest for index in wanted]:
            return body, ("DigestMismatch", "a staged chunk was damaged before it was read: read again")
        return {**body, "read": dict(zip(wanted, read, strict=True))}, None

    def expire_parts(self) -> None:
        """Let go of chunks that no reader took (R7)."""
        partial_read.expire(self.state)
