"""A store that says `bye` in each state of its link: idle, with a put or a read under way, or come back meanwhile."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from link_site import Stop, make_ready
from rank_site import CHUNK_BYTES, SHARD, SHARE_SLOTS, STEP, WAIT_S, Site, send_level

from memstore.core.arena.slot_table import Owner
from memstore.core.holder import ranks
from memstore.core.holder.holder_io import HolderIo, Link
from memstore.core.holder.reads import ready
from memstore.core.holder.state import HolderState
from memstore.core.wire.calls import Called, ReadStep
from memstore.core.wire.codec import encode
from memstore.core.wire.frame import Kind
from memstore.core.wire.rank_messages import Bye, SlotsLeased, decode_rank_message
from memstore.core.wire.replies import ShardReady
from memstore.core.wire.reports import HolderMessage, ProcessGone
from memstore.shell.holder.context import RankConnection
from memstore.shell.net.channel import Channel
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.processes import wait_for
from recovery.inventory import ShardId

NEXT = ShardId("job", 1, STEP + 1, 0)
LEAVE = ranks.leave


class Leaver:
    """A site whose holder's reports are kept, and the moments at which a `bye` is taken and carried out."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site, self.is_taken, self.is_done = site, threading.Event(), threading.Event()
        self.reports: list[HolderMessage] = []
        holder = site.holder
        holder.state.report = holder.sessions.report = self.reports.append  # type: ignore[method-assign]
        self.digesting = Stop(holder.replicas.seal_local)
        self.digesting.at.set()  # holds nothing up yet
        monkeypatch.setattr(holder.replicas, "seal_local", self.digesting)
        monkeypatch.setattr(ranks, "leave", self._leave)

    async def _leave(self, io: HolderIo, state: HolderState, link: Link, *, has_left: bool = False) -> None:
        self.is_taken.set()
        await LEAVE(io, state, link, has_left=has_left)
        self.is_done.set()

    def begin_put(self) -> None:
        """Submit a put, and hold its digest up."""
        self.digesting.at.clear()
        assert self.site.stage().submit(b"", 3 * CHUNK_BYTES)
        assert self.digesting.at.wait(WAIT_S)

    def say_bye(self) -> None:
        """Close the store, and wait until its holder has taken the `bye`."""
        self.site.link.close()
        assert self.is_taken.wait(WAIT_S)

    def gone(self) -> list[str]:
        """Return the processes that were reported as gone."""
        return [report.nonce for report in self.reports if isinstance(report, ProcessGone)]

    def reads(self) -> list[Called]:
        """Return the reads that were asked for; a `memstore stores` of another test asks this holder, too."""
        return [each for each in self.reports if isinstance(each, Called) and isinstance(each.call, ReadStep)]

    def leased(self) -> int:
        """Return how many slots are leased to any process."""
        with self.site.holder.replicas.lock:
            return sum(map(len, self.site.holder.replicas.table.leases.values()))

    def is_stored(self, shard: ShardId = SHARD) -> bool:
        """Say whether a shard is sealed."""
        return self.site.holder.replicas.pin(shard) is not None


@pytest.fixture
def leaver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leaver]:
    site = Site()
    made = Leaver(site, monkeypatch)
    yield made
    made.digesting.go.set()
    site.close()


def test_a_bye_of_an_idle_link_frees_its_leases_and_is_reported(leaver: Leaver) -> None:
    """The process may live on, as a notebook's does: no death will free them."""
    assert leaver.leased() == SHARE_SLOTS
    leaver.say_bye()
    assert leaver.is_done.wait(WAIT_S)
    assert (leaver.leased(), leaver.gone(), leaver.site.holder.state.ranks.owners) == (0, ["n"], {})


def test_a_process_that_ended_its_own_waits_has_left_and_is_not_dead(leaver: Leaver) -> None:
    """Another rank is lost, and this one goes on in the next attempt: events and alerts call the lost one dead."""
    leaver.site.link.interrupt("a rank of it was lost")
    leaver.say_bye()
    assert leaver.is_done.wait(WAIT_S)
    assert [report for report in leaver.reports if isinstance(report, ProcessGone)] == [
        ProcessGone(nonce="n", has_left=True)
    ]


