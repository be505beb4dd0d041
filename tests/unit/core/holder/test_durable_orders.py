"""What a durable order does, call by call: in turn, under one key, of verified bytes, or not at all (R31)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from holder_io import ScriptedIo
from msgspec import structs

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder import persist
from memstore.core.holder.holder_io import Storage
from memstore.core.wire.ids import WireCopy, WireShard, WireSpec, WireStep
from memstore.core.wire.orders import (
    DurablePlace,
    Lineage,
    ListMarkers,
    RemoveStep,
    SlicesOfShard,
    WriteMarker,
    WriteSlices,
)
from memstore.core.wire.reports import MarkersFound, MarkersListed, MarkerWritten, Sealed, StepRemoved
from memstore.errors import TransportError
from recovery.inventory import Copy, ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
DIGEST = "d" * 32
SPEC = ShardSpec(DIGEST, 16, 8, 2, 1)
PLACE = DurablePlace(url="/d", compression=None, key_file=None, bytes_per_s=None)
STEP = WireStep(1, 2)
COPY = Copy(SHARD, SPEC, "me")
STORED = StoredReplica(SHARD, SPEC, (b"0", b"1"), [4, 5])
MARKER = WriteMarker(
    job="job",
    durable=PLACE,
    step=STEP,
    specs={0: WireSpec.of(SPEC)},
    key="k",
    lineage=Lineage(attempt=1, parent_attempt=None, parent_step=None),
)


@dataclass(eq=False)
class Host(ScriptedIo):
    """A holder that has the shard; `bad` is a chunk that went bad in its slot."""

    bad: int | None = None
    turn_s: float = 0.0
    is_here: bool = True
    pins: int = 0
    pins_at_write: list[int] = field(default_factory=list)
    lock = contextlib.nullcontext()
    index = SimpleNamespace(find=lambda shard, digest: STORED)

    def pin(self, shard: ShardId, digest: str) -> tuple[StoredReplica, int] | None:
        self.pins += self.is_here
        return (STORED, 1) if self.is_here else None

    def unpin(self, stored: StoredReplica, pin: int) -> None:
        self.pins -= 1

    def manifest(self, stored: StoredReplica) -> bytes:
        return b"manifest"

    async def slice_turn(self, job: str, stored: StoredReplica, number: int, bytes_per_s: int | None) -> float:
        return self.turn_s

    async def copy_slice(self, stored: StoredReplica, number: int) -> tuple[list[bytes], int | None]:
        return ([b"0", b"1"], None) if self.bad is None else ([], self.bad)

    async def write_slice(self, storage: Storage, *given: Any) -> bool:
        self.pins_at_write.append(self.pins)
        return await super().write_slice(storage, *given)

    def write(self, *slices: persist.Slice) -> None:
        """Write slices one after the other."""
        for piece in slices:
            self.play(persist.write(self, self.state, piece))
            assert self.pins == 0

    @property
    def reported(self) -> list[tuple[Any, ...]]:
        """What was reported to the controller of slices: rank, slice, and why not."""
        return [
            (report.rank, report.number, report.problem) for report in self.reports if not isinstance(report, Sealed)
        ]


def order(step: WireStep = STEP, key: str | None = "k") -> WriteSlices:
    """Make an order of two slices."""
    part = SlicesOfShard(WireShard.of(SHARD), DIGEST, (0, 1))
    return WriteSlices(job="job", durable=PLACE, step=step, parts=(part,), key=key)


def stop(host: Host, step: WireStep = STEP) -> None:
    """Order that no more of a step is written."""
    assert persist.slices(host.state, structs.replace(order(step), parts=())) == []


def test_slices_are_copied_under_a_pin_and_written_without_one() -> None:
    """Storage may hang: then the slots of a step that was dropped meanwhile are free all the same."""
    host = Host()
    host.write(*persist.slices(host.state, order()))
    assert host.reported == [(0, 0, None), (0, 1, None)]
    assert host.pins_at_write == [0, 0]


def test_a_host_with_another_key_writes_nothing_and_names_its_key() -> None:
    """Slices of one step are all under the key that the controller has chosen."""
    host = Host(key="other")
    host.write(persist.slices(host.state, order())[0])
    assert host.reports[0].key == "other"
    assert host.reported[0][2].startswith("it is under key k, durable_key_file here has key other: put the file")
    assert "write_slice" not in host.names


def test_without_a_key_to_begin_with_a_host_writes_under_its_own_and_names_it() -> None:
    """The first report of a write decides under which key all of it is."""
    host = Host(key="own")
    host.write(*persist.slices(host.state, order(key=None)))
    assert [(report.key, report.problem) for report in host.reports] == [("own", None), ("own", None)]


def test_a_chunk_that_went_bad_is_quarantined_and_not_written() -> None:
    """The copy is reported as it is then, so that repair replaces it."""
    host = Host(bad=1)
    host.write(persist.slices(host.state, order())[0])
    assert [report.copy for report in host.reports if isinstance(report, Sealed)] == [WireCopy.of(COPY)]
    assert host.reported[0][2] == f"chunk 1 of {SHARD} went bad before it was written"


def test_a_slice_of_what_was_dropped_says_so() -> None:
    """The controller plans again."""
    host = Host(is_here=False)
    host.write(persist.slices(host.state, order())[0])
    assert host.reported[0][2] == f"{SHARD} is not here any more"


@pytest.mark.parametrize("is_stopped_early", [True, False])
def test_nothing_is_said_of_slices_that_are_not_wanted_any_more(is_stopped_early: bool) -> None:
    """Whether the word comes before a slice begins or while it waits for its turn."""
    host = Host(turn_s=5.0)
    slices = persist.slices(host.state, order())
    if is_stopped_early:
        stop(host)
    host.meanwhile = lambda: stop(host)
    host.write(*slices)
    assert host.reports == []
    assert ("slice_turn" in host.names) != is_stopped_early


def test_one_step_of_a_job_is_written_at_a_time_and_may_begin_again() -> None:
    """An order of another step ends the older one's slices; one after a stop is obeyed."""
    host, later = Host(), WireStep(1, 3)
    older = persist.slices(host.state, order())
    newer = persist.slices(host.state, order(later))
    host.write(*older, *newer)
    assert [report.step for report in host.reports] == [later, later]
    stop(host, later)
    host.write(*persist.slices(host.state, order(later)))
    assert len(host.reports) == 4


