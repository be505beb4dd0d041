"""A get of a shared shard that fails on the way names each of the given states that it wrote to (R7, R34)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from memstore.client import shared_shard as module
from memstore.client.restore import OpenShard
from memstore.client.shared_shard import Read, SharedShard, check_shard, load_shared_shard
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, chunk_sizes
from memstore.core.format.shared_layout import SharedShardLayout
from memstore.core.wire.calls import Get, ReadStep
from memstore.core.wire.replies import StepAgreed
from memstore.errors import ManifestMismatch, MemstoreError, PeerTimeout, RecoveryError, UnsupportedState
from memstore.shell.codec.encode import copy_into
from memstore.shell.codec.verified_stream import Targets, Views
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.shard_read import ShardRead
from recovery.inventory import ShardId

CHUNK_BYTES = 1 << 16
STATE = {"w": torch.arange(50_000.0)}
OWN = {"noise": torch.arange(40_000.0) * 3}
OWN_TEXT, INTO_TEXT = "the state given as rank_state_into=", "the state given as into="


class Staged:
    """The chunks that one of two ranks put; rank 0 copies the shared state, and some chunks may stay bad."""

    def __init__(self, rank: int, *, bad: Sequence[int] = ()) -> None:
        shared_shard = SharedShard(0, 1, (0,), rank)
        plan = shared_shard.plan(STATE, OWN, CHUNK_BYTES)
        data = np.zeros(plan.nbytes, np.uint8)
        self.chunks = [memoryview(data)[at : at + CHUNK_BYTES] for at in range(0, plan.nbytes, CHUNK_BYTES)]
        copy_into(plan, self.chunks, CHUNK_BYTES)
        sizes = chunk_sizes(plan.nbytes, CHUNK_BYTES)
        named = tuple(Chunk(chunk_digest(chunk), size) for chunk, size in zip(self.chunks, sizes, strict=True))
        self.named = Manifest(ShardId("job", 1, 7, rank), 2, plan.layout, plan.nbytes, CHUNK_BYTES, named)
        for index in bad:
            self.chunks[index][0] ^= 1

    def manifest(self) -> Manifest:
        """As a read of it is asked."""
        return self.named

    def take(self, wanted: Sequence[int]) -> Views:
        """All at once."""
        return [(index, self.chunks[index]) for index in wanted]

    def remote(self, wanted: Sequence[int]) -> list[int]:
        """None is on another host."""
        return []

    @contextlib.contextmanager
    def fetching(self, indices: Sequence[int], targets: Targets) -> Iterator[Callable[[], list[int]]]:
        """Fetch nothing."""
        yield list

    def repair(self, wanted: Sequence[int], use: Callable[[Mapping[int, memoryview]], None]) -> None:
        """There is no other copy."""
        raise RecoveryError("no host has a good copy")


def reads(source: Staged | None) -> Read:
    """Return what reads the writer's shard; without one it cannot be reached."""

    @contextlib.contextmanager
    def read() -> Iterator[Staged]:
        if source is None:
            raise RecoveryError("the writer's shard is gone")
        yield source

    return lambda ranks: cast(ShardRead, read())


def failed(staged: Staged, others: Read, *, late: MemstoreError | None = None) -> tuple[str, Any, Any]:
    """Get with both targets, which must fail, at the latest with `late`; return what is said, and the targets."""
    into, rank_state_into = {"w": torch.zeros(50_000)}, {"noise": torch.zeros(40_000)}
    opened = OpenShard(staged, staged.named)
    shared_shard = SharedShardLayout.decode(staged.named)
    assert shared_shard is not None

    def get() -> None:
        with opened.naming_partial_writes():
            load_shared_shard(opened, shared_shard, others, into, rank_state_into)
            if late is not None:
                raise late

    with pytest.raises(MemstoreError) as caught:
        get()
    return str(caught.value), into["w"], rank_state_into["noise"]


