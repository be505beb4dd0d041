"""A link that breaks, a store that closes, a fence or abandon at the worst moment: nothing is mixed up (R6-R8)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from link_site import (
    CHUNK_BYTES,
    SHARD,
    SHARE_SLOTS,
    STEP,
    WAIT_S,
    RankSite,
    Site,
    Stop,
    break_link,
    bring_here,
    make_ready,
    send_level,
    state,
    together,
)

import memstore.client.connect
import memstore.client.reader
import memstore.client.restore
import memstore.core.arena.replica_store
from memstore.client.ticket import Ticket
from memstore.core.arena.slot_table import Owner, SlotState
from memstore.core.format.manifest import chunk_digest
from memstore.core.holder import ranks
from memstore.core.holder.holder_io import HolderIo, Link
from memstore.core.holder.reads import bring, ready
from memstore.core.holder.reads import fetch as procedure
from memstore.core.holder.state import Fetching, HolderState
from memstore.core.wire.calls import Called, ReadStep, SkipStep
from memstore.core.wire.codec import encode
from memstore.core.wire.frame import Kind
from memstore.core.wire.rank_messages import Bye, SlotsLeased, decode_rank_message
from memstore.core.wire.replies import ShardReady
from memstore.core.wire.reports import HolderMessage, ProcessGone
from memstore.errors import DigestMismatch, FencedError, PeerUnreachable, RecoveryError
from memstore.shell.arena.mapping import ArenaMapping
from memstore.shell.codec.interpreter import copying
from memstore.shell.holder.context import RankConnection
from memstore.shell.net.channel import Channel
from memstore.shell.peer.client import PeerClient
from memstore.shell.rank.admin_link import Tool
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.leases import Tenant
from memstore.shell.rank.shard_read import ShardRead
from memstore.testing.clusters.processes import wait_for
from recovery.inventory import ShardId


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(*hosts: str) -> Site:
        made.append(Site(tmp_path, list(hosts), monkeypatch))
        return made[-1]

    yield make
    for site in made:
        site.close()


def test_a_link_that_breaks_as_its_attempt_is_answered_comes_back_in_that_attempt(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to connect() has come, and the caller has not seen it: without slots no put would ever commit (R6)."""
    site, real = make_site("a"), memstore.client.connect.ask_with_all

    def broken_after(link: Any, *args: Any, **kwargs: Any) -> Any:
        answer, channel = real(link, *args, **kwargs), link.channel
        channel.abort()
        wait_for(lambda: link.channel is not channel, "a new link")
        return answer

    monkeypatch.setattr(memstore.client.connect, "ask_with_all", broken_after)
    (store,) = site.connect()
    store.put(1, state(1), timeout_s=WAIT_S).wait("committed", WAIT_S)


def test_a_link_that_is_closed_while_it_comes_back_says_bye_on_the_new_one(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process lives on, as a notebook does: the slots that it leased would be free only at its end (R8)."""
    site = make_site("a")
    (store,) = site.connect()
    store.put(1, state(1), timeout_s=WAIT_S).wait("committed", WAIT_S)
    link, leases = store._link, site.replicas.table.leases
    assert any(leases.values())
    stop = Stop(HolderLink._connect)
    monkeypatch.setattr(HolderLink, "_connect", lambda self, *args: stop(self, *args))
    link.channel.abort()
    assert stop.at.wait(WAIT_S)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(link.close)
        wait_for(link.closed.is_set, "the close")
        stop.go.set()
    wait_for(lambda: not any(leases.values()), "the `bye`")


def test_a_grant_that_was_in_flight_when_the_link_broke_is_no_second_lease(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots being pre-faulted while the link comes back are leased once, and no sealed slot is written (R6, R8)."""
    site = make_site("a")
    (store,) = site.connect()
    stop = Stop(ArenaMapping.prefault)
    monkeypatch.setattr(ArenaMapping, "prefault", lambda self, *args: stop(self, *args))
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put, 1, state(1))
        assert stop.at.wait(WAIT_S)
        break_link(store)
        stop.go.set()
        put.result(WAIT_S)
    for step in range(2, 8):
        store.put(step, state(step), timeout_s=WAIT_S).wait("committed", WAIT_S)
        assert len(store._link.leases.free) == len(set(store._link.leases.free))
        with site.replicas.lock:
            for number, slot in enumerate(site.replicas.table.slots):
                if slot.state is SlotState.SEALED:
                    assert chunk_digest(site.replicas.arena.view(number, slot.nbytes)) == slot.digest


