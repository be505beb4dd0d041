"""Leases that cross to a child process and back: never had twice, never lost (R8, R20)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lease_transfer_site import CHUNK_BYTES, SHARD, SHARE_SLOTS, STEP, WAIT_S, Site, send_level

from memstore.core.arena.share import PeerShare
from memstore.core.wire.calls import AskSteps
from memstore.core.wire.rank_messages import SlotsLeased, WithdrawSlots
from memstore.errors import ClosedError, CommitError, ConfigError
from memstore.shell.arena import replica_store
from memstore.shell.holder import child_process, rank_server
from memstore.shell.holder.rank_connections import RankConnection as ServedLink
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.processes import wait_for


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


def test_a_child_takes_the_slots_over_and_hands_them_over(site: Site) -> None:
    """What the parent filled is sealed by the child; the parent learns of it, and gets its room again."""
    room = site.offer_slots()
    child = site.child()
    child.do("connect")
    assert child.do("adopt")["slots"] == room.slots
    assert not site.is_whole()
    child.do("submit")
    send_level(site, "sealed")
    stored = site.holder.replicas.index.find(SHARD)
    assert stored is not None
    assert [bytes(site.holder.replicas.chunk_view(stored, i) or b"")[:1] for i in range(3)] == [b"\1", b"\2", b"\3"]
    room.abandon()
    child.do("bye")
    wait_for(lambda: site.is_whole(stored=3), "the lease of what is not stored")


def test_what_a_child_did_not_submit_is_free_when_it_says_bye(site: Site) -> None:
    """A save process that fails gives its slots back; they are leased to the rank again."""
    room = site.offer_slots()
    child = site.child()
    child.do("connect")
    child.do("adopt")
    room.abandon()
    child.do("bye")
    wait_for(site.is_whole, "the whole share")


def test_a_stranger_is_refused(site: Site) -> None:
    """A process that does not descend from the rank's, and one whose rank has not joined, get nothing."""
    room = site.offer_slots()
    stranger = site.child(is_orphan=True).do("connect")
    assert stranger["error"] == "ConfigError"
    assert f"is no child of process {os.getpid()}" in stranger["message"]
    with pytest.raises(ConfigError, match="no process has joined as 'nobody'"):
        HolderLink(site.holder.folder, nonce="nobody/1", job="job", rank=0, parent="nobody", attempt=1)
    room.abandon()
    wait_for(site.is_whole, "the whole share")


def test_a_child_that_comes_too_late_gets_nothing(site: Site) -> None:
    """The parent took the slots back: the child gets an error, and writes nowhere."""
    room = site.offer_slots()
    child = site.child()
    child.do("connect")
    room.abandon()
    wait_for(site.is_whole, "the whole share")
    late = child.do("adopt")
    assert late["error"] == "CommitError"
    assert "nothing staged for step 5 is on offer any more" in late["message"]
    assert site.is_whole()


def test_slots_are_adopted_once(site: Site) -> None:
    """A second child, or the same one again, finds nothing to adopt."""
    room = site.offer_slots()
    child = site.child()
    child.do("connect")
    assert child.do("adopt")["slots"] == room.slots
    assert child.do("adopt")["error"] == "CommitError"
    with pytest.raises(CommitError, match="on offer any more"):
        site.link.adopt(STEP, WAIT_S)
    room.abandon()
    child.close()
    site.holder.ranks.reap()
    wait_for(site.is_whole, "the whole share")


@pytest.mark.parametrize("ask", [
    lambda link: link.adopt(STEP, WAIT_S),
    lambda link: link.call(AskSteps(job="job"), WAIT_S),
    lambda link: link.call_soon(AskSteps(job="job")).result(WAIT_S),
], ids=["adopt", "call", "call_soon"])  # fmt: skip
def test_a_closed_link_answers_every_question_at_once(site: Site, ask: Callable[[HolderLink], Any]) -> None:
    """No thread would send it, nor learn of its answer; the limit is not waited for."""
    site.link.close()
    with pytest.raises(ClosedError, match="connect again"):
        ask(site.link)
    assert site.link.calls == {}