def test_what_is_wrong_with_the_ranks_own_state_is_said_of_rank_state() -> None:
    """A value that cannot be put, and a target of another shape: the path tells the two states of a put apart."""
    with pytest.raises(UnsupportedState, match=r"^rank_state\['lock'\] is a "):
        SharedShard(0, 1, (0,), 0).plan(STATE, {"lock": threading.Lock()}, CHUNK_BYTES)
    for rank_state_into in ({"noise": torch.zeros(3)}, {}):
        with pytest.raises(ManifestMismatch, match=r"^rank_state\['noise'\]"):
            check_shard(Staged(0).named, None, rank_state_into)
    with pytest.raises(ManifestMismatch, match=r"^state\['w'\]"):
        check_shard(Staged(0).named, {"w": torch.zeros(3)}, None)


def test_own_state_that_came_half_is_named_and_the_shared_one_untouched() -> None:
    """The last chunk, of the rank's own part, is bad in every copy."""
    writer = Staged(0)
    said, into, _ = failed(Staged(0, bad=[len(writer.chunks) - 1]), reads(None))
    assert said.endswith(f"no host has a good copy; {OWN_TEXT} is unusable: restart this process")
    assert not into.any()


@pytest.mark.parametrize("rank", [0, 1])
def test_both_are_named_if_the_shared_state_came_half(rank: int) -> None:
    """Own is of the step that was read by then; whether the shared part lies in the rank's shard or in a writer's."""
    said, _, own = failed(Staged(rank, bad=[1] if rank == 0 else []), reads(Staged(0, bad=[1])))
    assert said.endswith(f"; {OWN_TEXT} and {INTO_TEXT} are unusable: restart this process")
    assert torch.equal(own, OWN["noise"])


def test_a_writer_out_of_reach_leaves_both_as_they_were() -> None:
    """Nothing is written before the writer's layout was compared as well, so nothing is said of the states."""
    said, into, own = failed(Staged(1), reads(None))
    assert said == "the writer's shard is gone"
    assert not into.any()
    assert not own.any()


def test_a_read_whose_end_never_comes_names_both() -> None:
    """All bytes came and the word that they are right did not: what was written must not be used (R27)."""
    said, into, _ = failed(Staged(1), reads(Staged(0)), late=PeerTimeout("not answered"))
    assert said == f"not answered; {OWN_TEXT} and {INTO_TEXT} are unusable: restart this process"
    assert torch.equal(into, STATE["w"])


def test_a_step_that_came_while_ranks_asked_is_read_from_its_own_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's manifest names the writers of the newest step; then all agree on a newer one, with other writers."""
    asked: list[tuple[int | None, int | None]] = []
    reads: list[ReadStep] = []
    writers = {(1, 5): 3, (2, 7): 1}  # (attempt, step)

    class Ranges:
        """Of rank 0 in two steps; the newer one comes with the agreement."""

        def __init__(self, *_: Any) -> None: ...

        @contextlib.contextmanager
        def ask(self, step: int | None, rank: int, *, attempt: int | None = None) -> Iterator[SimpleNamespace]:
            asked.append((attempt, step))
            found = (1, 5) if attempt is None or step is None else (attempt, step)
            made = Staged(0).named
            shared_shard = SharedShardLayout.decode(made)
            assert shared_shard is not None
            layout = msgspec.structs.replace(shared_shard, writers_by_shard=((writers[found],),)).encode(made.nbytes)
            manifest = replace(made, layout=layout, world_size=4)
            answer = SimpleNamespace(attempt=found[0], step=found[1])
            yield SimpleNamespace(answer=lambda: answer, manifest=lambda: manifest)

    @contextlib.contextmanager
    def read(_: Any, request: ReadStep, timeout_s: float) -> Iterator[Staged]:
        reads.append(request)
        raise RecoveryError("far enough")
        yield

    monkeypatch.setattr(module, "ShardRanges", Ranges)
    monkeypatch.setattr(module, "ShardRead", read)
    monkeypatch.setattr(module, "collective", lambda *_: StepAgreed(step=7, attempt=2, report=None))
    link = cast(HolderLink, SimpleNamespace(job="job", folder=Path("h0")))
    mine = SharedShard(0, 1, (0,), 1)
    found = mine.find_resized(link, Get(job="job", attempt=1, rank=1, step=None, timeout_s=1.0))
    assert found is not None
    with pytest.raises(RecoveryError, match="far enough"):
        mine.load_resized(link, found, None, 1.0)
    assert asked == [(None, None), (2, 7)]
    assert reads == [ReadStep(job="job", step=7, of_attempt=2, rank=1)]