def test_a_ticket_is_not_reported_of_another_attempts_commit(make_site: Callable[..., Site]) -> None:
    """After a rewind a link that comes back learns nothing of the old attempt's commit of the same step (R15)."""
    site = make_site("a", "b")
    stores = site.connect()
    for step in (3, 5):
        together(*[lambda s=s, n=step: s.put(n, state(n)).wait("committed", WAIT_S) for s in stores])
    together(*[lambda s=s: s.rewind(3) for s in stores])
    ticket, _ = together(lambda: stores[0].put(5, state(50)), lambda: stores[1].put(4, state(4)))
    break_link(stores[0])
    stores[0].steps()  # answered on the new link, after all that it was sent first
    assert ticket.level != "committed"


def recycle_under_the_copy(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite a slot of what host a holds of step 1, after it was staged and before it is copied."""
    real = memstore.client.restore.build_state

    def late(*args: Any, **kwargs: Any) -> Any:
        with site.replicas.lock:
            stored = next(s for s in site.replicas.index.shards.values() if s.shard.rank == 0)
        site.replicas.arena.view(stored.slots[0], 8)[:] = b"recycled"
        return real(*args, **kwargs)

    monkeypatch.setattr(memstore.client.restore, "build_state", late)


@pytest.mark.parametrize("has_into", [False, True])
def test_bytes_that_change_under_a_get_are_not_returned(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, has_into: bool
) -> None:
    """A slot that is overwritten between staging and the copy fails the get where there is no other copy (R7)."""
    site = make_site("a")
    (store,) = site.connect()
    store.put(1, state(1)).wait("committed", WAIT_S)
    recycle_under_the_copy(site, monkeypatch)
    reader = memstore.client.reader.Reader("job", Tool(site.folder("a")), memstore.Config())
    with reader, pytest.raises(DigestMismatch, match="no good copy was found") as caught:
        reader.get(into=state(0) if has_into else None)
    assert ("restart this process" in str(caught.value)) is has_into


@pytest.mark.parametrize("has_into", [False, True])
def test_bytes_that_change_under_a_get_come_from_the_peer(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, has_into: bool
) -> None:
    """With another copy the chunk is brought and copied again: the state is what was put, and get says so (R26)."""
    site = make_site("a", "b")
    stores = site.connect()
    together(*[lambda s=s: s.put(1, state(s.rank)).wait("committed", WAIT_S) for s in stores])
    recycle_under_the_copy(site, monkeypatch)
    target = {"w": torch.zeros_like(state(0)["w"])} if has_into else None
    with memstore.client.reader.Reader("job", Tool(site.folder("a")), memstore.Config()) as reader:
        wait_for(lambda: len(stores[0].steps()) == 1 and stores[0].steps()[0].copies == 2, "both copies")
        got = reader.get(rank=0, into=target)
    assert torch.equal(got.state["w"], state(0)["w"])
    assert target is None or torch.equal(target["w"], state(0)["w"])
    assert got.source == "mixed"
    assert "chunks were damaged or did not come, and were brought again" in got.source_reason


def test_an_abandon_under_a_seal_fails_that_put_only(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step abandoned while its manifest is made leaves nothing behind, and later puts are sealed (R12)."""
    site = make_site("a")
    (store,) = site.connect()
    store.put(1, state(1)).wait("committed", WAIT_S)
    stop = Stop(memstore.core.arena.replica_store.Manifest)
    monkeypatch.setattr("memstore.core.arena.replica_store.Manifest", stop)
    ticket = store.put(2, state(2))
    assert stop.at.wait(WAIT_S)
    store.puts.steps.skip(Ticket(3), "no room")
    store._link.call(SkipStep(job="job", attempt=1, rank=0, step=2, why="no room", is_failed=False), WAIT_S)
    wait_for(lambda: not site.replicas.index.incoming, "the abandon")
    stop.go.set()
    wait_for(lambda: ticket.is_over, "the end of the abandoned put")
    assert ticket.level in ("skipped", "failed")
    assert store.put(100, state(100), timeout_s=WAIT_S).wait("committed", WAIT_S).level == "committed"
    with site.replicas.lock:
        assert len(list(site.replicas.manifests.load_all())) == len(site.replicas.index.shards)


def test_the_end_of_a_with_block_waits_for_nothing_once_the_store_is_closed(make_site: Callable[..., Site]) -> None:
    """No word of a level comes any more, and a put that no other rank has joined never gets further (R15)."""
    site = make_site("a", "b")
    stores = site.connect()
    together(*[store.prepare(100).wait for store in stores])
    stores[0].config = stores[0].config.with_fields({"stall_budget_s": 4 * WAIT_S})
    with stores[0] as store:
        store.put(1, {"w": 1}).wait("sealed", WAIT_S)
        store.close()
        closed_s = time.monotonic()
    assert time.monotonic() - closed_s < 4 * WAIT_S


def test_a_put_that_fails_on_its_host_is_skipped_by_all(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that cannot be saved on one host skips that step on every rank, and its slots are free (R12)."""
    site = make_site("a", "b")
    stores = site.connect()
    together(*[lambda s=s: s.put(1, state(1)).wait("committed", WAIT_S) for s in stores])
    real, failed = site.replicas.manifests.save, threading.Event()

    def save(name: str, data: bytes) -> None:
        if threading.current_thread().name.startswith("memstore-seal") and not failed.is_set():
            failed.set()
            raise OSError("no space left")
        real(name, data)

    monkeypatch.setattr(site.replicas.manifests, "save", save)
    tickets = [store.put(2, state(2)) for store in stores]
    wait_for(lambda: all(ticket.is_over for ticket in tickets), "the skip")
    assert [ticket.level for ticket in tickets] == ["failed", "skipped"]
    wait_for(lambda: not site.replicas.index.incoming, "the slots of what the other host had begun to push here")


def test_an_old_stores_bye_leaves_the_new_stores_slots_alone(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() and connect() in one process while a put is still digested: the new store keeps its leases (R8)."""
    site = make_site("a")
    (store,) = site.connect()
    store.put(1, state(1)).wait("committed", WAIT_S)
    stop = Stop(site.replicas.seal_local)
    monkeypatch.setattr(site.replicas, "seal_local", stop)
    store.put(2, state(2))
    assert stop.at.wait(WAIT_S)
    owner = next(iter(site.replicas.table.leases))
    holder = site.holders["a"]
    links, nonce = holder.state.ranks.links, store._link.nonce
    old = links[nonce]
    store.close()
    again = memstore.client.connect.HolderLink(site.folder("a"), nonce=nonce, job="job", rank=0)
    try:
        wait_for(lambda: links.get(nonce, old) is not old, "the new link to be known")  # the welcome is read before
        link = links[nonce]
        link.attempt = 1
        holder.io.connections.grant(link)  # type: ignore[arg-type]
        taken = Tenant()
        assert again.leases.take(taken, 1, WAIT_S)
        stop.go.set()
        wait_for(lambda: owner == link.owner or not site.replicas.table.leases.get(owner), "the old store's `bye`")
        wait_for(lambda: not ranks_busy(site), "the old link's end")
        assert site.replicas.table.slots[taken.slots[0]].state is SlotState.LEASED
    finally:
        again.close()


def ranks_busy(site: Site) -> bool:
    """Return whether some put is still digested or a link of a closed store is still served."""
    names = [t.name for t in threading.enumerate() if t.name.startswith("memstore-seal")]
    return len(names) > 1


def test_a_link_that_breaks_while_its_put_is_digested_seals_it_once(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The submission that is sent again waits for the seal under way instead of failing its ticket (R8)."""
    site = make_site("a")
    (store,) = site.connect()
    store.put(1, state(1)).wait("committed", WAIT_S)
    stop = Stop(site.replicas.seal_local)
    monkeypatch.setattr(site.replicas, "seal_local", stop)
    ticket = store.put(2, state(2))
    assert stop.at.wait(WAIT_S)
    break_link(store)
    store.steps()  # the holder has read what was sent again before this call
    link = site.holders["a"].state.ranks.links[store._link.nonce]
    wait_for(link.submitted_puts.empty, "the second submission to be taken up")
    stop.go.set()
    assert ticket.wait("committed", WAIT_S).level == "committed"


def test_a_fence_finishes_every_put_that_was_submitted(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two puts wait in the holder when the fence comes: both are sealed and in its inventory (R21)."""
    site = make_site("a")
    (store,) = site.connect()
    store.put(1, state(1)).wait("committed", WAIT_S)
    stop = Stop(site.replicas.seal_local)
    monkeypatch.setattr(site.replicas, "seal_local", stop)
    for step in (2, 3):
        store.put(step, state(step))
    assert stop.at.wait(WAIT_S)
    store.steps()  # the holder has read both submissions
    with ThreadPoolExecutor(1) as pool:
        rewind = pool.submit(store.rewind, 1)
        wait_for(lambda: site.holders["a"].fences.first("job") == 2, "the fence")
        stop.go.set()
        rewind.result(WAIT_S)
    with site.replicas.lock:
        assert {2, 3} <= {copy.shard.step for copy in site.replicas.index.copies("a", "job")}


def apart(make_site: Callable[..., Site]) -> tuple[Site, dict[str, torch.Tensor]]:
    """Two ranks on two hosts, one copy each; return what the second one put at step 1, every chunk of it different."""
    site = make_site("a", "b")
    site.config = dataclasses.replace(site.config, replicas=1)
    stores = site.connect()
    states = [{"w": torch.arange(400_000, dtype=torch.int32) + rank} for rank in (1 << 20, 1 << 21)]
    together(*[lambda s=s: s.put(1, states[s.rank]).wait("committed", WAIT_S) for s in stores])
    return site, states[1]


@pytest.mark.parametrize("is_lost", [False, True])
def test_of_two_reads_of_one_shard_one_fetches(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Ranks of one host that share a state read it at once: the second waits, and fetches only if the first failed."""
    site, put = apart(make_site)
    bring_here(monkeypatch)
    fetches, has_second = itertools.count(), threading.Event()
    fetch_into, await_other = PeerClient.fetch_into, bring._await_other

    def fetch(peer: PeerClient, *args: Any) -> list[int]:
        number = next(fetches)
        assert has_second.wait(WAIT_S)
        if is_lost and number == 0:
            raise FencedError("its attempt is over")
        return fetch_into(peer, *args)

    async def await_first(io: HolderIo, read: Fetching) -> bool:
        has_second.set()
        return await await_other(io, read)

    have_both, close = threading.Barrier(2), ShardRead.close

    def close_together(read: ShardRead) -> None:
        if not read._is_closed:
            have_both.wait(WAIT_S)  # what one has read is not kept for another that comes after it
        close(read)

    def read() -> Any:
        with (
            memstore.client.reader.Reader("job", Tool(site.folder("a")), memstore.Config()) as reader,
            contextlib.suppress(RecoveryError),
        ):
            return reader.get(rank=1).state["w"]

    monkeypatch.setattr(PeerClient, "fetch_into", fetch)
    monkeypatch.setattr(bring, "_await_other", await_first)
    monkeypatch.setattr(ShardRead, "close", close_together)
    came = [found for found in together(read, read) if found is not None]
    assert (len(came), next(fetches)) == ((1, 2) if is_lost else (2, 1))
    assert all(torch.equal(found, put["w"]) for found in came)


def test_a_read_that_hangs_holds_no_other_one_up(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that wait for it one takes its place, what has come already counts, and the others wait for that one."""
    site, put = apart(make_site)
    bring_here(monkeypatch)
    fetches, is_over, has_waited = itertools.count(), threading.Event(), threading.Semaphore(0)
    fetch_into, await_other = PeerClient.fetch_into, bring._await_other

    def fetch(peer: PeerClient, *args: Any) -> list[int]:
        if next(fetches) == 0:
            assert is_over.wait(WAIT_S)
        else:  # until the third waits for the second
            assert all(has_waited.acquire(timeout=WAIT_S) for _ in range(3))
        return fetch_into(peer, *args)

    async def await_first(io: HolderIo, read: Fetching) -> bool:
        has_waited.release()
        return await await_other(io, read)

    def read() -> Any:
        with memstore.client.reader.Reader("job", Tool(site.folder("a")), memstore.Config()) as reader:
            return reader.get(rank=1).state["w"]

    def read_beside() -> list[Any]:
        try:
            wait_for(lambda: bool(site.holders["a"].state.reads.fetching), "the first read")
            return together(read, read)
        finally:
            is_over.set()

    monkeypatch.setattr(bring, "BESIDE_S", 1.0)
    monkeypatch.setattr(PeerClient, "fetch_into", fetch)
    monkeypatch.setattr(bring, "_await_other", await_first)
    first, others = together(read, read_beside)
    assert next(fetches) == 2
    assert all(torch.equal(found, put["w"]) for found in (first, *others))


async def only_at_once(io: HolderIo, state: HolderState, body: dict[str, Any], until_s: float) -> bool:
    """In the place of `may_wait`: another try only while the planned source has one left, and without a pause."""
    return until_s == float("inf")


def test_a_shard_that_does_not_come_whole_leaves_the_state_given_untouched(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is lost after some chunks came to the reader's host: an error, and no byte of `into` is written."""
    site, put = apart(make_site)
    bring_here(monkeypatch)
    batches, fetch_batch = itertools.count(), PeerClient._fetch_batch

    def fetch(peer: PeerClient, *args: Any) -> list[int]:
        if next(batches) == 0:
            return fetch_batch(peer, *args)
        raise PeerUnreachable("the source is gone")

    monkeypatch.setattr(PeerClient, "_fetch_batch", fetch)
    monkeypatch.setattr(procedure, "may_wait", only_at_once)
    target = {"w": torch.full_like(put["w"], 7.0)}
    reader = memstore.client.reader.Reader("job", Tool(site.folder("a")), memstore.Config())
    with reader, pytest.raises(RecoveryError, match="the source is gone") as caught:
        reader.get(rank=1, into=target)
    assert "unusable" not in str(caught.value)
    assert bool((target["w"] == 7.0).all())
    wait_for(lambda: not site.replicas.index.incoming, "the slots of what had come")


def test_a_new_launch_in_the_same_process_ends_the_stores_of_the_one_before(make_site: Callable[..., Site]) -> None:
    """Again and again: old Stores say so at once, and give their slots back (R8, R20, D133)."""
    site = make_site("a", "b")
    former = site.connect()
    for attempt in range(2, 6):
        together(*[lambda s=s, n=attempt: s.put(n, state(n)).wait("committed", WAIT_S) for s in former])
        stores = site.connect()
        assert [store.attempt for store in stores] == [attempt] * 2
        for call in (lambda s=former[0]: s.put(99, state(99)), former[0].get):
            with pytest.raises(FencedError, match=f"attempt {attempt} was opened"):
                call()
        former[1].close()
        assert [got.step for got in together(*[store.get for store in stores])] == [attempt, attempt]
        former = stores
    leases = site.replicas.table.leases
    wait_for(lambda: sum(bool(slots) for slots in list(leases.values())) <= 1, "the old Stores' slots to come back")


def test_ranks_that_are_threads_connect_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has opened is looked through by some while others are added, and some are gone (D133)."""
    monkeypatch.setattr(memstore.client.connect, "_STORES", type(memstore.client.connect._STORES)())

    class Opened:
        attempt = 1

        def __init__(self, nonce: str) -> None:
            self.puts = SimpleNamespace(link=SimpleNamespace(folder=Path(), nonce=nonce))

    def connect(rank: int) -> list[Opened]:
        stores = [Opened(f"{rank}-{number}") for number in range(100)]
        for store in stores:
            memstore.client.connect.end_former(cast(Any, store))
        return stores[::2]

    with copying():
        kept = together(*[lambda rank=rank: connect(rank) for rank in range(8)])
    assert len(memstore.client.connect._STORES) == sum(len(stores) for stores in kept) == 400


# -- bye ----------------------------------------------------------------------------------------------
# A store that says `bye` in each state of its link: idle, with a put or a read under way, or come back meanwhile.


NEXT = ShardId("job", 1, STEP + 1, 0)
LEAVE = ranks.leave


class Leaver:
    """A site whose holder's reports are kept, and the moments at which a `bye` is taken and carried out."""

    def __init__(self, site: RankSite, monkeypatch: pytest.MonkeyPatch) -> None:
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
    site = RankSite()
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
