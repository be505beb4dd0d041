"""What a push does, effect by effect, without a thread or a socket: tries again, gives up, says why (R13, R18, R28)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder import effects
from memstore.core.holder.effects import Effect, Procedure
from memstore.core.holder.puts.push import ROOM_WAIT_S, SEAL_ROUNDS_MAX, Push, begin, replicate, run
from memstore.core.holder.state import HolderState, Limits
from memstore.core.wire.codec import Message, Request
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.peer_messages import Admitted, ChunksMissing, CopySealed, Done, HasCopy, Offer, Refused, Seal
from memstore.core.wire.reports import PushFailed, Report, Sealed
from memstore.errors import DigestMismatch, MemstoreError, PeerRefused, PeerUnreachable
from recovery.inventory import ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
LIMITS = Limits(suspect_after_s=2.0, dead_after_s=6.0)


@dataclass
class Replica:
    """A source of two chunks."""

    shard: ShardId = SHARD
    digest: str = "d"
    sizes: tuple[int, ...] = (8, 8)
    readers: int = 1
    stored: Any = None

    def begin(self) -> None:
        self.readers += 1

    def release(self) -> None:
        self.readers -= 1


class Store:
    """A push asks nothing of the store but the replica that it sends, and how that is now."""

    lock = contextlib.nullcontext()

    def __init__(self) -> None:
        self.stored = StoredReplica(SHARD, ShardSpec("0" * 32, 16, 8, 2, 1), (b"0", b"1"), [4, 5])
        self.index = SimpleNamespace(find=lambda shard, digest: self.stored)

    def lose_manifest(self, stored: StoredReplica) -> bool:
        stored.is_nameless = True
        return True


def take(request: Request[Any]) -> Message:
    """Answer as a peer that takes everything."""
    answers = {Offer: Admitted(), Seal: CopySealed()}
    return answers.get(type(request), Done())


@dataclass
class Host:
    """A holder whose peer answers as the test says; sleeping is all that takes time."""

    answer: Callable[[Request[Any]], Message | MemstoreError] = take
    is_here: bool = True
    is_damaged: bool = False  # the manifest of what it sends
    bad: tuple[int, ...] = ()  # chunks that are bad here too
    now: float = 0.0
    asked: list[str] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    pinned: list[Replica] = field(default_factory=list)
    store: Any = field(default_factory=Store)
    whole_bytes: int = 0
    whole_reply: Message = field(default_factory=CopySealed)
    errors: dict[type[Effect], MemstoreError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = HolderState(
            HostInfo("a", 1, ()), self.store, self.outgoing, replace(LIMITS, whole_bytes=self.whole_bytes),
            now=lambda: self.now, report=self.reports.append,
            ask=lambda request: None, is_stopping=lambda: False, is_alive=lambda owner: True,
            pin_numbers=itertools.count(1),
        )  # fmt: skip
        link: Any = SimpleNamespace(nonce="n", owner=None, job=SHARD.job, rank=SHARD.rank, attempt=SHARD.attempt)
        self.state.ranks.links["n"] = link

    def outgoing(self, shard: ShardId, digest: str) -> Replica | None:
        if not self.is_here:
            return None
        self.pinned.append(Replica(shard, digest, stored=self.store.stored))
        return self.pinned[-1]

    def play(self, steps: Procedure[Any]) -> Any:
        """Run a procedure, as the runner does."""
        value: Any = None
        error: MemstoreError | None = None
        while True:
            try:
                effect = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as end:
                assert all(replica.readers == 0 for replica in self.pinned), "a pin was kept"
                return end.value
            value, error = None, None
            try:
                value = self._perform(effect)
            except MemstoreError as exc:
                error = exc

    def _perform(self, effect: Effect) -> Any:
        if type(effect) in self.errors:
            raise self.errors[type(effect)]
        if isinstance(effect, effects.Sleep):
            self.now += effect.seconds
        elif isinstance(effect, effects.CallPeer):
            self.asked.append(str(effect.request.__struct_config__.tag))
            found = self.answer(effect.request)
            if isinstance(found, MemstoreError):
                raise found
            return found
        elif isinstance(effect, effects.SendChunks):
            self.sent.append(list(effect.chunks))
        elif isinstance(effect, effects.SendWhole):
            return self.whole_reply
        elif isinstance(effect, effects.SendToRank):
            self.reported.append(str(getattr(effect.message, "level", "")))
        elif isinstance(effect, effects.AwaitDigest):
            return "d"
        elif isinstance(effect, effects.Verify):
            for index in effect.chunks.intersection(self.bad):
                self.store.stored.slots[index] = None
            return sorted(self.store.stored.missing)
        elif isinstance(effect, effects.ReadManifest) and self.is_damaged:
            raise DigestMismatch("the manifest is damaged")
        elif isinstance(effect, effects.Reach) and effect.host == "gone":
            raise PeerUnreachable("host gone is not in the view")
        return b"manifest"

    def push(self, **fields: Any) -> None:
        push = Push(SHARD, "d", **{"target": "b", **fields})
        assert begin(self.state, push)
        self.play(run(self.state, push))
        assert not self.state.pushes.under_way

    @property
    def failure(self) -> tuple[str, bool]:
        """Why the only push was given up, and whether that is final."""
        [report] = self.reports
        assert isinstance(report, PushFailed)
        return report.why, report.is_final


def test_a_copy_is_offered_sent_and_sealed() -> None:
    """All chunks go in one round, and nothing is reported: the target reports its copy itself."""
    host = Host()
    host.push()
    assert (host.asked, host.sent, host.reports) == (["offer", "seal"], [[0, 1]], [])


def test_what_the_target_has_does_not_travel() -> None:
    """The answer to the offer ends the push."""
    host = Host(lambda request: HasCopy())
    host.push()
    assert (host.asked, host.sent) == (["offer"], [])


def test_the_rank_is_reported_when_the_last_of_its_copies_is_sealed() -> None:
    """One of two targets is not enough; a push that is under way counts for both callers that asked for it."""
    host = Host()
    first = replicate(host.state, SHARD, "d", ["b", "c"], None)
    again = replicate(host.state, SHARD, "d", ["b"], None)
    assert ([push.target for push in first], again) == (["b", "c"], [])
    host.play(run(host.state, first[1]))
    assert host.reported == []
    host.play(run(host.state, first[0]))
    assert host.reported == ["replicated", "replicated"]


def test_chunks_that_arrive_damaged_are_sent_again_and_not_for_ever() -> None:
    """Only missing chunks travel again; after three rounds the copy is given up and its slots are free."""
    host = Host(lambda request: ChunksMissing(chunks=(1,)) if isinstance(request, Seal) else take(request))
    host.push()
    assert host.sent == [[0, 1]] + [[1]] * (SEAL_ROUNDS_MAX - 1)
    assert host.asked == ["offer", *["seal"] * SEAL_ROUNDS_MAX, "abort"]
    assert host.failure == ("1 chunks arrived damaged or found no room 3 times", True)


def test_chunks_that_are_bad_here_are_not_sent_again_and_the_copy_is_reported_without_them() -> None:
    """Else the step would be committed with this copy alone, once the target has given up."""
    host = Host(lambda request: ChunksMissing(chunks=(1,)) if isinstance(request, Seal) else take(request), bad=(1,))
    host.push()
    assert host.sent == [[0, 1]]
    assert host.asked == ["offer", "seal", "abort"]
    copy, failed = host.reports
    assert isinstance(copy, Sealed)
    assert isinstance(failed, PushFailed)
    assert (copy.copy.missing, failed.is_final) == ((1,), True)
    assert "1 chunks of" in failed.why
    assert "on a are not what their digests say" in failed.why


@pytest.mark.parametrize("is_final", [False, True])
def test_a_target_without_room_is_asked_again_until_that_is_final_or_takes_too_long(is_final: bool) -> None:
    """A refusal for good ends the push at once; else room may come free within 10 s."""
    host = Host(lambda request: Refused(why="no room", is_final=is_final))
    host.push()
    assert host.failure == ("no room", True)
    assert (host.now > ROOM_WAIT_S) != is_final
    assert (len(host.asked) == 1) == is_final


def test_a_silent_target_is_pinged_first_and_given_up_once_it_would_count_as_dead() -> None:
    """The controller may still learn of it: no put waits for it longer than for a dead host (R18, R28)."""
    host = Host(lambda request: PeerUnreachable("no answer"))
    host.push()
    why, is_final = host.failure
    assert (why, is_final) == ("cannot reach b: no answer", True)
    assert host.asked[:2] == ["offer", "ping"]
    assert LIMITS.dead_after_s < host.now < ROOM_WAIT_S
    before = host.now
    host.reports.clear()
    host.push()
    assert (host.now, host.asked[-1]) == (before, "ping"), "the next push does not wait again"
    host.answer = take
    host.push()
    assert host.state.pushes.silent_since_s == {}


def test_a_target_that_the_view_does_not_have_counts_as_no_silent_one() -> None:
    """The controller knows that it is dead, and orders what is to be done."""
    host = Host()
    host.push(target="gone")
    assert host.failure[0].startswith("cannot reach gone")
    assert host.state.pushes.silent_since_s == {}


def test_what_breaks_while_a_put_is_digested_is_tried_again_once_it_is_stored() -> None:
    """The second try sends the stored replica; the fresh one is let go of before (R13)."""
    failures = [PeerUnreachable("reset")]  # then it answers a ping, an offer and a seal
    host, fresh = Host(lambda request: failures.pop() if failures else take(request)), Replica(digest="", readers=0)
    [push] = replicate(host.state, SHARD, "", ["b"], fresh)
    assert fresh.readers == 1
    host.play(run(host.state, push))
    assert (fresh.readers, len(host.pinned), host.reported) == (0, 1, ["replicated"])


def test_a_replica_that_was_dropped_meanwhile_needs_no_copy() -> None:
    """There is nothing to report: the controller ordered the drop."""
    host = Host(is_here=False)
    host.push()
    assert (host.asked, host.reports) == ([], [])


def test_a_repair_is_pushed_in_the_newest_attempt() -> None:
    """The target has fenced the attempt in which the step was put (R21)."""
    attempts: list[int] = []

    def note(request: Request[Any]) -> Message:
        attempts.extend([request.attempt] if isinstance(request, Offer) else [])
        return take(request)

    host = Host(note)
    host.state.fences.open("job", 4)
    host.push(is_repair=True)
    host.push()
    assert attempts == [4, 1]


def test_an_error_that_nothing_foresees_is_noted_and_said() -> None:
    """The push ends, and with it the wait of all callers that joined it."""

    def broken(request: Request[Any]) -> Message:
        raise ZeroDivisionError

    host = Host(broken)
    push = Push(SHARD, "d", "b")
    begin(host.state, push)
    steps = run(host.state, push)
    effect = next(steps)
    assert isinstance(effect, effects.Reach)
    noted = steps.throw(ZeroDivisionError("odd"))
    assert isinstance(noted, effects.Unexpected)
    with pytest.raises(StopIteration):
        steps.send(None)
    assert host.failure == ("ZeroDivisionError('odd')", True)


def test_a_refusal_while_sending_aborts_the_incoming_replica() -> None:
    """Its room at the target is free again at once (R13)."""
    host = Host(lambda request: PeerRefused("odd", is_final=True) if isinstance(request, Seal) else take(request))
    host.push()
    assert host.asked == ["offer", "seal", "abort"]


def test_a_small_shard_that_a_target_could_not_seal_is_aborted_there() -> None:
    """It came in one request, so the target may have taken room for it before that failed."""
    host = Host(whole_bytes=16, errors={effects.SendWhole: PeerRefused("no room for the manifest", is_final=True)})
    host.push()
    assert host.asked == ["abort"]
    assert host.failure == ("no room for the manifest", True)


def test_a_small_shard_that_arrives_damaged_is_digested_here_before_it_is_sent_again() -> None:
    """What is bad here too is not sent a second time."""
    host = Host(whole_bytes=16, bad=(1,), whole_reply=ChunksMissing(chunks=(1,)))
    host.push()
    assert (host.sent, host.asked) == ([], ["abort"])
    assert isinstance(host.reports[0], Sealed)
    assert host.store.stored.missing == {1}


def test_a_copy_whose_manifest_is_damaged_is_reported_as_none() -> None:
    """It may be the only one of a step that would commit with fewer copies, and could not be read."""
    host = Host(is_damaged=True)
    host.push()
    copy, failure = host.reports
    assert isinstance(copy, Sealed)
    assert isinstance(failure, PushFailed)
    assert (copy.copy.missing, failure.why) == ((0, 1), "the manifest is damaged")
    assert host.asked == ["offer", "abort"]