def test_an_offer_of_what_a_child_has_looks_at_no_byte_of_it(site: Site) -> None:
    """The child writes there: an offer that comes again, as with a new link, is no mistake of the parent's."""
    room = site.offer_slots()
    offer = site.link.offers[STEP]
    child = site.child()
    child.do("connect")
    assert child.do("adopt")["slots"] == room.slots
    for view in room.views():
        view[:] = b"z" * CHUNK_BYTES
    site.link.ask_soon(offer).result(WAIT_S)
    assert not site.holder.state.ranks.offered
    child.do("bye")
    room.abandon()
    wait_for(site.is_whole, "the whole share")


@pytest.mark.parametrize("when", ["unborn", "connect", "adopt"])
def test_a_child_that_is_killed_leaves_no_slot_behind(site: Site, when: str) -> None:
    """Killed before it came, before it adopted, or after: the parent gives the step up and has all of its room."""
    room = site.offer_slots()
    child = site.child()
    for command in {"unborn": [], "connect": ["connect"], "adopt": ["connect", "adopt"]}[when]:
        child.do(command)
    child.close()
    room.abandon()
    site.holder.ranks.reap()
    wait_for(site.is_whole, "the whole share")
    again = site.stage(SHARE_SLOTS)
    again.abandon()


def restart(site: Site) -> None:
    """The holder is replaced; the links come back by themselves."""
    site.holder.close()
    site.begin()
    wait_for(lambda: "n" in site.holder.state.ranks.links, "the rank's link")


def test_a_holder_that_restarts_learns_of_the_offer_again(site: Site) -> None:
    """The lease is in the slots' headers, the offer comes again with the parent's link: the child adopts (R8)."""
    room = site.offer_slots()
    restart(site)
    wait_for(lambda: site.holder.state.ranks.offered, "the offer")
    child = site.child()
    child.do("connect")
    assert child.do("adopt")["slots"] == room.slots
    restart(site)
    assert not site.holder.state.ranks.offered, "what a child has is not offered again"
    child.do("bye")
    room.abandon()
    wait_for(site.is_whole, "the whole share")


def test_a_holder_that_restarts_after_the_adoption_seals_for_the_child(site: Site) -> None:
    """The child's lease is its own, in the slot headers too: it confirms it and submits (R6, R8)."""
    room = site.offer_slots()
    child = site.child()
    child.do("connect")
    child.do("adopt")
    restart(site)
    wait_for(lambda: "n/child" in site.holder.state.ranks.links, "the child's link")
    child.do("submit")
    send_level(site, "sealed")
    room.abandon()
    child.do("bye")
    wait_for(lambda: site.is_whole(stored=3), "the lease of what is not stored")


def test_slots_used_up_by_a_child_and_leased_again_are_not_had_twice(site: Site) -> None:
    """The parent's room of an ended save names slots that it was granted again meanwhile: they stay single."""
    room = site.offer_slots()
    child = site.child()
    child.do("connect")
    child.do("adopt")
    child.do("bye")
    wait_for(lambda: len(site.link.pool) == SHARE_SLOTS, "the new lease")
    room.abandon()
    wait_for(site.is_whole, "the whole share")


