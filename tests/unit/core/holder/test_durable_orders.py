"""What a durable order does, effect by effect: in turn, under one key, of verified bytes, or not at all (R31)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder import effects, persist
from memstore.core.holder.effects import Effect, Procedure
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.ids import WireCopy, WireShard, WireSpec, WireStep
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.orders import (
    DurablePlace,
    Lineage,
    ListMarkers,
    RankSpec,
    RemoveStep,
    RemoveTornStep,
    SlicesOfShard,
    StopWriting,
    WriteMarker,
    WriteSlices,
)
from memstore.core.wire.reports import MarkersListed, MarkersUnread, MarkerWritten, Sealed, TornStepRemoved
from memstore.errors import MemstoreError, TransportError
from recovery.inventory import Copy, ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
DIGEST = "d" * 32
SPEC = ShardSpec(DIGEST, 16, 8, 2, 1)
PLACE = DurablePlace(url="/d", compression=None, key_file=None, bytes_per_s=None)
STEP = WireStep(1, 2)
COPY = Copy(SHARD, SPEC, "me")
STORED = StoredReplica(SHARD, SPEC, (b"0", b"1"), [4, 5])


@dataclass(frozen=True)
class Storage:
    """Storage, opened under a key."""

    key: str


@dataclass
class Host:
    """A holder that has the shard; `bad` is a chunk that went bad in its slot."""

    key: str = "k"
    bad: int | None = None
    turn_s: float = 0.0
    is_here: bool = True
    errors: dict[type[Effect], MemstoreError] = field(default_factory=dict)
    meanwhile: Callable[[], None] = lambda: None  # happens while a slice waits for its turn
    done: list[Effect] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    pins: int = 0
    pins_at_write: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        store: Any = self
        self.lock = contextlib.nullcontext()
        self.index = SimpleNamespace(find=lambda shard, digest: STORED)
        self.state = HolderState(
            HostInfo("me", 1, ()), store, lambda shard, digest: None, Limits(1.0, 3.0), now=lambda: 0.0,
            report=self.reports.append, ask=lambda request: None, is_stopping=lambda: False,
            is_alive=lambda owner: True,
            pin_numbers=itertools.count(1),
        )  # fmt: skip

    def pin(self, shard: ShardId, digest: str) -> tuple[StoredReplica, int] | None:
        self.pins += self.is_here
        return (STORED, 1) if self.is_here else None

    def unpin(self, stored: StoredReplica, pin: int) -> None:
        self.pins -= 1

    def manifest(self, stored: StoredReplica) -> bytes:
        return b"manifest"

    def play(self, *procedures: Procedure[Any]) -> None:
        """Run procedures one after the other, as the runner does each."""
        for steps in procedures:
            value: Any = None
            error: MemstoreError | None = None
            while True:
                try:
                    effect = steps.send(value) if error is None else steps.throw(error)
                except StopIteration:
                    break
                value, error = None, None
                try:
                    value = self._perform(effect)
                except MemstoreError as exc:
                    error = exc
            assert self.pins == 0

    def _perform(self, effect: Effect) -> Any:
        self.done.append(effect)
        if type(effect) in self.errors:
            raise self.errors[type(effect)]
        if isinstance(effect, effects.WaitFor):
            self.meanwhile()
            return effect.is_there()
        if isinstance(effect, effects.WriteSlice):
            self.pins_at_write.append(self.pins)
            return not effect.stop.is_set
        if isinstance(effect, effects.CopySlice):
            return ([b"0", b"1"], None) if self.bad is None else ([], self.bad)
        if isinstance(effect, effects.OnStore):
            return effect.call()
        values: dict[type[Effect], Any] = {
            effects.OpenDurable: Storage(self.key), effects.SliceTurn: self.turn_s,
            effects.ReadMarkers: effects.MarkersFound("k", (), "", ""),
        }  # fmt: skip
        return values.get(type(effect))

    @property
    def reported(self) -> list[tuple[Any, ...]]:
        """What was reported to the controller of slices: rank, slice, and why not."""
        return [
            (report.rank, report.number, report.problem) for report in self.reports if not isinstance(report, Sealed)
        ]


def order(step: WireStep = STEP) -> WriteSlices:
    """Make an order of two slices."""
    part = SlicesOfShard(WireShard.of(SHARD), DIGEST, (0, 1))
    return WriteSlices(job="job", durable=PLACE, step=step, parts=(part,), key="k")


def test_slices_are_copied_under_a_pin_and_written_without_one() -> None:
    """Storage may hang: then the slots of a step that was dropped meanwhile are free all the same."""
    host = Host()
    host.play(*persist.slices(host.state, order()))
    assert host.reported == [(0, 0, None), (0, 1, None)]
    assert host.pins_at_write == [0, 0]


def test_a_host_with_another_key_writes_nothing_and_names_its_key() -> None:
    """Slices of one step are all under the key that the controller has chosen."""
    host = Host(key="other")
    host.play(persist.slices(host.state, order())[0])
    assert host.reports[0].key == "other"
    assert "has key other here, ordered was k" in host.reported[0][2]
    assert not [effect for effect in host.done if isinstance(effect, effects.WriteSlice)]


def test_a_chunk_that_went_bad_is_quarantined_and_not_written() -> None:
    """The copy is reported as it is then, so that repair replaces it."""
    host = Host(bad=1)
    host.play(persist.slices(host.state, order())[0])
    assert [report.copy for report in host.reports if isinstance(report, Sealed)] == [WireCopy.of(COPY)]
    assert host.reported[0][2] == f"chunk 1 of {SHARD} went bad before it was written"


def test_a_slice_of_what_was_dropped_says_so() -> None:
    """The controller plans again."""
    host = Host(is_here=False)
    host.play(persist.slices(host.state, order())[0])
    assert host.reported[0][2] == f"{SHARD} is not here any more"


@pytest.mark.parametrize("is_stopped_early", [True, False])
def test_nothing_is_said_of_slices_that_are_not_wanted_any_more(is_stopped_early: bool) -> None:
    """Whether the word comes before a slice begins or while it waits for its turn."""
    host = Host(turn_s=5.0)
    slices = persist.slices(host.state, order())
    if is_stopped_early:
        persist.stop(host.state, StopWriting(job="job", step=STEP))
    host.meanwhile = lambda: persist.stop(host.state, StopWriting(job="job", step=STEP))
    host.play(*slices)
    assert host.reports == []


def test_one_step_of_a_job_is_written_at_a_time_and_may_begin_again() -> None:
    """An order of another step ends the older one's slices; one after a stop is obeyed."""
    host, later = Host(), WireStep(1, 3)
    older = persist.slices(host.state, order())
    newer = persist.slices(host.state, order(later))
    host.play(*older, *newer)
    assert [report.step for report in host.reports] == [later, later]
    persist.stop(host.state, StopWriting(job="job", step=later))
    host.play(*persist.slices(host.state, order(later)))
    assert len(host.reports) == 4


