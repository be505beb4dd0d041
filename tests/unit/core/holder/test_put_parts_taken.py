"""Which parts of a put are pushed before it is submitted, and what ends their pushes (R11, R13)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from memstore.core.arena.slot_table import Owner
from memstore.core.holder.effects import OpenFresh, Procedure, Replicate
from memstore.core.holder.puts import put_parts
from memstore.core.holder.state import HolderState, Limits, PutParts, SubmittedPut
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.rank_messages import PutPart, PutReady, SlotSample
from recovery.inventory import ShardId

SHARD = ShardId("job", 1, 2, 0)
DIGESTS = [bytes([n]) * 16 for n in range(4)]


@dataclass
class Link:
    """A rank's process that leases slots 4 to 7."""

    owner: Owner = field(default_factory=lambda: Owner(7, 1, 1))
    job: str = "job"
    rank: int = 0
    is_retired: bool = False


@dataclass
class Fresh:
    """The source of a put's pushes."""

    slots: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    why: str = ""
    is_stored: bool = False

    def extend(self, slots: Any, digests: Any) -> None:
        self.slots += slots
        self.digests += digests

    def fail(self, why: str) -> None:
        self.why = why

    def is_settled(self) -> bool:
        return self.is_stored


class Host:
    """A holder with one rank, which has a target unless the test says otherwise."""

    def __init__(self) -> None:
        self.link, self.has_targets, self.opened = Link(), True, list[Fresh]()
        self.meanwhile: Callable[[], object] = lambda: None  # happens while the pushes begin
        table = SimpleNamespace(leases={self.link.owner: {4, 5, 6, 7}})
        store: Any = SimpleNamespace(chunk_bytes=8, arena_identity="here", index=SimpleNamespace(table=table))
        self.state = HolderState(
            HostInfo("me", 1, ()), store, lambda shard, digest: None, Limits(1.0, 3.0), now=lambda: 0.0,
            report=lambda report: None, ask=lambda call: None, is_stopping=lambda: False, is_alive=lambda owner: True,
            pin_numbers=itertools.count(1),
        )  # fmt: skip

    def take(self, **fields: Any) -> None:
        """Take a part of a put of 4 chunks: by default its first two."""
        part = PutPart(attempt=1, step=2, first=0, slots=(4, 5), digests=b"".join(DIGESTS[:2]), arena="here", nbytes=32)
        link: Any = self.link
        steps: Procedure[None] = put_parts.take(self.state, link, msgspec.structs.replace(part, **fields))
        value: Any = None
        while True:
            try:
                effect = steps.send(value)
            except StopIteration:
                return
            if isinstance(effect, OpenFresh):
                self.opened.append(value := Fresh())
            elif isinstance(effect, Replicate):
                self.meanwhile()
                value = self.has_targets

    @property
    def parts(self) -> PutParts | None:
        """What is kept of the rank's put."""
        return self.state.puts.parts.get(self.link.owner)


def ready(**fields: Any) -> PutReady:
    """The submission of the whole put."""
    whole = PutReady(
        attempt=1, step=2, slots=(4, 5, 6, 7), arena="here", sample=SlotSample(0, b""), layout=b"", nbytes=32,
        world_size=1, shared_chunks=None, began_s=0.0, stall_s=0.0, digests=b"".join(DIGESTS),
    )  # fmt: skip
    return msgspec.structs.replace(whole, **fields)


@pytest.fixture
def host() -> Host:
    """Nothing is put yet."""
    return Host()


def test_parts_are_pushed_in_order_and_the_submission_brings_the_rest(host: Host) -> None:
    """One source for all of it."""
    host.take()
    host.take(first=2, slots=(6,), digests=DIGESTS[2])
    link: Any = host.link
    parts = put_parts.submitted(host.state, link, ready())
    assert parts is not None
    assert put_parts.join(parts, ready()).source is host.opened[0]
    assert (host.opened[0].slots, host.opened[0].digests) == ([4, 5, 6, 7], DIGESTS)
    assert host.parts is None


