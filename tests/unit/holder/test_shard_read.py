"""The answer to a read names the shard that was asked for, or nothing of it is given out (R27)."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, chunk_sizes, encode_manifest
from memstore.core.wire.calls import ReadStep
from memstore.core.wire.replies import ShardPlaced
from memstore.errors import IntegrityError, PeerTimeout
from memstore.shell.codec.encode import copy_into, plan_state
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.shard_read import ShardRead
from recovery.inventory import ShardId


class Asked:
    """A link whose question is answered with a shard that is here; None: not answered."""

    nonce, job, rank = "n", "job", 0

    def __init__(self, answer: ShardPlaced | None) -> None:
        self.answer, self.asked = answer, list[ReadStep]()
        self.mapping = MagicMock()  # no arena: nothing whose pages a reader could keep

    def call_soon(self, request: ReadStep) -> Future[ShardPlaced]:
        self.asked.append(request)
        future: Future[ShardPlaced] = Future()
        if self.answer is not None:
            future.set_result(self.answer)
        return future

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def placed(manifest: bytes, step: int) -> ShardPlaced:
    """An answer that says it is of a step."""
    return ShardPlaced(
        step=step,
        attempt=1,
        verdict="local",
        why="",
        report=None,
        manifest=manifest,
        slots=(0,) * 4,
        elsewhere=(),
        pin=1,
    )


def put(step: int) -> bytes:
    """The manifest of a step."""
    plan = plan_state({"w": torch.full((1000,), float(step))})
    sizes = chunk_sizes(plan.nbytes, 1024)
    slots = [bytearray(1024) for _ in sizes]
    copy_into(plan, [memoryview(slot) for slot in slots], 1024)
    chunks = tuple(Chunk(chunk_digest(memoryview(s)[:n]), n) for s, n in zip(slots, sizes, strict=True))
    return encode_manifest(Manifest(ShardId("job", 1, step, 0), 1, plan.layout, plan.nbytes, 1024, chunks))


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
def test_another_shard_than_asked_for_is_refused(asked: ReadStep) -> None:
    """No byte of it is given out, and each later wait says so again."""
    read = ShardRead(cast(HolderLink, Asked(placed(put(10), 10))), asked, 60.0)
    for wait in (lambda: read.take([0]), read.answer, read.manifest):
        with pytest.raises(IntegrityError, match=r"asked for .*job='(job|other)'.* and .*step=10, rank=0\) came"):
            wait()


def test_a_get_is_given_no_other_step_than_its_answer_says() -> None:
    """The answer of all ranks names a step; the shard that comes with it is of that step and of this rank."""
    with pytest.raises(IntegrityError, match=r"asked for .*step=11.* and .*step=10.* came"):
        ShardRead(
            cast(HolderLink, Asked(None)), ReadStep(job="job", step=None, rank=0), 60.0, placed(put(10), 11)
        ).manifest()


def test_a_read_names_its_reader_and_is_over_in_time() -> None:
    """The holder finds by the nonce whose read it is; without an answer every wait ends by one deadline."""
    link = Asked(None)
    read = ShardRead(cast(HolderLink, link), ReadStep(job="job", step=None, rank=3), 0.01)
    assert [asked.reader for asked in link.asked] == ["n"]
    for wait in (read.answer, read.manifest):
        with pytest.raises(PeerTimeout, match=r"was not answered within 0\.01 s"):
            wait()
