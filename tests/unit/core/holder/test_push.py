"""What a push does, call by call, without a thread or a socket: tries again, gives up, says why (R13, R18, R28)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from holder_io import ScriptedIo

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.holder_io import CALL_TIMEOUT_S, Peer
from memstore.core.holder.puts.push import PUSH, ROOM_WAIT_S, SEAL_ROUNDS_MAX, Push, begin, replicate, run
from memstore.core.holder.state import Limits
from memstore.core.wire.codec import Message, Request
from memstore.core.wire.orders import PushTargets
from memstore.core.wire.peer_messages import ChunksLacking, Done, HasCopy, Offer, Refused, Seal
from memstore.core.wire.reports import PushFailed, Sealed
from memstore.errors import DigestMismatch, MemstoreError, PeerRefused, PeerUnreachable
from recovery.inventory import ShardId, ShardSpec

SHARD = ShardId("job", 1, 2, 0)
SENT_WHOLE = Limits(1.0, 3.0, whole_bytes=16)
T = TypeVar("T")


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


def take(request: Request[Any]) -> Message:
    """Answer as a peer that takes everything."""
    answers = {Offer: Done(), Seal: HasCopy()}
    return answers.get(type(request), Done())


@dataclass(eq=False)
class Host(ScriptedIo):
    """A holder whose peer answers as the test says; sleeping is all that takes time."""

    answer: Callable[[Request[Any]], Message | MemstoreError] = take
    is_here: bool = True
    bad: tuple[int, ...] = ()  # chunks that are bad here too
    whole_reply: Any = field(default_factory=HasCopy)
    lock = contextlib.nullcontext()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stored = StoredReplica(SHARD, ShardSpec("0" * 32, 16, 8, 2, 1), (b"0", b"1"), [4, 5])
        self.index = SimpleNamespace(find=lambda shard, digest: self.stored)
        self.pinned: list[Replica] = []
        link: Any = SimpleNamespace(nonce="n", owner=None, job=SHARD.job, rank=SHARD.rank, attempt=SHARD.attempt)
        self.state.ranks.links["n"] = link

    def lose_manifest(self, stored: StoredReplica) -> bool:
        stored.is_nameless = True
        return True

    def outgoing(self, shard: ShardId, digest: str) -> Replica | None:
        if not self.is_here:
            return None
        self.pinned.append(Replica(shard, digest, stored=self.stored))
        return self.pinned[-1]

    async def call_peer(self, peer: Peer, request: Request[Any], *, limit_s: float = CALL_TIMEOUT_S) -> Any:
        found = self.answer(request)
        if isinstance(found, MemstoreError):
            raise found
        return found

    async def send_whole(self, *given: Any, is_repair: bool) -> Any:
        return self.whole_reply

    async def verify(self, stored: StoredReplica, chunks: Any = None) -> list[int]:
        for index in chunks.intersection(self.bad):
            stored.slots[index] = None
        return sorted(stored.missing)

    def play(self, steps: Coroutine[Any, Any, T]) -> T:
        value = super().play(steps)
        assert all(replica.readers == 0 for replica in self.pinned), "a pin was kept"
        return value

    def push(self, **fields: Any) -> None:
        push = Push(SHARD, "d", **{"target": "b", **fields})
        assert begin(self.state, push)
        self.play(run(self, self.state, push))
        assert not self.state.pushes.under_way

    def replicate(self, digest: str, *targets: str, fresh: Any = None) -> None:
        """Begin the pushes of a put to these targets."""
        self.state.shared_shards.declare(PushTargets(job="job", attempt=1, targets=targets, ranks=()))
        assert self.play(replicate(self, self.state, SHARD, digest, fresh))

    @property
    def requests(self) -> list[Request[Any]]:
        """What was asked of peers."""
        return [request for _, request, *_ in self.of("call_peer")]

    @property
    def asked(self) -> list[str]:
        """The names of what was asked of peers."""
        return [str(request.__struct_config__.tag) for request in self.requests]

    @property
    def sent(self) -> list[list[int]]:
        """The chunks that were sent in each round."""
        return [list(chunks) for _, _, chunks, _ in self.of("send_chunks")]

    @property
    def reported(self) -> list[str]:
        """The levels that ranks were sent."""
        return [message.level for _, message in self.of("send_to_rank")]

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
    host.replicate("d", "b", "c")
    assert host.names == ["release_sends", "start", "start"]
    host.replicate("d", "b")
    assert [(lane, procedure, push.target) for lane, procedure, (_, push) in host.started] == [
        (PUSH, run, "b"),
        (PUSH, run, "c"),
    ]
    host.play_started(1)
    assert host.reported == []
    host.play_started(0)
    assert host.reported == ["replicated", "replicated"]


def test_chunks_that_arrive_damaged_are_sent_again_and_not_for_ever() -> None:
    """Only missing chunks travel again; after three rounds the copy is given up and its slots are free."""
    host = Host(lambda request: ChunksLacking(chunks=(1,)) if isinstance(request, Seal) else take(request))
    host.push()
    assert host.sent == [[0, 1]] + [[1]] * (SEAL_ROUNDS_MAX - 1)
    assert host.asked == ["offer", *["seal"] * SEAL_ROUNDS_MAX, "abort"]
    assert host.failure == ("1 chunks arrived damaged or found no room 3 times", True)


def test_chunks_that_are_bad_here_are_not_sent_again_and_the_copy_is_reported_without_them() -> None:
    """Else the step would be committed with this copy alone, once the target has given up."""
    host = Host(lambda request: ChunksLacking(chunks=(1,)) if isinstance(request, Seal) else take(request), bad=(1,))
    host.push()
    assert host.sent == [[0, 1]]
    assert host.asked == ["offer", "seal", "abort"]
    copy, failed = host.reports
    assert isinstance(copy, Sealed)
    assert isinstance(failed, PushFailed)
    assert (copy.copy.missing, failed.is_final) == ((1,), True)
    assert "1 chunks of" in failed.why
    assert "on me are not what their digests say" in failed.why


@pytest.mark.parametrize("is_final", [False, True])
def test_a_target_without_room_is_asked_again_until_that_is_final_or_takes_too_long(is_final: bool) -> None:
    """A refusal for good ends the push at once; else room may come free within 10 s."""
    host = Host(lambda request: Refused(why="no room", is_final=is_final))
    host.push()
    assert host.failure == ("no room", True)
    assert (ROOM_WAIT_S < host.now < ROOM_WAIT_S + 1.0) != is_final
    assert (len(host.asked) == 1) == is_final


def test_a_silent_target_is_pinged_first_and_given_up_once_it_would_count_as_dead() -> None:
    """The controller may still learn of it: no put waits for it longer than for a dead host (R18, R28)."""
    host = Host(lambda request: PeerUnreachable("no answer"))
    host.push()
    why, is_final = host.failure
    assert (why, is_final) == ("cannot reach b: no answer", True)
    assert host.asked[:2] == ["offer", "ping"]
    assert host.limits.dead_after_s < host.now < ROOM_WAIT_S
    before = host.now
    host.reports.clear()
    host.push()
    assert (host.now, host.asked[-1]) == (before, "ping"), "the next push does not wait again"
    host.answer = take
    host.push()
    assert host.state.pushes.silent_since_s == {}


def test_a_target_that_the_view_does_not_have_counts_as_no_silent_one() -> None:
    """The controller knows that it is dead, and orders what is to be done."""
    host = Host(errors={"reach": PeerUnreachable("host gone is not in the view")})
    host.push(target="gone")
    assert host.failure[0].startswith("cannot reach gone")
    assert host.state.pushes.silent_since_s == {}


def test_what_breaks_while_a_put_is_digested_is_tried_again_once_it_is_stored() -> None:
    """The second try sends the stored replica; the fresh one is let go of before (R13)."""
    failures = [PeerUnreachable("reset")]  # then it answers a ping, an offer and a seal
    host, fresh = Host(lambda request: failures.pop() if failures else take(request)), Replica(digest="", readers=0)
    host.replicate("", "b", fresh=fresh)
    assert fresh.readers == 1
    host.play_started()
    assert (fresh.readers, len(host.pinned), host.reported) == (0, 1, ["replicated"])


def test_a_replica_that_was_dropped_meanwhile_needs_no_copy() -> None:
    """There is nothing to report: the controller ordered the drop."""
    host = Host(is_here=False)
    host.push()
    assert (host.asked, host.reports) == ([], [])


def test_a_repair_is_pushed_in_the_newest_attempt() -> None:
    """The target has fenced the attempt in which the step was put (R21)."""
    host = Host()
    host.state.fences.open("job", 4)
    host.push(is_repair=True)
    host.push()
    assert [request.attempt for request in host.requests if isinstance(request, Offer)] == [4, 1]


def test_an_error_that_nothing_foresees_is_noted_and_said() -> None:
    """The push ends, and with it the wait of all callers that joined it."""

    def broken(request: Request[Any]) -> Message:
        raise ZeroDivisionError("odd")

    host = Host(broken)
    host.push()
    assert len(host.of("unexpected")) == 1
    assert host.failure == ("ZeroDivisionError('odd')", True)


def test_a_refusal_while_sending_aborts_the_incoming_replica() -> None:
    """Its room at the target is free again at once (R13)."""
    host = Host(lambda request: PeerRefused("odd", is_final=True) if isinstance(request, Seal) else take(request))
    host.push()
    assert host.asked == ["offer", "seal", "abort"]


def test_a_small_shard_that_a_target_could_not_seal_is_aborted_there() -> None:
    """It came in one request, so the target may have taken room for it before that failed."""
    host = Host(limits=SENT_WHOLE, errors={"send_whole": PeerRefused("no room for the manifest", is_final=True)})
    host.push()
    assert host.asked == ["abort"]
    assert host.failure == ("no room for the manifest", True)


def test_a_small_shard_that_arrives_damaged_is_digested_here_before_it_is_sent_again() -> None:
    """What is bad here too is not sent a second time."""
    host = Host(limits=SENT_WHOLE, bad=(1,), whole_reply=ChunksLacking(chunks=(1,)))
    host.push()
    assert (host.sent, host.asked) == ([], ["abort"])
    assert isinstance(host.reports[0], Sealed)
    assert host.stored.missing == {1}


def test_a_copy_whose_manifest_is_damaged_is_reported_as_none() -> None:
    """It may be the only one of a step that would commit with fewer copies, and could not be read."""
    host = Host(errors={"read_manifest": DigestMismatch("the manifest is damaged")})
    host.push()
    copy, failure = host.reports
    assert isinstance(copy, Sealed)
    assert isinstance(failure, PushFailed)
    assert (copy.copy.missing, failure.why) == ((0, 1), "the manifest is damaged")
    assert host.asked == ["offer", "abort"]