def test_a_bye_waits_for_the_puts_that_came_before_it(leaver: Leaver) -> None:
    """One is being digested and one is queued: both are sealed, and the process is gone only then."""
    later = leaver.site.begin_put(NEXT.step)
    assert later.extend(3, WAIT_S)
    leaver.begin_put()
    assert later.submit(b"", 3 * CHUNK_BYTES)
    leaver.say_bye()
    assert (leaver.gone(), leaver.is_done.is_set(), "n" in leaver.site.holder.state.ranks.links) == ([], False, True)
    leaver.digesting.go.set()
    assert leaver.is_done.wait(WAIT_S)
    assert (leaver.is_stored(), leaver.is_stored(NEXT), leaver.leased(), leaver.gone()) == (True, True, 0, ["n"])


def test_a_put_that_outlasts_the_wait_of_a_bye_is_sealed_all_the_same(
    leaver: Leaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are the holder's since it began, so the leases that end with the process are others."""
    monkeypatch.setattr(ranks, "BYE_WAIT_S", 0.0)
    leaver.begin_put()
    leaver.say_bye()
    assert leaver.is_done.wait(WAIT_S)
    assert (leaver.is_stored(), leaver.leased(), leaver.gone()) == (False, 0, ["n"])
    leaver.digesting.go.set()
    wait_for(leaver.is_stored, "the seal")
    assert leaver.leased() == 0


@pytest.mark.parametrize("is_answered", [True, False], ids=["pinned", "asked"])
def test_a_bye_ends_a_read_and_its_pin(leaver: Leaver, is_answered: bool) -> None:
    """The bytes that it has pinned are let go of; an answer that comes after the `bye` pins nothing."""
    site, holder = leaver.site, leaver.site.holder
    leaver.digesting.go.set()
    assert site.stage().submit(b"", 3 * CHUNK_BYTES)
    send_level(site, "sealed")
    replica = holder.replicas.index.find(SHARD, None)
    assert replica is not None
    asked = site.link.call_soon(ReadStep(job="job", step=STEP, rank=0))
    call = wait_for(leaver.reads, "the call")[0]
    make_ready(holder, replica)
    answer = ShardReady(step=STEP, attempt=1, verdict="local", why="", report=None, read=1)
    if is_answered:
        holder.ranks.answer(call.id, encode(answer), None)
        asked.result(WAIT_S)
        assert holder.state.reads.ready
    leaver.say_bye()
    assert leaver.is_done.wait(WAIT_S)
    assert leaver.gone() == ["n"]
    if is_answered:
        wait_for(lambda: not holder.state.reads.ready, "the end of the loan")
    else:
        holder.ranks.answer(call.id, encode(answer), None)
        assert holder.state.reads.ready[1].deadline_s <= holder.state.now() + ready.TAKE_S


def test_a_process_that_comes_back_during_its_bye_is_not_gone(leaver: Leaver) -> None:
    """Its next store has connected before the `bye` of the former one was carried out: it stays, with its leases."""
    leaver.begin_put()
    leaver.say_bye()
    again = HolderLink(leaver.site.holder.folder, nonce="n", job="job", rank=0, attempt=1)
    try:
        leaver.digesting.go.set()
        assert leaver.is_done.wait(WAIT_S)
        assert (leaver.gone(), leaver.is_stored()) == ([], True)
        wait_for(lambda: len(again.leases.free) == SHARE_SLOTS - 3, "its share")
        assert leaver.leased() == SHARE_SLOTS - 3
        assert "n" in leaver.site.holder.state.ranks.links
    finally:
        again.close()


def test_the_next_stores_hello_frees_what_a_lost_bye_has_not(leaver: Leaver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder was away as the store was closed; its process lives on, so no death would ever free the slots."""
    with monkeypatch.context() as lost:
        lost.setattr(HolderLink, "_leave", lambda self, channel: channel.close())
        leaver.site.link.close()
    assert leaver.leased() == SHARE_SLOTS
    again = HolderLink(leaver.site.holder.folder, nonce="n", job="job", rank=0, attempt=1)
    try:
        wait_for(lambda: len(again.leases.free) == SHARE_SLOTS, "its share")
        assert leaver.leased() == SHARE_SLOTS
    finally:
        again.close()
    assert leaver.is_done.wait(WAIT_S)
    assert leaver.leased() == 0


def test_a_bye_is_read_although_the_holder_was_sending_as_the_link_was_closed() -> None:
    """The failed send does not end the link: its slots would stay leased for as long as the process lives (R8)."""
    rank, holder = map(Channel, socket.socketpair())
    with holder:
        rank.send(Kind.EVENT, 0, Bye(), deadline_s=WAIT_S)
        rank.close()
        RankConnection(holder, Owner(1, 1, 1)).send(SlotsLeased(slots=(1, 2)))
        assert isinstance(decode_rank_message(holder.recv(timeout_s=WAIT_S).data), Bye)
