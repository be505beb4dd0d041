"""What becomes of a put, call by call: its seal, what a fence waits for, how it is pushed to peers (R7-R28)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest
from holder_io import ScriptedIo

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks
from memstore.core.holder.holder_io import CALL_TIMEOUT_S, Peer, StreamingSource
from memstore.core.holder.puts import push, seal
from memstore.core.holder.puts.push import PUSH, ROOM_WAIT_S, SEAL_ROUNDS_MAX, Push, begin, replicate, run
from memstore.core.holder.state import Limits, SubmittedPut
from memstore.core.wire.calls import SkipStep
from memstore.core.wire.codec import Message, Request
from memstore.core.wire.ids import WireCopy
from memstore.core.wire.orders import PushTargets, StepLevel
from memstore.core.wire.peer_messages import ChunksLacking, Done, HasCopy, Offer, Refused, Seal
from memstore.core.wire.rank_messages import PutReady, PutTerms, SlotSample
from memstore.core.wire.reports import Fenced, PushFailed, Sealed
from memstore.errors import CapacityError, DigestMismatch, IntegrityError, MemstoreError, PeerRefused, PeerUnreachable
from recovery.inventory import Copy, ShardId, ShardSpec

# -- seal ---------------------------------------------------------------------------------------------
# What becomes of a submission, and what a fence waits for, call by call (R7, R8, R12, R21).


SHARD = ShardId("job", 1, 2, 0)
STORED = StoredReplica(SHARD, ShardSpec("d", 16, 8, 2, 1), (b"0", b"1"), [4, 5])
COPY = Copy(SHARD, STORED.spec, "me")


@dataclass(eq=False)
class Link:
    """A rank's process that leases slots 4 and 5."""

    owner: Owner = field(default_factory=lambda: Owner(7, 1, 1))
    nonce: str = "n"
    job: str = "job"
    rank: int = 0
    attempt: int = 1
    is_retired: bool = False


@dataclass
class Fresh:
    """The shard while it is digested."""

    why: str = ""
    pushes: int = 0

    def begin(self) -> None:
        self.pushes += 1

    def fail(self, why: str) -> None:
        self.why = why


