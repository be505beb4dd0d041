"""What becomes of a submission, and what a fence waits for, effect by effect (R7, R8, R12, R21)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.slot_table import Owner
from memstore.core.holder import effects, ranks
from memstore.core.holder.effects import Effect, Procedure
from memstore.core.holder.puts import seal
from memstore.core.holder.state import HolderState, Limits, SubmittedPut
from memstore.core.wire.calls import RankCall, SkipStep
from memstore.core.wire.ids import WireCopy
from memstore.core.wire.messages import HostInfo
from memstore.core.wire.rank_messages import PutReady, SlotSample, StepLevel
from memstore.core.wire.reports import Fenced, Report, Sealed
from memstore.errors import CapacityError, IntegrityError, MemstoreError
from recovery.inventory import Copy, ShardId, ShardSpec

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
    slots: list[int] = field(default_factory=list)

    def extend(self, slots: Any, digests: Any) -> None:
        self.slots += slots

    def fail(self, why: str) -> None:
        self.why = why


@dataclass
class Host:
    """A holder whose store has what the test puts there."""

    known: StoredReplica | None = None
    errors: dict[type[Effect], Exception] = field(default_factory=dict)
    differing: list[int] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None  # happens during every wait
    now: float = 0.0
    leased: set[int] = field(default_factory=lambda: {4, 5})
    freed: list[int] = field(default_factory=list)
    aborted: list[tuple[str, int]] = field(default_factory=list)
    done: list[Effect] = field(default_factory=list)
    asked: list[RankCall] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    chunk_bytes: int = 8
    arena_identity: str = "here"

    def __post_init__(self) -> None:
        store: Any = self
        self.lock = contextlib.nullcontext()
        self.index = SimpleNamespace(
            shards={}, find=lambda shard, digest: STORED, copies=lambda host, job: [COPY],
            end_preparation=lambda job, before: None,
        )  # fmt: skip
        self.fresh = Fresh()
        self.state = HolderState(
            HostInfo("me", 1, ()), store, lambda shard, digest: None, Limits(1.0, 3.0), now=lambda: self.now,
            report=self.reports.append, ask=self.asked.append, is_stopping=lambda: False, is_alive=lambda owner: True,
            pin_numbers=itertools.count(1),
        )  # fmt: skip

    def take_over(self, shard: ShardId, owner: Owner, slots: list[int] | None) -> tuple[StoredReplica | None, bool]:
        is_mine = slots is not None and self.leased.issuperset(slots)
        self.leased.difference_update(slots or () if is_mine else ())
        return self.known, is_mine

    def give_back(self, slots: list[int]) -> None:
        self.freed += slots

    def abort_older(self, job: str, attempt: int) -> None:
        self.aborted.append((job, attempt))

    def play(self, steps: Procedure[Any]) -> Any:
        """Run a procedure, as the runner does."""
        value: Any = None
        error: Exception | None = None
        while True:
            try:
                effect = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            value, error = None, None
            try:
                value = self._perform(effect)
            except MemstoreError as exc:
                error = exc

    def _perform(self, effect: Effect) -> Any:
        self.done.append(effect)
        if type(effect) in self.errors:
            raise self.errors[type(effect)]
        if isinstance(effect, effects.WaitFor):
            if not effect.is_there():
                self.meanwhile()
                self.now += effect.limit_s or 0.0
            return effect.is_there()
        if isinstance(effect, effects.OnStore):
            return effect.call()
        if isinstance(effect, effects.DigestAndStore):
            return STORED
        values = {effects.OpenFresh: self.fresh, effects.Replicate: True, effects.CompareSample: self.differing}
        return values.get(type(effect))

    def add(self, link: Link | None = None, **changes: Any) -> SubmittedPut | None:
        """Hand both slots over."""
        ready = PutReady(
            attempt=1, step=2, slots=(4, 5), nbytes=16, world_size=1, layout=b"", arena="here",
            sample=SlotSample(seed=0, digests=b""), shared_chunks=None, began_s=0.0, stall_s=0.0,
        )  # fmt: skip
        return seal.add(self.state, link or Link(), msgspec.structs.replace(ready, **changes))

    def seal(self, put: SubmittedPut | None = None, **changes: Any) -> None:
        """Seal a submission; nothing of it is pending afterwards."""
        put = put or self.add(**changes)
        assert put is not None
        self.play(seal.run(self.state, put))
        assert not self.state.puts.pending
        assert not self.state.puts.sealing

    def of(self, kind: type[Any]) -> list[Any]:
        """The effects of a kind that were asked for."""
        return [effect for effect in self.done if isinstance(effect, kind)]

    @property
    def levels(self) -> list[StepLevel]:
        """The levels that ranks were sent."""
        return [effect.message for effect in self.of(effects.SendToRank) if isinstance(effect.message, StepLevel)]

    @property
    def reported(self) -> list[ShardId]:
        """The copies that the controller was sent."""
        return [report.copy.shard.id for report in self.reports if isinstance(report, Sealed)]

    @property
    def why_given_up(self) -> tuple[str, bool]:
        """What is reported to the controller of the put that failed."""
        [reported] = self.levels
        [skip] = self.asked
        assert isinstance(skip, SkipStep)
        assert (skip.job, skip.attempt, skip.rank, skip.step) == ("job", 1, 0, 2)
        assert (reported.level, reported.reason) == ("failed", skip.why)
        return skip.why, skip.is_failed


def test_a_submitted_put_is_pushed_while_it_is_digested_and_said_once_it_is_stored() -> None:
    """In that order; the copies of it tell the rank when they are sealed, not this."""
    host = Host()
    host.seal()
    order = [effects.OpenFresh, effects.Replicate, effects.DigestAndStore, effects.SendToRank]
    assert [type(effect) for effect in host.done if type(effect) in order] == order
    assert [reported.level for reported in host.levels] == ["sealed"]
    assert (host.reported, host.freed) == ([SHARD], [])


def test_a_submitted_put_that_came_before_a_fence_is_finished_under_it() -> None:
    """Its stamp is the fence of the moment at which it came (R21)."""
    host = Host()
    put = host.add()
    seal.open_fence(host.state, "job", 2)
    host.seal(put)
    assert host.reported == [SHARD]


def test_a_submitted_put_that_comes_after_a_fence_is_refused_and_its_slots_are_free() -> None:
    """The rank of a fenced attempt gets the reason (R21)."""
    host = Host()
    seal.open_fence(host.state, "job", 2)
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
    assert (host.freed, host.reported, host.of(effects.DigestAndStore)) == ([4, 5], [SHARD], [])


def test_bytes_that_the_rank_did_not_see_there_are_not_kept() -> None:
    """It has another file mapped than its holder, or writes on after its put (R8)."""
    host = Host(differing=[1])
    host.seal()
    assert host.freed == [4, 5]
    assert "1 of 2 chunks differ, the first is chunk 1 in slot 5" in host.why_given_up[0]


@pytest.mark.parametrize(("error", "is_failed"), [(CapacityError("no room"), False), (IntegrityError("odd"), True)])
def test_a_put_that_cannot_be_stored_is_given_up_and_ends_its_pushes(error: MemstoreError, is_failed: bool) -> None:
    """Want of room is no failure: the step is skipped on all ranks alike (R12)."""
    host = Host(errors={effects.DigestAndStore: error})
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
    [effect] = host.of(effects.DigestAndStore)
    assert seal.given_digests(effect.ready) == [b"a" * 16, b"b" * 16]
    with pytest.raises(MemstoreError, match="2 chunks came with 31 bytes of digests"):
        seal.given_digests(msgspec.structs.replace(effect.ready, digests=bytes(31)))
    assert seal.given_digests(msgspec.structs.replace(effect.ready, digests=None)) is None


def test_the_same_shard_is_sealed_once_at_a_time() -> None:
    """A second link waits until the first one's submission is over, and finds the shard stored."""
    host = Host()
    host.state.puts.sealing.add(SHARD)

    def end() -> None:
        host.state.puts.sealing.clear()
        host.known = STORED

    host.meanwhile = end
    host.seal()
    assert host.of(effects.DigestAndStore) == []


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
    host.play(seal.fence(host.state, "job", 2, ["n"]))
    assert [reported.link.nonce for reported in host.of(effects.SendToRank)] == ["old"]
    assert [type(effect) for effect in host.done] == [effects.WaitFor, effects.SendToRank]
    assert host.reports == [Fenced(job="job", attempt=2, copies=(WireCopy.of(COPY),))]
    assert host.aborted == [("job", 2)]


