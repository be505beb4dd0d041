"""What a durable order does, effect by effect: in turn, under one key, of verified bytes, or not at all (R31)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder import effects, persist
from memstore.core.holder.effects import Effect, Steps
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.messages import Body, shard_to_wire, spec_to_wire
from memstore.errors import MemstoreError, TransportError
from recovery.inventory import ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
SPEC = ShardSpec("d", 16, 8, 2, 1)
SHELVED = StoredReplica(SHARD, SPEC, (b"0", b"1"), [4, 5])


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
    reports: list[tuple[str, Body]] = field(default_factory=list)
    reported_copies: list[StoredReplica] = field(default_factory=list)
    pins: int = 0
    pins_at_write: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        store: Any = self
        self.state = HolderState(
            "me", store, lambda shard, digest: None, Limits(1.0, 3.0), now=lambda: 0.0,
            report=lambda kind, body: self.reports.append((kind, body)),
            sealed=lambda shelved, put: self.reported_copies.append(shelved), is_stopping=lambda: False,
            is_alive=lambda owner: True,
        )  # fmt: skip

    def pin(self, shard: ShardId, digest: str) -> tuple[StoredReplica, int] | None:
        self.pins += self.is_here
        return (SHELVED, 1) if self.is_here else None

    def unpin(self, shelved: StoredReplica, pin: int) -> None:
        self.pins -= 1

    def play(self, *procedures: Steps[Any]) -> None:
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
        values: dict[type[Effect], Any] = {
            effects.OpenDurable: Storage(self.key), effects.SliceTurn: self.turn_s, effects.LoadManifest: b"manifest",
            effects.ListMarkers: {"markers": ["m"], "key": "k", "lacks": ""},
        }  # fmt: skip
        return values.get(type(effect))

    @property
    def told(self) -> list[tuple[Any, ...]]:
        """What the controller was told of orders: rank, slice, and why not."""
        return [(body["rank"], body["slice"], body["ok"], body["why"]) for kind, body in self.reports]


def order(what: str = "parts", **changes: Any) -> Body:
    """Make an order of two slices, or of another kind."""
    return {
        "job": "job", "what": what, "step": [1, 2], "key": "k", "durable": {"url": "/d", "bytes_per_s": None},
        "parts": [[shard_to_wire(SHARD), "d", [0, 1]]], "specs": [[0, spec_to_wire(SPEC)]], "lineage": {},
        "only_unmarked": False, **changes,
    }  # fmt: skip


def test_slices_are_copied_under_a_pin_and_written_without_one() -> None:
    """Storage may hang: then the slots of a step that was dropped meanwhile are free all the same."""
    host = Host()
    host.play(*persist.slices(host.state, order()))
    assert host.told == [(0, 0, True, ""), (0, 1, True, "")]
    assert host.pins_at_write == [0, 0]


def test_a_host_with_another_key_writes_nothing_and_names_its_key() -> None:
    """Slices of one step are all under the key that the controller has chosen."""
    host = Host(key="other")
    host.play(persist.slices(host.state, order())[0])
    assert host.reports[0][1]["key"] == "other"
    assert "has key other here, ordered was k" in host.told[0][3]
    assert not [effect for effect in host.done if isinstance(effect, effects.WriteSlice)]


def test_a_chunk_that_went_bad_is_condemned_and_not_written() -> None:
    """The copy is reported as it is then, so that repair replaces it."""
    host = Host(bad=1)
    host.play(persist.slices(host.state, order())[0])
    assert host.reported_copies == [SHELVED]
    assert host.told[0][2:] == (False, f"chunk 1 of {SHARD} went bad before it was written")


def test_a_slice_of_what_was_dropped_says_so() -> None:
    """The controller plans anew."""
    host = Host(is_here=False)
    host.play(persist.slices(host.state, order())[0])
    assert host.told[0][2:] == (False, f"{SHARD} is not here any more")


@pytest.mark.parametrize("is_stopped_early", [True, False])
def test_nothing_is_said_of_slices_that_are_not_wanted_any_more(is_stopped_early: bool) -> None:
    """Whether the word comes before a slice begins or while it waits for its turn."""
    host = Host(turn_s=5.0)
    slices = persist.slices(host.state, order())
    if is_stopped_early:
        persist.stop(host.state, order())
    host.meanwhile = lambda: persist.stop(host.state, order())
    host.play(*slices)
    assert host.reports == []


def test_one_step_of_a_job_is_written_at_a_time_and_may_begin_anew() -> None:
    """An order of another step ends the older one's slices; one after a stop is obeyed."""
    host = Host()
    older = persist.slices(host.state, order())
    newer = persist.slices(host.state, order(step=[1, 3]))
    host.play(*older, *newer)
    assert [body["step"] for _, body in host.reports] == [[1, 3], [1, 3]]
    persist.stop(host.state, order(step=[1, 3]))
    host.play(*persist.slices(host.state, order(step=[1, 3])))
    assert len(host.reports) == 4


def test_a_failed_write_is_reported_with_its_reason() -> None:
    """Nothing is known of the bytes; the controller tries again."""
    host = Host(errors={effects.WriteSlice: TransportError("storage hangs")})
    host.play(persist.slices(host.state, order())[0])
    assert host.told == [(0, 0, False, "storage hangs")]


def test_a_marker_is_reported_before_what_lies_around_is_swept() -> None:
    """A sweep may take long, and its failure is no failure of the step."""
    host = Host(errors={effects.SweepDurable: TransportError("storage hangs")})
    host.play(persist.marker(host.state, order("marker")))
    assert host.told == [(-1, 0, True, "")]
    assert [type(effect) for effect in host.done] == [effects.WriteMarker, effects.SweepDurable, effects.Warn]


@pytest.mark.parametrize("is_torn", [True, False])
def test_only_the_removal_of_a_torn_step_is_reported(is_torn: bool) -> None:
    """The controller waits for that one alone."""
    host = Host()
    host.play(persist.remove(host.state, order("remove", is_torn=is_torn)))
    assert len(host.reports) == is_torn


def test_markers_are_listed_with_the_key_of_this_host() -> None:
    """A list that fails is reported as failed, with its reason and without a marker."""
    host = Host()
    body = {"job": "job", "call": 9, "durable": {"url": "/d"}}
    host.play(persist.markers(host.state, body))
    host.errors = {effects.ListMarkers: TransportError("storage hangs")}
    host.play(persist.markers(host.state, body))
    found = [(body["ok"], body["markers"], body["key"], body["why"]) for _, body in host.reports]
    assert found == [(True, ["m"], "k", ""), (False, [], "", "storage hangs")]
