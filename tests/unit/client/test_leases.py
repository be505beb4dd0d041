"""Slots and puts through any course of a link: every slot is somebody's, no two puts have one, none is lost (R8)."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from link_site import CHUNK_BYTES, SHARD, SHARE_SLOTS, STEP, WAIT_S, RankSite, send_level

from memstore.core.arena import replica_store
from memstore.core.arena.slot_table import PeerShare
from memstore.core.holder import ranks
from memstore.core.wire.calls import AskSteps
from memstore.core.wire.orders import StepLevel
from memstore.core.wire.rank_messages import PutReady, PutTerms, SlotSample
from memstore.errors import ClosedError
from memstore.shell.arena.mapping import ArenaMapping
from memstore.shell.rank import holder_link
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.leases import ENTERING, FILLED, OPEN, OVER, SUBMITTED, Leases, Tenant
from memstore.shell.threads import SafeCondition
from memstore.testing.clusters.processes import wait_for


class Interrupted(Exception):
    """What a signal's handler raises."""


class InterruptedCondition(SafeCondition):
    """One that is interrupted just after it was released to wait."""

    def _release_save(self) -> Any:
        super()._release_save()
        raise Interrupted


def test_a_put_that_is_interrupted_while_it_waits_for_slots_leaves_no_lock() -> None:
    """A handler may raise once the lock is released and before that is noted: it is held as often as before."""
    leases = Leases(arena(0))
    leases.changed = InterruptedCondition()
    for wait in (lambda: leases.take(Tenant(), 1, 1.0), lambda: leases.wait_free(1, 1.0)):
        with pytest.raises(Interrupted):
            wait()
    others = threading.Thread(target=leases.notify)
    others.start()
    others.join(WAIT_S)
    assert not others.is_alive()


class Course(RuleBasedStateMachine):
    """A rank's leases, and which slots its holder leases to it; any order of grants, puts, breaks and answers."""

    puts = Bundle("puts")

    @initialize()
    def begin(self) -> None:
        self.leases = Leases(arena(0))
        self.arenas = 0
        self.ours: set[int] = set()  # by the holder
        self.made: list[Tenant] = []

    @rule(count=st.integers(1, 4), is_entered=st.booleans())
    def grant(self, count: int, is_entered: bool) -> None:
        """The lowest numbers that are not leased."""
        slots = [n for n in range(40) if n not in self.ours][:count]
        self.ours.update(slots)
        mapping = self.leases.grant(slots)
        if is_entered:
            self.leases.granted(slots, mapping)

    @rule()
    def enter(self) -> None:
        entering = [n for n, tenant in self.leases.tenants.items() if tenant is ENTERING]
        self.leases.granted(entering, self.leases.mapping)

    @rule(target=puts, count=st.integers(0, 4))
    def take(self, count: int) -> Tenant:
        put, free = Tenant(), len(self.leases.free)
        assert self.leases.take(put, count, 0.0) == (count <= free)
        self.made.append(put)
        return put

    @rule(put=puts, count=st.integers(0, 3))
    def extend(self, put: Tenant, count: int) -> None:
        """Never an arena's slots beside another's, and none for a put that is not open."""
        may_take = put.state is OPEN and (not put.slots or put.mapping is self.leases.mapping)
        may_take = may_take and count <= len(self.leases.free)
        assert self.leases.take(put, count, 0.0) == may_take

    @rule(put=puts, first=st.integers(0, 2))
    def keep(self, put: Tenant, first: int) -> None:
        if put.state is OPEN:
            self.leases.keep(put, put.slots[first:])

    @rule(put=puts)
    def fill(self, put: Tenant) -> None:
        """As HolderLink.submit; a refused put is over."""
        terms = PutTerms(attempt=1, step=self.made.index(put), world_size=1)
        if put.state is OPEN and not self.leases.fill(put, ready(terms, put.slots)):
            put.state = OVER

    @rule(put=puts)
    def abandon(self, put: Tenant) -> None:
        """By its caller, or a signal's handler."""
        if put.state is OPEN:
            put.state = OVER

    @rule(put=puts, is_taken=st.booleans())
    def send(self, put: Tenant, is_taken: bool) -> None:
        """It may be queued twice; the holder takes the slots of what it has read."""
        was = put.state
        assert self.leases.begin_sending(put) == (was is FILLED)
        if was is FILLED and is_taken:
            self.ours.difference_update(put.slots)

    @rule(put=puts)
    def answer(self, put: Tenant) -> None:
        """What was sent has been taken by then, sealed or freed; and another rank may have given the step up before."""
        if put.state in (FILLED, SUBMITTED):
            if put.state is SUBMITTED:
                self.ours.difference_update(put.slots)
            self.leases.answered(1, self.made.index(put))
            assert put.state is OVER

    @rule(is_replaced=st.booleans())
    def break_link(self, is_replaced: bool) -> None:
        """The next connection names what the holder does not lease; all of it, if there is another arena."""
        if is_replaced:
            self.arenas += 1
            self.ours.clear()
        mapping = self.leases.mapping if not is_replaced else arena(self.arenas)
        self.leases.take_arena(mapping, set(self.leases.held()) - self.ours)
        assert all(put.state is FILLED for put in self.leases.to_send_again())

    @rule()
    def fence(self) -> None:
        """Nothing that is not filled is submitted any more; then the next attempt."""
        self.leases.end()
        for step, put in enumerate(self.made):
            assert not self.leases.fill(put, ready(PutTerms(attempt=1, step=step, world_size=1), put.slots))
        self.leases.is_ended = False

    @invariant()
    def no_slot_is_lost(self) -> None:
        """What the holder leases is free, or being entered, or of one put that has it."""
        tenants = self.leases.tenants
        assert self.ours <= tenants.keys()
        for number, tenant in tenants.items():
            assert tenant is ENTERING or tenant.state is OVER or number in tenant.slots
        assert set(self.leases.free).isdisjoint(self.leases.in_copy)

    @invariant()
    def what_is_to_be_sent_is_known_until_it_is_answered(self) -> None:
        known = set(map(id, self.leases.unsealed.values()))
        assert known == {id(put) for put in self.made if put.state in (FILLED, SUBMITTED)}