def test_a_fence_waits_for_a_seal_that_hangs_no_longer_than_its_limit() -> None:
    """It answers all the same, and says so: a restore must not wait for ever (R21)."""
    host = Host()
    host.add()
    host.play(seal.fence(host.state, "job", 2, []))
    assert host.now == seal.FENCE_DRAIN_S
    assert (len(host.of(effects.Warn)), [type(report) for report in host.reports]) == (1, [Fenced])


def test_a_bye_waits_for_what_its_process_submitted() -> None:
    """Of another process nothing is waited for."""
    host = Host()
    put = host.add()
    assert put is not None
    assert host.play(ranks.await_owner(host.state, Owner(8, 1, 1), 1.0)) is True
    assert host.play(ranks.await_owner(host.state, put.link.owner, 1.0)) is False


def test_a_submitted_put_of_a_link_that_was_retired_is_passed_over_at_once() -> None:
    """The same shard is being sealed for the process's new link: this waits for nothing and gives up no step (R8)."""
    host, link = Host(), Link()
    put = host.add(link)
    assert put is not None
    host.state.puts.sealing.add(SHARD)
    link.is_retired = True
    host.play(seal.run(host.state, put))
    assert (host.now, host.levels, host.asked, host.freed) == (0.0, [], [], [])
    assert host.state.puts.sealing == {SHARD}