@pytest.mark.parametrize(
    "fields",
    [
        {"arena": "there"}, {"slots": (4, 9)}, {"slots": (), "digests": b""}, {"digests": b"short"}, {"first": 1},
        {"slots": (4, 5, 6, 7, 4), "digests": bytes(80)}, {"nbytes": 1 << 60},
    ],
    ids=str,
)  # fmt: skip
def test_a_part_that_does_not_fit_is_left_out(host: Host, fields: dict[str, Any]) -> None:
    """Of another arena, of slots that are not the rank's, of more chunks than it has room for, not in order."""
    host.take(**fields)
    assert not host.opened
    host.take()
    host.take(**{"first": 2, **fields})
    assert host.opened[0].slots == [4, 5]


def test_a_part_is_left_out_if_its_put_is_submitted_while_its_pushes_begin(host: Host) -> None:
    """On another link: the submission named all chunks, and none may come twice."""
    link: Any = host.link
    host.meanwhile = lambda: put_parts.join(host.state.puts.parts.pop(link.owner), ready())
    host.take()
    assert (host.opened[0].slots, host.opened[0].digests) == ([4, 5, 6, 7], DIGESTS)


def test_a_part_of_a_fenced_attempt_is_left_out(host: Host) -> None:
    """No bytes of it travel (R21)."""
    host.state.fences.open("job", 2)
    host.take()
    assert not host.opened


def test_without_targets_nothing_is_kept(host: Host) -> None:
    """The submission begins as any other."""
    host.has_targets = False
    host.take()
    assert host.opened[0].why == "this host has no targets"
    assert host.parts is None


@pytest.mark.parametrize("fields", [{"slots": (5, 4, 6, 7)}, {"digests": bytes(64)}, {"digests": None}], ids=str)
def test_a_submission_that_begins_otherwise_is_another_try(host: Host, fields: dict[str, Any]) -> None:
    """What its targets have of it ends; the submission names every chunk."""
    host.take()
    link: Any = host.link
    assert put_parts.submitted(host.state, link, ready(**fields)) is None
    assert host.opened[0].why == "the rank submitted another put"


def test_the_same_step_once_more_ends_the_pushes_of_the_first_try(host: Host) -> None:
    """An exception of a signal handler ended its put, which said nothing to the holder."""
    host.take()
    host.take(slots=(6, 7), digests=b"".join(DIGESTS[2:]))
    assert host.opened[0].why == "the rank began another put"
    assert host.opened[1].slots == [6, 7]


def test_another_put_of_the_process_ends_the_pushes(host: Host) -> None:
    """It has one put at a time: the first was given up."""
    host.take()
    host.take(step=3)
    assert host.opened[0].why == "the rank began another put"
    link: Any = host.link
    assert put_parts.submitted(host.state, link, ready(step=4)) is None
    assert host.opened[1].why == "the rank submitted another put"


def test_a_put_that_is_given_up_ends_its_own_pushes_only(host: Host) -> None:
    """A late word of an older step changes nothing."""
    host.take()
    link: Any = host.link
    put_parts.give_up(host.state, link, 1, 1)
    assert host.opened[0].why == ""
    put_parts.give_up(host.state, link, 1, 2)
    assert host.opened[0].why == "the rank gave its put up"
    assert host.parts is None


@pytest.mark.parametrize("is_stored", [False, True])
def test_pushes_end_with_a_put_that_is_not_stored(host: Host, is_stored: bool) -> None:
    """Those of a stored one go on."""
    host.take()
    link: Any = host.link
    put = SubmittedPut(link, ready(), 0, put_parts.submitted(host.state, link, ready()))
    host.opened[0].is_stored = is_stored
    put_parts.done(host.state, put, "no room")
    assert host.opened[0].why == ("" if is_stored else "no room")


def test_a_put_that_comes_again_on_another_link_goes_on_with_its_pushes(host: Host) -> None:
    """The first link ended before it was sealed."""
    host.take()
    link: Any = host.link
    put = SubmittedPut(link, ready(), 0, put_parts.submitted(host.state, link, ready()))
    put_parts.keep(host.state, put)
    put_parts.done(host.state, put, "")
    assert host.opened[0].why == ""
    assert put_parts.submitted(host.state, link, ready()) is put.parts