def arena(number: int) -> Any:
    return SimpleNamespace(arena=str(number), has_pins=False)


def ready(terms: PutTerms, slots: list[int]) -> PutReady:
    sample = SlotSample(seed=0, digests=b"")
    return PutReady(terms=terms, slots=tuple(slots), arena="", sample=sample, layout=b"", nbytes=0, stall_s=0.0)


TestCourse = Course.TestCase
TestCourse.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- leased slots -------------------------------------------------------------------------------------
# Slots that a rank filled in another arena than its holder has, or through another file, are never stored (R8).


@pytest.fixture
def site() -> Iterator[RankSite]:
    made = RankSite()
    yield made
    made.close()


def replace_arena(site: RankSite) -> None:
    """The holder is replaced, and so are its files; the rank is leased slots of the new arena under old numbers."""
    site.holder.close()
    shutil.rmtree(site.holder.folder)
    site.begin()
    wait_for(lambda: "n" in site.holder.state.ranks.links, "the rank's link")
    site.holder.io.run(ranks.grant_job, site.holder.state, "job")
    wait_for(lambda: len(site.link.leases.free) == SHARE_SLOTS, "slots of the new arena")


def test_a_put_of_another_arena_touches_no_slot_of_this_one(site: RankSite) -> None:
    """What it filled is never submitted, kept or given back under the numbers that another put has now (R8)."""
    put, torn = site.stage(2), site.stage(2)
    before = put.views()
    replace_arena(site)
    other = site.stage(4)
    assert set(other.slots) >= {*put.slots, *torn.slots}
    before[0][:4] = b"late"
    assert bytes(other.views()[0][:4]) == bytes([1]) * 4
    assert not put.extend(1, 0.0)
    assert not put.submit(b"", 2 * CHUNK_BYTES)
    torn.abandon()
    assert site.link.leases.in_copy == set(other.slots)
    assert len(site.link.leases.free) == SHARE_SLOTS - 4
    assert other.submit(b"", 4 * CHUNK_BYTES)
    send_level(site, "sealed")


def test_a_put_that_is_given_up_before_it_was_sent_keeps_no_slot(site: RankSite) -> None:
    """Another rank gave the step up while the submission waited for the link's writer: it is never sent, so the holder
    takes no slot of it, and all are free again.
    """
    is_sent = threading.Event()
    site.link.outbox.put(lambda: is_sent.wait(30.0) and None)
    put = site.stage(2)
    assert put.submit(b"", 2 * CHUNK_BYTES)
    site.link.take_event(StepLevel(job="train", attempt=1, step=STEP, level="skipped"))
    is_sent.set()
    wait_for(site.link.outbox.empty, "the link's writer")
    assert len(site.link.leases.free) == SHARE_SLOTS


def test_a_put_whose_copy_ends_after_an_interruption_is_not_submitted(site: RankSite) -> None:
    """A collective that was aborted meanwhile may have changed what it copied; an earlier one is stored."""
    earlier, late = site.stage(2), site.stage(2, STEP + 1)
    assert earlier.submit(b"", 2 * CHUNK_BYTES)
    send_level(site, "sealed")
    site.link.interrupt("a rank of it was lost")
    assert not late.submit(b"", 2 * CHUNK_BYTES)
    assert (1, STEP + 1) not in site.link.leases.unsealed


def test_a_link_that_is_opened_after_an_interruption_is_interrupted_too(site: RankSite) -> None:
    """Else what an aborted collective left could be put through it; the next generation begins with links that work."""
    try:
        holder_link.interrupt_all("a rank of it was lost")
        late = HolderLink(site.holder.folder, nonce="late", job="job", rank=1, attempt=1)
        assert late.interrupted
        late.close()
    finally:
        holder_link.allow_links()
    again = HolderLink(site.holder.folder, nonce="late", job="job", rank=1, attempt=1)
    assert not again.interrupted
    again.close()