def test_a_failed_write_is_reported_with_its_reason() -> None:
    """Nothing is known of the bytes; the controller tries again."""
    host = Host(errors={"write_slice": TransportError("storage hangs")})
    host.write(persist.slices(host.state, order())[0])
    assert host.reported == [(0, 0, "storage hangs")]


def test_a_marker_is_reported_before_what_lies_around_is_swept() -> None:
    """A sweep may take long, and its failure is no failure of the step."""
    host = Host(errors={"sweep_durable": TransportError("storage hangs")})
    host.play(persist.marker(host, host.state, MARKER))
    assert host.reports == [MarkerWritten(job="job", step=STEP, key="k", problem=None)]
    assert host.names == ["store_marker", "sweep_durable", "warn"]


def test_nothing_is_swept_around_a_marker_that_could_not_be_written() -> None:
    """What lies there may be needed: the controller tries again."""
    host = Host(errors={"store_marker": TransportError("storage hangs")})
    host.play(persist.marker(host, host.state, MARKER))
    assert host.reports == [MarkerWritten(job="job", step=STEP, key="k", problem="storage hangs")]
    assert host.names == ["store_marker"]


@pytest.mark.parametrize("problem", [None, "storage hangs"])
@pytest.mark.parametrize("only_unmarked", [True, False])
def test_a_removal_is_reported_with_what_it_left(only_unmarked: bool, problem: str | None) -> None:
    """With its marker left alone, a torn step is not gone."""
    host = Host(errors={"remove_durable": TransportError(problem)} if problem is not None else {})
    order = RemoveStep(job="job", durable=PLACE, step=STEP, only_unmarked=only_unmarked)
    host.play(persist.remove(host, host.state, order))
    assert host.reports == [StepRemoved(job="job", step=STEP, only_unmarked=only_unmarked, problem=problem)]


def test_markers_are_listed_with_the_key_of_this_host() -> None:
    """A list that fails is reported as failed, with its reason and without a marker."""
    host, order = Host(), ListMarkers(job="job", durable=PLACE, call=9)
    found = MarkersFound(markers=(), key="k", damaged="", lacks="")
    host.play(persist.markers(host, host.state, order))
    host.errors = {"read_markers": TransportError("storage hangs")}
    host.play(persist.markers(host, host.state, order))
    assert host.reports == [
        MarkersListed(job="job", call=9, found=found, problem=""),
        MarkersListed(job="job", call=9, found=None, problem="storage hangs"),
    ]