@dataclass(eq=False)
class Host(ScriptedIo):
    """A holder whose store has what the test puts there, and whose copies go to one other host."""

    known: StoredReplica | None = None
    differing: list[int] = field(default_factory=list)
    leased: set[int] = field(default_factory=lambda: {4, 5})
    freed: list[int] = field(default_factory=list)
    aborted: list[tuple[str, int]] = field(default_factory=list)
    fresh: Any = field(default_factory=Fresh)
    chunk_bytes: int = 8
    arena_identity: str = "here"
    lock = contextlib.nullcontext()
    index = SimpleNamespace(
        shards={},
        find=lambda shard, digest: STORED,
        copies=lambda host, job: [COPY],
        end_preparation=lambda job, before: None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state.shared_shards.declare(PushTargets(job="job", attempt=1, targets=("b",), ranks=()))

    def take_over(self, shard: ShardId, owner: Owner, slots: list[int] | None) -> tuple[StoredReplica | None, bool]:
        is_mine = slots is not None and self.leased.issuperset(slots)
        self.leased.difference_update(slots or () if is_mine else ())
        return self.known, is_mine

    def give_back(self, slots: list[int]) -> None:
        self.freed += slots

    def abort_older(self, job: str, attempt: int) -> None:
        self.aborted.append((job, attempt))

    async def compare_sample(self, slots: Sequence[int], nbytes: int, seen: SlotSample) -> list[int]:
        return self.differing

    async def open_fresh(self, *given: Any) -> StreamingSource:
        return self.fresh  # type: ignore[no-any-return]

    async def digest_and_store(self, *given: Any) -> StoredReplica:
        return STORED

    def add(self, link: Link | None = None, **changes: Any) -> SubmittedPut | None:
        """Hand both slots over."""
        ready = PutReady(
            terms=PutTerms(attempt=1, step=2, world_size=1),
            slots=(4, 5),
            nbytes=16,
            layout=b"",
            arena="here",
            sample=SlotSample(seed=0, digests=b""),
            stall_s=0.0,
        )
        terms = {name: changes.pop(name) for name in PutTerms.__struct_fields__ if name in changes}
        ready = msgspec.structs.replace(ready, terms=msgspec.structs.replace(ready.terms, **terms), **changes)
        return seal.add(self.state, link or Link(), ready)

    def seal(self, put: SubmittedPut | None = None, **changes: Any) -> None:
        """Seal a submission; nothing of it is pending afterwards."""
        put = put or self.add(**changes)
        assert put is not None
        self.play(seal.run(self, self.state, put))
        assert not self.state.puts.pending
        assert not self.state.puts.sealing

    @property
    def levels(self) -> list[StepLevel]:
        """The levels that ranks were sent."""
        return [message for _, message in self.of("send_to_rank") if isinstance(message, StepLevel)]

    @property
    def reported(self) -> list[ShardId]:
        """The copies that the controller was sent."""
        return [report.copy.shard.id for report in self.reports if isinstance(report, Sealed)]

    @property
    def why_given_up(self) -> tuple[str, bool]:
        """What is reported to the controller of the put that failed."""
        [reported] = self.levels
        [skip] = self.asks
        assert isinstance(skip, SkipStep)
        assert (skip.job, skip.attempt, skip.rank, skip.step) == ("job", 1, 0, 2)
        assert (reported.level, reported.reason) == ("failed", skip.why)
        return skip.why, skip.is_failed


def test_a_submitted_put_is_pushed_while_it_is_digested_and_said_once_it_is_stored() -> None:
    """In that order; the copies of it tell the rank when they are sealed, not this."""
    host = Host()
    link: Any = Link()
    host.state.ranks.links["n"] = link
    host.seal(host.add(link))
    order = ["open_fresh", "start", "digest_and_store", "send_to_rank"]
    assert [name for name in host.names if name in order] == order
    assert [(procedure, made.target) for _, procedure, (_, made) in host.started] == [(push.run, "b")]
    assert [reported.level for reported in host.levels] == ["sealed"]
    assert (host.reported, host.freed) == ([SHARD], [])


def test_a_submitted_put_that_has_no_targets_is_said_to_be_replicated_at_once() -> None:
    """No copy of it is to come (R15)."""
    host = Host()
    link: Any = Link()
    host.state.ranks.links["n"] = link
    host.state.shared_shards.declare(PushTargets(job="job", attempt=1, targets=(), ranks=()))
    host.seal(host.add(link))
    assert [reported.level for reported in host.levels] == ["sealed", "replicated"]


def test_a_submitted_put_that_came_before_a_fence_is_finished_under_it() -> None:
    """Its stamp is the fence of the moment at which it came (R21)."""
    host = Host()
    put = host.add()
    host.state.fences.open("job", 2)
    host.seal(put)
    assert host.reported == [SHARD]


def test_a_submitted_put_that_comes_after_a_fence_is_refused_and_its_slots_are_free() -> None:
    """The rank of a fenced attempt gets the reason (R21)."""
    host = Host()
    host.state.fences.open("job", 2)
    host.seal()
    assert (host.freed, host.why_given_up) == ([4, 5], ("attempt 2 was opened", True))


@pytest.mark.parametrize("changes", [{"slots": (4, 6)}, {"is_lost": True}, {"arena": "another"}])
def test_slots_that_are_not_the_ranks_own_are_not_taken_and_not_freed(changes: dict[str, Any]) -> None:
    """They may be another process's by now (R8)."""
    host = Host()
    host.seal(**changes)
    why = "the rank no longer had the lease of these slots (has this host's holder restarted?)"
    assert (host.freed, host.why_given_up[0]) == ([], why)


def test_what_is_stored_already_is_said_again_and_its_slots_are_free() -> None:
    """A link that came back submits again what was sealed meanwhile."""
    host = Host(known=STORED)
    host.seal()
    assert (host.freed, host.reported, host.of("digest_and_store")) == ([4, 5], [SHARD], [])
    assert [made.digest for _, _, (_, made) in host.started] == ["d"]


def test_bytes_that_the_rank_did_not_see_there_are_not_kept() -> None:
    """It has another file mapped than its holder, or writes on after its put (R8)."""
    host = Host(differing=[1])
    host.seal()
    assert host.freed == [4, 5]
    assert "1 of 2 chunks differ, the first is chunk 1 in slot 5" in host.why_given_up[0]


@pytest.mark.parametrize(("error", "is_failed"), [(CapacityError("no room"), False), (IntegrityError("odd"), True)])
def test_a_put_that_cannot_be_stored_is_given_up_and_ends_its_pushes(error: MemstoreError, is_failed: bool) -> None:
    """Want of room is no failure: the step is skipped on all ranks alike (R12)."""
    host = Host(errors={"digest_and_store": error})
    host.seal()
    assert host.why_given_up == (f"{type(error).__name__}: {error}", is_failed)
    assert host.fresh.why == host.why_given_up[0]


@pytest.mark.parametrize(
    "changes", [{"nbytes": 17}, {"shared_chunks": 3}, {"digests": bytes(16)}, {"digests": bytes(33)}]
)
def test_a_submitted_put_that_makes_no_sense_takes_no_slot(changes: dict[str, Any]) -> None:
    """All of it is read before a slot changes hands."""
    host = Host()
    host.seal(**changes)
    assert (host.leased, host.why_given_up[1]) == ({4, 5}, True)


def test_digests_that_a_put_brings_are_one_for_each_chunk() -> None:
    """Their order is that of the slots; a put without any is digested by its holder (R14)."""
    host = Host()
    host.seal(digests=b"a" * 16 + b"b" * 16)
    [(_, ready, _)] = host.of("digest_and_store")
    assert [given[1:] for given in host.of("open_fresh")] == [[(4, 5), [8, 8], [b"a" * 16, b"b" * 16]]]
    assert seal.given_digests(ready) == [b"a" * 16, b"b" * 16]
    with pytest.raises(MemstoreError, match="2 chunks came with 31 bytes of digests"):
        seal.given_digests(msgspec.structs.replace(ready, digests=bytes(31)))
    assert seal.given_digests(msgspec.structs.replace(ready, digests=None)) is None


def test_the_same_shard_is_sealed_once_at_a_time() -> None:
    """A second link waits until the first one's submission is over, and finds the shard stored."""
    host = Host()
    host.state.puts.sealing.add(SHARD)

    def end() -> None:
        host.state.puts.sealing.clear()
        host.known = STORED

    host.meanwhile = end
    host.seal()
    assert host.of("digest_and_store") == []


def test_a_retired_link_leaves_its_submit_to_the_new_one() -> None:
    """What it queued is submitted again there; nothing is said of it here, and its slots stay as they are."""
    host, link = Host(), Link()
    put = host.add(link)
    link.is_retired = True
    assert host.add(link) is None
    host.seal(put)
    assert (host.leased, host.levels) == ({4, 5}, [])


def test_a_fence_is_answered_once_older_attempts_have_nothing_unfinished() -> None:
    """Those that came before it count; what a newer attempt submits does not (R21)."""
    host = Host()
    older, newer = host.add(), host.add(attempt=2)
    assert older is not None
    assert newer is not None
    host.meanwhile = lambda: seal.done(host.state, older)
    host.state.ranks.links.update(n=Link(), old=Link(nonce="old"))  # type: ignore[arg-type]
    host.play(seal.fence(host, host.state, "job", 2, ["n"]))
    assert [link.nonce for link, _ in host.of("send_to_rank")] == ["old"]
    assert host.names == ["wait_for", "send_to_rank"]
    assert host.reports == [Fenced(job="job", attempt=2, copies=(WireCopy.of(COPY),))]
    assert host.aborted == [("job", 2)]


def test_a_fence_waits_for_a_seal_that_hangs_no_longer_than_its_limit() -> None:
    """It answers all the same, and says so: a restore must not wait for ever (R21)."""
    host = Host()
    host.add()
    host.play(seal.fence(host, host.state, "job", 2, []))
    assert host.now == seal.FENCE_DRAIN_S
    assert (len(host.of("warn")), [type(report) for report in host.reports]) == (1, [Fenced])


def test_a_bye_waits_for_what_its_process_submitted() -> None:
    """Of another process nothing is waited for."""
    host = Host()
    put = host.add()
    assert put is not None
    assert host.play(ranks.await_owner(host, host.state, Owner(8, 1, 1), 1.0)) is True
    assert host.play(ranks.await_owner(host, host.state, put.link.owner, 1.0)) is False


def test_a_submitted_put_of_a_link_that_was_retired_is_passed_over_at_once() -> None:
    """The same shard is being sealed for the process's new link: this waits for nothing and gives up no step (R8)."""
    host, link = Host(), Link()
    put = host.add(link)
    assert put is not None
    host.state.puts.sealing.add(SHARD)
    link.is_retired = True
    host.play(seal.run(host, host.state, put))
    assert (host.now, host.levels, host.asks, host.freed) == (0.0, [], [], [])
    assert host.state.puts.sealing == {SHARD}


# -- push ---------------------------------------------------------------------------------------------
# What a push does, call by call, without a thread or a socket: tries again, gives up, says why (R13, R18, R28).


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
class PushHost(ScriptedIo):
    """A holder whose peer answers as the test says; sleeping is all that takes time."""

    answer: Callable[[Request[Any]], Message | MemstoreError] = take
    is_here: bool = True
    bad: tuple[int, ...] = ()  # chunks that are bad here too
    whole_reply: Any = field(default_factory=HasCopy)
    lock = contextlib.nullcontext()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stored = StoredReplica(SHARD, ShardSpec("0" * 32, 16, 8, 2, 1), (b"0", b"1"), [4, 5])
        self.index = SimpleNamespace(find=lambda shard, digest: self.stored, shards={(SHARD, "d"): self.stored})
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
        return [list(given[2]) for given in self.of("send_chunks")]

    @property
    def bases(self) -> list[tuple[bytes, ...]]:
        """The digests of the chunks that each round may send patches of."""
        return [tuple(given[3]) for given in self.of("send_chunks")]

    def keep(self, *shards: ShardId) -> None:
        """Have other shards here, whose only chunk's digest is named for the step."""
        for each in shards:
            stored = StoredReplica(each, ShardSpec("1" * 32, 8, 8, 1, 1), (b"step %d" % each.step,), [6])
            self.index.shards[each, stored.spec.digest] = stored

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
    host = PushHost()
    host.push()
    assert (host.asked, host.sent, host.reports) == (["offer", "seal"], [[0, 1]], [])


def test_what_the_target_has_does_not_travel() -> None:
    """The answer to the offer ends the push."""
    host = PushHost(lambda request: HasCopy())
    host.push()
    assert (host.asked, host.sent) == (["offer"], [])


def test_the_rank_is_reported_when_the_last_of_its_copies_is_sealed() -> None:
    """One of two targets is not enough; a push that is under way counts for both callers that asked for it."""
    host = PushHost()
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


def test_patches_are_of_the_newest_older_step_that_the_target_may_have() -> None:
    """Not of a newer step, another rank's, or one that is on its way to the target still."""
    host = PushHost()
    host.push()
    assert host.bases == [()]
    older = [SHARD._replace(attempt=0, step=9), SHARD._replace(step=1)]
    host.keep(*older, SHARD._replace(step=3), SHARD._replace(step=1, rank=1), SHARD._replace(job="other", step=1))
    host.push()
    assert begin(host.state, Push(older[1], "1" * 32, "b"))
    host.play(run(host, host.state, Push(SHARD, "d", "b")))
    host.play(run(host, host.state, Push(SHARD, "d", "c")))
    assert host.bases[1:] == [(b"step 1",), (b"step 9",), (b"step 1",)]


def test_repairs_and_chunks_that_were_refused_travel_whole() -> None:
    """A base that is bad at the target would spoil every patch of it."""
    host = PushHost()
    host.keep(SHARD._replace(step=1))
    host.push(is_repair=True)
    assert host.bases == [()]
    host = PushHost(lambda request: ChunksLacking(chunks=(1,)) if isinstance(request, Seal) else take(request))
    host.keep(SHARD._replace(step=1))
    host.push()
    assert host.bases == [(b"step 1",)] + [()] * (SEAL_ROUNDS_MAX - 1)


def test_chunks_that_arrive_damaged_are_sent_again_and_not_for_ever() -> None:
    """Only missing chunks travel again; after three rounds the copy is given up and its slots are free."""
    host = PushHost(lambda request: ChunksLacking(chunks=(1,)) if isinstance(request, Seal) else take(request))
    host.push()
    assert host.sent == [[0, 1]] + [[1]] * (SEAL_ROUNDS_MAX - 1)
    assert host.asked == ["offer", *["seal"] * SEAL_ROUNDS_MAX, "abort"]
    assert host.failure == ("1 chunks arrived damaged or found no room 3 times", True)


def test_chunks_that_are_bad_here_are_not_sent_again_and_the_copy_is_reported_without_them() -> None:
    """Else the step would be committed with this copy alone, once the target has given up."""
    host = PushHost(
        lambda request: ChunksLacking(chunks=(1,)) if isinstance(request, Seal) else take(request), bad=(1,)
    )
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
    host = PushHost(lambda request: Refused(why="no room", is_final=is_final))
    host.push()
    assert host.failure == ("no room", True)
    assert (ROOM_WAIT_S < host.now < ROOM_WAIT_S + 1.0) != is_final
    assert (len(host.asked) == 1) == is_final


def test_a_silent_target_is_pinged_first_and_given_up_once_it_would_count_as_dead() -> None:
    """The controller may still learn of it: no put waits for it longer than for a dead host (R18, R28)."""
    host = PushHost(lambda request: PeerUnreachable("no answer"))
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
    host = PushHost(errors={"reach": PeerUnreachable("host gone is not in the view")})
    host.push(target="gone")
    assert host.failure[0].startswith("cannot reach gone")
    assert host.state.pushes.silent_since_s == {}


def test_what_breaks_while_a_put_is_digested_is_tried_again_once_it_is_stored() -> None:
    """The second try sends the stored replica; the fresh one is let go of before (R13)."""
    failures = [PeerUnreachable("reset")]  # then it answers a ping, an offer and a seal
    host, fresh = PushHost(lambda request: failures.pop() if failures else take(request)), Replica(digest="", readers=0)
    host.replicate("", "b", fresh=fresh)
    assert fresh.readers == 1
    host.play_started()
    assert (fresh.readers, len(host.pinned), host.reported) == (0, 1, ["replicated"])


def test_a_replica_that_was_dropped_meanwhile_needs_no_copy() -> None:
    """There is nothing to report: the controller ordered the drop."""
    host = PushHost(is_here=False)
    host.push()
    assert (host.asked, host.reports) == ([], [])


def test_a_repair_is_pushed_in_the_newest_attempt() -> None:
    """The target has fenced the attempt in which the step was put (R21)."""
    host = PushHost()
    host.state.fences.open("job", 4)
    host.push(is_repair=True)
    host.push()
    assert [request.attempt for request in host.requests if isinstance(request, Offer)] == [4, 1]


def test_an_error_that_nothing_foresees_is_noted_and_said() -> None:
    """The push ends, and with it the wait of all callers that joined it."""

    def broken(request: Request[Any]) -> Message:
        raise ZeroDivisionError("odd")

    host = PushHost(broken)
    host.push()
    assert len(host.of("unexpected")) == 1
    assert host.failure == ("ZeroDivisionError('odd')", True)


def test_a_refusal_while_sending_aborts_the_incoming_replica() -> None:
    """Its room at the target is free again at once (R13)."""
    host = PushHost(lambda request: PeerRefused("odd", is_final=True) if isinstance(request, Seal) else take(request))
    host.push()
    assert host.asked == ["offer", "seal", "abort"]


def test_a_small_shard_that_a_target_could_not_seal_is_aborted_there() -> None:
    """It came in one request, so the target may have taken room for it before that failed."""
    host = PushHost(limits=SENT_WHOLE, errors={"send_whole": PeerRefused("no room for the manifest", is_final=True)})
    host.push()
    assert host.asked == ["abort"]
    assert host.failure == ("no room for the manifest", True)


def test_a_small_shard_that_arrives_damaged_is_digested_here_before_it_is_sent_again() -> None:
    """What is bad here too is not sent a second time."""
    host = PushHost(limits=SENT_WHOLE, bad=(1,), whole_reply=ChunksLacking(chunks=(1,)))
    host.push()
    assert (host.sent, host.asked) == ([], ["abort"])
    assert isinstance(host.reports[0], Sealed)
    assert host.stored.missing == {1}


def test_a_copy_whose_manifest_is_damaged_is_reported_as_none() -> None:
    """It may be the only one of a step that would commit with fewer copies, and could not be read."""
    host = PushHost(errors={"read_manifest": DigestMismatch("the manifest is damaged")})
    host.push()
    copy, failure = host.reports
    assert isinstance(copy, Sealed)
    assert isinstance(failure, PushFailed)
    assert (copy.copy.missing, failure.why) == ((0, 1), "the manifest is damaged")
    assert host.asked == ["offer", "abort"]