def test_what_was_submitted_from_another_arena_is_not_taken_from_this_one(site: RankSite) -> None:
    """A submission that was under way when the files were replaced fails, and its numbers stay the rank's to fill."""
    put = site.stage()
    lost: list[object] = []
    sent, site.link._send = site.link._send, lost.append  # type: ignore[method-assign]
    assert put.submit(b"", 3 * CHUNK_BYTES)
    message = site.link.leases.unsealed[1, STEP].message
    wait_for(lambda: lost, "the message that gets lost")
    site.link._send = sent  # type: ignore[method-assign]
    replace_arena(site)
    site.link.notify(message)  # as one that was queued before the link broke
    wait_for(lambda: site.levels.count((STEP, "failed")) == 2, "the word on what is resent and on what was queued")
    assert not site.link.leases.unsealed
    wait_for(site.is_whole, "the whole share")


@contextlib.contextmanager
def another_file(site: RankSite) -> Iterator[None]:
    """The rank has a copy of the arena mapped, as after a mistake that no identity tells."""
    right = site.link.leases.mapping.open()
    copy = site.holder.folder / "copy"
    shutil.copyfile(site.holder.folder / "arena", copy)
    files = [os.open(path, os.O_RDWR) for path in (copy, site.holder.folder / "slots")]
    site.link.leases.mapping._mapping = ArenaMapping(site.holder.folder, *files)
    yield
    site.link.leases.mapping._mapping.close()
    os.close(files[0])
    site.link.leases.mapping._mapping = right


def test_what_a_rank_filled_elsewhere_is_not_sealed(site: RankSite, caplog: pytest.LogCaptureFixture) -> None:
    """The holder sees other bytes than the rank: the put fails by name, nothing is kept, and the next one is sealed."""
    with another_file(site):
        assert site.stage().submit(b"", 3 * CHUNK_BYTES - 7)
        send_level(site, "failed")
    wait_for(site.is_whole, "the whole share")
    assert "what rank 0 filled is not what its host sees: 3 of 3 chunks differ, the first is chunk 0" in caplog.text
    assert site.holder.replicas.pin(SHARD) is None
    assert site.stage().submit(b"", 3 * CHUNK_BYTES - 7)
    send_level(site, "sealed")


@pytest.mark.parametrize("digests", [b"", b"x", bytes(25)])
def test_a_submitted_put_that_shows_nothing_of_its_bytes_is_refused(site: RankSite, digests: bytes) -> None:
    """A process that submits says what it sees in the slots, or the put fails by name and its slots are free again."""
    put = site.stage()
    site.link.notify(
        PutReady(
            terms=PutTerms(attempt=1, step=STEP, world_size=1),
            slots=tuple(put.slots),
            arena=put.mapping.arena,
            sample=SlotSample(seed=1, digests=digests),
            layout=b"",
            nbytes=3 * CHUNK_BYTES,
            stall_s=0.0,
        )
    )
    send_level(site, "failed")
    assert site.holder.replicas.pin(SHARD) is None
    put.abandon()
    wait_for(site.is_whole, "the whole share")


@pytest.mark.parametrize(
    "ask",
    [
        lambda link: link.call(AskSteps(job="job"), WAIT_S),
        lambda link: link.call_soon(AskSteps(job="job")).result(WAIT_S),
    ],
    ids=["call", "call_soon"],
)
def test_a_closed_link_answers_every_question_at_once(site: RankSite, ask: Callable[[HolderLink], Any]) -> None:
    """No thread would send it, nor learn of its answer; the limit is not waited for."""
    site.link.close()
    with pytest.raises(ClosedError, match="connect again"):
        ask(site.link)
    assert site.link.calls == {}


def test_a_rank_is_leased_no_more_than_its_share(site: RankSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is submitted and being digested still counts for the rank (R10)."""
    site.holder.replicas.claim("job", PeerShare(1, {0: SHARE_SLOTS}, SHARE_SLOTS))
    put, may_go = site.stage(), threading.Event()
    real = replica_store.chunk_digest
    monkeypatch.setattr(replica_store, "chunk_digest", lambda view: may_go.wait(WAIT_S) and real(view))
    assert put.submit(b"", 3 * CHUNK_BYTES)
    wait_for(lambda: site.holder.replicas.table.submitted, "the submission")
    site.holder.ranks.reap()
    with site.holder.replicas.lock:
        leased = sum(len(slots) for slots in site.holder.replicas.table.leases.values())
    may_go.set()
    assert leased == 3
    assert len(site.link.leases.free) == 3


def test_slots_given_back_meanwhile_are_left_to_the_put_that_has_them(site: RankSite) -> None:
    """A save in the background keeps or adds slots after its slots were needed: the next put's are not touched (R8)."""
    put = site.stage(4)
    put.abandon()
    other = site.stage(4)
    assert set(other.slots) & set(put.slots)
    put.keep([0])
    assert not put.extend(1, 0.0)
    assert site.link.leases.in_copy == set(other.slots)
    assert len(site.link.leases.free) == SHARE_SLOTS - 4
    assert other.submit(b"", 4 * CHUNK_BYTES)