def test_a_grant_is_not_overtaken_by_the_answer_to_a_taking_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child is done and its slots are leased again while the parent takes the room back: each is had once."""
    room = site.offer_slots()
    child = site.child()
    child.do("connect")
    child.do("adopt")
    real, sent = ServedLink.send, threading.Event()

    def slow(self: ServedLink, message: Any) -> None:
        if isinstance(message, SlotsLeased):
            room.abandon()
            sent.wait(0.5)  # time for an answer that does not wait
        real(self, message)
        if isinstance(message, SlotsLeased):
            sent.set()

    monkeypatch.setattr(ServedLink, "send", slow)
    child.do("bye")
    assert sent.wait(WAIT_S)
    # what was sent before has been received
    site.link.ask_soon(WithdrawSlots(id=0, step=STEP, slots=())).result(WAIT_S)
    wait_for(site.is_whole, "the whole share")
    assert len(site.link.pool) == SHARE_SLOTS


def test_an_adopted_slot_is_held_before_the_link_can_break(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer has come, the save process has not looked yet, the link breaks: the slots stay its own (R8)."""
    monkeypatch.setattr(rank_server, "check_child", lambda *_: None)
    room = site.offer_slots()
    child = HolderLink(site.holder.folder, nonce="n/0/5", job="job", rank=0, parent="n", attempt=1)
    adopted = child.adopt(STEP, WAIT_S)
    old = child.channel
    old.abort()
    wait_for(lambda: child.channel is not old, "the link")
    with site.holder.replicas.lock:
        owners = {site.holder.replicas.table.slots[n].owner for n in adopted}
    assert owners == {site.holder.state.ranks.owners["n/0/5"]}
    child.close()
    room.abandon()
    wait_for(site.is_whole, "the whole share")


@pytest.mark.parametrize("where", ["save process", "digest"])
def test_a_rank_is_leased_no_more_than_its_share(site: Site, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """What a save process has, or what is submitted and being digested, still counts for the rank (R10)."""
    site.holder.replicas.claim("job", PeerShare(1, {0: SHARE_SLOTS}, SHARE_SLOTS))
    room, may_go = site.stage(), threading.Event()
    if where == "digest":
        real = replica_store.chunk_digest
        monkeypatch.setattr(replica_store, "chunk_digest", lambda view: may_go.wait(WAIT_S) and real(view))
        assert room.submit(b"", 3 * CHUNK_BYTES)
        wait_for(lambda: site.holder.replicas.table.submitted, "the submission")
    else:
        room.offer_slots()
        wait_for(lambda: site.holder.state.ranks.offered, "the offer")
        child = site.child()
        child.do("connect")
        child.do("adopt")
    site.holder.ranks.reap()
    with site.holder.replicas.lock:
        leased = sum(len(slots) for slots in site.holder.replicas.table.leases.values())
    may_go.set()
    assert leased == (3 if where == "digest" else SHARE_SLOTS)
    assert len(site.link.pool) == 3


def test_slots_given_back_meanwhile_are_left_to_the_put_that_has_them(site: Site) -> None:
    """A save in the background keeps or adds slots after its room was needed: the next put's are not touched (R8)."""
    room = site.stage(4)
    room.abandon()
    other = site.stage(4)
    assert set(other.slots) & set(room.slots)
    room.keep([0])
    assert not room.extend(1, 0.0)
    assert site.link.in_copy == set(other.slots)
    assert len(site.link.pool) == SHARE_SLOTS - 4
    assert other.submit(b"", 4 * CHUNK_BYTES)


@pytest.mark.parametrize(
    ("tree", "is_child"),
    [({7: 6, 6: 5}, True), ({7: 1}, False), ({7: 0}, False), ({n: n + 1 for n in range(7, 99)}, False)],
)
def test_descent_is_by_the_kernels_word(monkeypatch: pytest.MonkeyPatch, tree: dict[int, int], is_child: bool) -> None:
    """A grandchild is a child; an orphan, a process without a parent and one too far down are not."""
    parent_of: Callable[[int], int] = lambda pid: tree.get(pid, 1)  # noqa: E731
    monkeypatch.setattr(child_process, "_parent_pid", parent_of)
    if is_child:
        child_process.check_child(7, 5, "n")
    else:
        with pytest.raises(ConfigError, match="process 7 is no child of process 5"):
            child_process.check_child(7, 5, "n")
