"""What a reader learns of its chunks: the manifest first, then each chunk once (R27)."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from memstore.client.checkpoint import open_shard
from memstore.core.arena.replica_index import IncomingReplica
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, chunk_sizes, encode_manifest
from memstore.core.wire.calls import ReadStep
from memstore.core.wire.rank_messages import ArrivedChunk, ChunksArrived
from memstore.core.wire.replies import ShardPlaced
from memstore.errors import IntegrityError
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.holder.chunk_notifier import ChunkNotifier
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.shard_read import ShardRead
from recovery.inventory import ShardId


def test_a_notifier_tells_each_chunk_once() -> None:
    """The manifest goes out at once, even alone; a chunk is named when it has come, and never again."""
    said: list[ChunksArrived] = []
    replica = IncomingReplica(ShardId("job", 1, 2, 0), [b"d"] * 4, [None] * 4, 1)
    notifier = ChunkNotifier(said.append, 7, b"manifest", replica)
    notifier.notify()
    notifier.notify()
    assert said == [ChunksArrived(read=7, manifest=b"manifest", chunks=())]
    replica.slots[3], replica.slots[1] = 30, 10
    notifier.notify()
    notifier.notify()
    replica.slots[0] = replica.slots[2] = 5  # two chunks of one content
    notifier.notify()
    notifier.notify()
    assert said[1:] == [
        ChunksArrived(read=7, chunks=(ArrivedChunk(1, 10), ArrivedChunk(3, 30))),
        ChunksArrived(read=7, chunks=(ArrivedChunk(0, 5), ArrivedChunk(2, 5))),
    ]


class Asked:
    """A link whose question is answered twice: chunks of one step come, then the answer names another."""

    nonce, job, rank = "n", "job", 0

    def __init__(self, first: tuple[bytes, list[bytearray]], then: bytes) -> None:
        self.first, self.then = first, then
        self.mapping = MagicMock()  # no arena: nothing whose pages a reader could keep
        self.mapping.view = lambda slot, nbytes: memoryview(first[1][slot])[:nbytes]

    def subscribe(self, events: queue.SimpleQueue[Any]) -> int:
        self.events = events
        return 1

    def call_soon(self, request: ReadStep) -> Future[ShardPlaced]:
        manifest, slots = self.first
        self.events.put(
            ChunksArrived(read=1, manifest=manifest, chunks=tuple(ArrivedChunk(i, i) for i in range(len(slots))))
        )
        future: Future[ShardPlaced] = Future()
        future.set_result(
            ShardPlaced(
                step=11, attempt=1, verdict="peer", why="", report=None, manifest=self.then,
                slots=tuple(range(len(slots))), elsewhere=(), pin=1,
            )
        )  # fmt: skip
        return future

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def put(step: int) -> tuple[bytes, list[bytearray]]:
    """A manifest and its slots."""
    plan = plan_state({"w": torch.full((1000,), float(step))})
    sizes = chunk_sizes(plan.nbytes, 1024)
    slots = [bytearray(1024) for _ in sizes]
    copy_into(plan, [memoryview(slot) for slot in slots], 1024)
    chunks = tuple(Chunk(chunk_digest(memoryview(s)[:n]), n) for s, n in zip(slots, sizes, strict=True))
    return encode_manifest(Manifest(ShardId("job", 1, step, 0), 1, plan.layout, plan.nbytes, 1024, chunks)), slots


@pytest.mark.parametrize(
    "asked",
    [
        ReadStep(job="job", step=9, rank=0),
        ReadStep(job="job", step=None, rank=3),
        ReadStep(job="job", step=10, of_attempt=2, rank=0),
        ReadStep(job="other", step=None, rank=0),
    ],
    ids=["step", "rank", "attempt", "job"],
)
def test_chunks_of_another_shard_than_asked_for_are_refused_before_the_answer(asked: ReadStep) -> None:
    """What the holder tells of chunks names its shard as the answer does: no byte of another one is given out."""
    link = cast(HolderLink, Asked(put(10), put(10)[0]))
    with pytest.raises(IntegrityError, match=r"asked for .* and ShardId\(job='job', attempt=1, step=10, rank=0\) came"):
        ShardRead(link, asked, 60.0).take([0])


def test_a_get_is_given_no_other_step_than_its_answer_says() -> None:
    """The answer of all ranks names a step; the shard that comes with it is of that step and of this rank."""
    link = cast(HolderLink, Asked(put(10), put(10)[0]))
    said = ShardPlaced(
        step=11, attempt=1, verdict="local", why="", report=None, manifest=put(10)[0], slots=(0,), elsewhere=(), pin=1
    )
    with pytest.raises(IntegrityError, match=r"asked for .*step=11.* and .*step=10.* came"):
        ShardRead(link, ReadStep(job="job", step=11, of_attempt=1, rank=0), 60.0, said).manifest()


def test_a_question_that_is_answered_again_with_another_step_returns_no_mixture() -> None:
    """The controller came back while step 10 was read and chose step 11: no bytes of 10 under the name of 11."""
    link = cast(HolderLink, Asked(put(10), put(11)[0]))
    read = ShardRead(link, ReadStep(job="job", step=None, rank=0), 60.0)
    with pytest.raises(IntegrityError, match=r"step=11.*was chosen while.*step=10"):
        open_shard(read, None)