def test_a_failed_write_is_reported_with_its_reason() -> None:
    """Nothing is known of the bytes; the controller tries again."""
    host = Host(errors={effects.WriteSlice: TransportError("storage hangs")})
    host.play(persist.slices(host.state, order())[0])
    assert host.reported == [(0, 0, "storage hangs")]


def test_a_marker_is_reported_before_what_lies_around_is_swept() -> None:
    """A sweep may take long, and its failure is no failure of the step."""
    host = Host(errors={effects.SweepDurable: TransportError("storage hangs")})
    lineage = Lineage(attempt=1, parent_attempt=None, parent_step=None)
    specs = (RankSpec(0, WireSpec.of(SPEC)),)
    host.play(persist.marker(host.state, WriteMarker(
        job="job", durable=PLACE, step=STEP, specs=specs, key="k", lineage=lineage,
    )))  # fmt: skip
    assert host.reports == [MarkerWritten(job="job", step=STEP, key="k", problem=None)]
    assert [type(effect) for effect in host.done] == [effects.StoreMarker, effects.SweepDurable, effects.Warn]


def test_only_the_removal_of_a_torn_step_is_reported() -> None:
    """The controller waits for that one alone."""
    host = Host()
    host.play(persist.remove(RemoveStep(job="job", durable=PLACE, step=STEP, only_unmarked=False)))
    assert host.reports == []
    host.play(persist.remove_torn(host.state, RemoveTornStep(job="job", durable=PLACE, step=STEP)))
    assert host.reports == [TornStepRemoved(job="job", step=STEP, problem=None)]


def test_markers_are_listed_with_the_key_of_this_host() -> None:
    """A list that fails is reported as failed, with its reason and without a marker."""
    host, order = Host(), ListMarkers(job="job", durable=PLACE, call=9)
    host.play(persist.markers(host.state, order))
    host.errors = {effects.ReadMarkers: TransportError("storage hangs")}
    host.play(persist.markers(host.state, order))
    assert host.reports == [
        MarkersListed(job="job", call=9, markers=(), key="k", damaged="", lacks=""),
        MarkersUnread(job="job", call=9, why="storage hangs"),
    ]
