"""The holder's side of its ranks: stale answers, pid namespaces, leases of the dead, a raised limit (R4, R8)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from link_site import make_ready
from msgspec.structs import replace

from memstore.config import Config
from memstore.core.arena.slot_table import Owner, PeerShare
from memstore.core.holder import ranks
from memstore.core.holder.reads import ready
from memstore.core.wire.calls import AskStatus, Called, RankCall, ReadStep
from memstore.core.wire.codec import encode
from memstore.core.wire.frame import Kind
from memstore.core.wire.orders import CallAnswered, DropJob
from memstore.core.wire.rank_messages import (
    Bye,
    HolderEvent,
    RankHello,
    RankMessage,
    ToolHello,
    Welcome,
    decode_greeting,
    decode_holder_event,
)
from memstore.core.wire.replies import ShardReady, Status
from memstore.core.wire.reports import HolderMessage, ProcessGone, RankArrived
from memstore.errors import ConfigError, FencedError
from memstore.shell.arena.lock import process_start_time
from memstore.shell.holder import rank_server
from memstore.shell.holder.holder import Holder
from memstore.shell.identity import HostIdentity, read_boot_id
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_unix
from memstore.shell.rank.admin_link import store_root
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.leases import Tenant
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.scratch import scratch_store_name
from memstore.testing.faults.processes import process_of, wait_frozen
from memstore.testing.fuzz.messages import blank
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
WAIT_S = 60.0
ME = os.getpid()
REAP_LOOP = Holder._reap_loop
READ, STATUS = ReadStep(job="job", step=2, rank=0), AskStatus()

RANK = """
import signal, sys
from pathlib import Path
from memstore.shell.arena.manifests import ManifestFolder
from memstore.core.wire.calls import AskSteps, RankCall, ReadStep
from memstore.shell.rank.holder_link import HolderLink
link = HolderLink(Path(sys.argv[1]), nonce="n", job="job", rank=0)
link.leases.wait_free(2, 15.0)
link.call_soon(AskSteps(job="job"))
link.outbox.put(lambda: print("ready", flush=True))
signal.pause()
"""


FULL_RANK = """
import os, resource, sys
from pathlib import Path
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.rank.holder_link import HolderLink
link = HolderLink(Path(sys.argv[1]), nonce="n", job="job", rank=0)
lowest = os.dup(0)
os.close(lowest)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print("full", flush=True)
sys.stdin.readline()
"""


class Site:
    """One holder, or one after the other, on one arena; without a controller."""

    def __init__(self) -> None:
        self.config = Config(
            store=scratch_store_name(),
            arena_bytes=8 << 20,
            chunk_bytes=CHUNK_BYTES,
            interface="127.0.0.1",
            scrub_bytes_per_s=0,
        )
        self.relayed: list[int] = []
        self.gone: list[str] = []
        self.holder = self.begin(64)

    def begin(self, limit_slots: int) -> Holder:
        """Start a holder that reaps only when ordered, and note what it passes on."""
        identity = HostIdentity("a", read_boot_id(), True, {})
        holder = Holder(identity, self.config, secret=b"s" * 32, arena_limit_bytes=limit_slots * CHUNK_BYTES)
        holder.state.report = holder.sessions.report = self._note  # type: ignore[method-assign]
        self.holder = holder
        return holder

    def _note(self, report: HolderMessage) -> None:
        if isinstance(report, Called):
            self.relayed.append(report.id)
        elif isinstance(report, ProcessGone):
            self.gone.append(report.nonce)

    def leased(self) -> int:
        """Slots leased to any process."""
        with self.holder.replicas.lock:
            return sum(len(numbers) for numbers in self.holder.replicas.table.leases.values())


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(Holder, "_reap_loop", lambda self: None)
    made = Site()
    yield made
    made.holder.close()
    shutil.rmtree(store_root(made.config), ignore_errors=True)


@pytest.fixture
def hello(site: Site) -> Iterator[Callable[..., Channel]]:
    """Connects as a store of this process, and reads the welcome."""
    made: list[Channel] = []

    def connect(life: int, nonce: str = "n") -> Channel:
        channel = connect_unix(site.holder.folder / "holder.sock", timeout_s=WAIT_S)
        made.append(channel)
        channel.send(Kind.EVENT, 0, hello_of(nonce=nonce, life=life), deadline_s=WAIT_S)
        assert isinstance(decode_greeting(channel.recv(timeout_s=WAIT_S).data), Welcome)
        return channel

    yield connect
    for channel in made:
        channel.close()


def hello_of(*, nonce: str = "n", life: int = 1, pid: int = ME) -> RankHello:
    return RankHello(nonce=nonce, life=life, pid=pid, job="job", rank=0, attempt=0, held=(), arena="")


def send(channel: Channel, message: RankMessage) -> None:
    channel.send(Kind.EVENT, 0, message, deadline_s=WAIT_S)


def receive(channel: Channel) -> HolderEvent:
    return decode_holder_event(channel.recv(timeout_s=WAIT_S).data)


def saying(words: str) -> Status:
    """An answer that is known by its words."""
    return replace(blank(Status), failure_domains=[words])


def answered(reply: Status) -> CallAnswered:
    """The answer to the rank's first question."""
    return CallAnswered(id=1, reply=encode(reply))


def ask(site: Site, channel: Channel, request: RankCall = STATUS) -> int:
    """Ask the rank's first question; return the holder's number of it."""
    before = len(site.relayed)
    send(channel, Called(id=1, call=request))
    wait_for(lambda: len(site.relayed) > before, "the call to be relayed")
    return site.relayed[-1]


# -- calls ----------------------------------------------------------------------------------------


def test_the_answer_to_a_closed_store_is_not_given_to_its_successor(site: Site, hello: Callable[..., Channel]) -> None:
    """Two stores of one process both count calls from 1: each gets the answer to its own question only (R4)."""
    first = ask(site, hello(life=1))
    newer = hello(life=2)
    second = ask(site, newer)
    assert second != first
    site.holder.ranks.answer(first, encode(saying("the old store")), None)
    site.holder.ranks.answer(second, encode(saying("the new store")), None)
    assert receive(newer) == answered(saying("the new store"))


def test_who_connects_is_in_the_inventory_before_it_is_reported(
    site: Site, hello: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report may be lost with a session that ends; the next one's inventory is taken after that (R20)."""
    known: list[bool] = []

    def report(reported: HolderMessage) -> None:
        if isinstance(reported, RankArrived):
            known.append(reported.nonce in site.holder.state.ranks.owners)

    monkeypatch.setattr(site.holder.state, "report", report)
    hello(life=1)
    wait_for(lambda: known, "the report")
    assert known == [True]


def test_the_answer_to_a_former_holder_is_given_to_no_process(site: Site, hello: Callable[..., Channel]) -> None:
    """A controller may answer what a holder asked before it died; no question of its successor has that number (R3)."""
    first = ask(site, hello(life=1))
    site.holder.close()
    site.begin(64)
    newer = hello(life=2, nonce="m")
    second = ask(site, newer)
    site.holder.ranks.answer(first, encode(saying("a rank of the former holder")), None)
    site.holder.ranks.answer(second, encode(saying("the new store")), None)
    assert receive(newer) == answered(saying("the new store"))


def test_a_store_that_says_bye_is_asked_for_no_more(site: Site, hello: Callable[..., Channel]) -> None:
    """A closed store's question is not asked again in the next controller's session (R4)."""
    leaving, staying = hello(life=1), hello(life=1, nonce="other")
    ask(site, leaving)
    kept = ask(site, staying)
    send(leaving, Bye())

    def asked_again() -> list[int]:
        site.relayed.clear()
        site.holder.calls.ask_again()
        return site.relayed

    wait_for(lambda: asked_again() == [kept], "the `bye`")


def test_a_call_that_is_asked_again_on_a_new_link_is_one_call(site: Site, hello: Callable[..., Channel]) -> None:
    """A store whose link broke asks again: the same number, and the first answer, on the new link, ends it (R4)."""
    old = hello(life=1)
    first = ask(site, old)
    old.abort()
    newer = hello(life=1)
    assert ask(site, newer) == first
    site.holder.ranks.answer(first, encode(saying("1")), None)
    site.holder.ranks.answer(first, encode(saying("2")), None)
    site.holder.ranks.answer(ask(site, newer), encode(saying("3")), None)
    assert [receive(newer) for _ in range(2)] == [answered(saying("1")), answered(saying("3"))]


# -- links that end ---------------------------------------------------------------------------------


def test_marks_are_forgotten_before_the_process_can_be_connected_again(
    site: Site, hello: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step with the link's end: the marks that the next link names would be forgotten otherwise."""
    changed, gate = site.holder.context.changed, site.holder.ranks.send_gate
    forget, could_connect = gate.forget, list[bool]()

    def forgotten(*named: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            could_connect.append(other.submit(changed.acquire, blocking=False).result())
        forget(*named)

    monkeypatch.setattr(gate, "forget", forgotten)
    hello(life=1).close()
    wait_for(lambda: could_connect, "the link's end")
    assert could_connect == [False]


def test_readers_pins_end_although_the_dead_cannot_be_reaped(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each periodic work fails by itself (R7)."""
    expired = threading.Event()
    monkeypatch.setattr(ranks, "reap", lambda state: 1 // 0)
    monkeypatch.setattr(site.holder.replicas, "expire_pins", expired.set)
    reaping = threading.Thread(target=REAP_LOOP, args=(site.holder,), daemon=True)
    site.holder._threads.append(reaping)  # close() joins it: else it finds its files removed, and writes them again
    reaping.start()
    assert expired.wait(WAIT_S)


# -- pid namespaces ---------------------------------------------------------------------------------


def test_nothing_stays_pinned_for_a_reader_whose_link_ended_meanwhile(
    site: Site, hello: Callable[..., Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin that is not released keeps the slots of its step for minutes (R7)."""
    replicas = site.holder.replicas
    replicas.ensure_free(1)
    shard, slots = ShardId("job", 1, 2, 0), replicas.take_slots(1)
    make_ready(
        site.holder, replicas.seal_local(shard, world_size=1, layout=b"", nbytes=CHUNK_BYTES, slots=slots, attempt=1)
    )
    channel, take = hello(1), ready.take
    number = ask(site, channel, READ)

    def take_after_the_link(*given: Any) -> Any:
        channel.close()
        taken = take(*given)
        with site.holder.io._released():
            wait_for(lambda: not site.holder.state.ranks.links, "the link to end")
        return taken

    monkeypatch.setattr(ready, "take", take_after_the_link)
    answer = ShardReady(step=2, attempt=1, verdict="local", why="", report=None, read=1)
    site.holder.ranks.answer(number, encode(answer), None)
    assert not site.holder.state.reads.ready
    assert not replicas.index.incoming


def test_a_rank_whose_process_cannot_be_seen_is_refused() -> None:
    """Without its pid its death could not be seen: a rank is refused with the remedy, a tool is not (R8)."""
    with pytest.raises(ConfigError, match=r"pid 77.*--pid=host"):
        rank_server.owner_of(hello_of(pid=77), 0)
    assert rank_server.owner_of(ToolHello(nonce="n", life=1, pid=77), 0).pid == 0
    seen = rank_server.owner_of(hello_of(pid=77), ME)
    assert (seen.pid, seen.start) == (ME, process_start_time(ME))


def test_the_refusal_reaches_the_rank(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank from another pid namespace gets the ConfigError itself and no lease; a tool connects (R8)."""
    site.holder.replicas.claim("job", PeerShare(0, {0: 2}, 0))
    monkeypatch.setattr(rank_server, "process_start_time", lambda pid: None)
    with pytest.raises(ConfigError, match="pid namespace"):
        HolderLink(site.holder.folder, nonce="n", job="job", rank=0)
    assert site.leased() == 0
    HolderLink(site.holder.folder, nonce="tool").close()


# -- reaping ----------------------------------------------------------------------------------------


def test_leases_end_with_the_process_and_not_before(site: Site) -> None:
    """A rank whose link ended keeps leases and calls; once it is proved dead both go, and it is said (R8, R20)."""
    site.holder.replicas.claim("job", PeerShare(0, {0: 2}, 0))
    command = [sys.executable, "-c", RANK, str(site.holder.folder)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
            wait_for(lambda: bool(site.relayed), "the rank's call")
            rank.send_signal(signal.SIGSTOP)  # alive, and silent
            wait_frozen(process_of(rank.pid))  # else it may connect again
            server, links, calls = site.holder.ranks, site.holder.state.ranks.links, site.holder.calls
            links["n"].channel.abort()
            wait_for(lambda: "n" not in links, "the link's end")
            server.reap()
            assert (site.leased(), site.gone, len(calls._waiting)) == (2, [], 1)
        finally:
            rank.kill()
    server.reap()  # or the holder's own thread, which may be in the middle of it
    wait_for(lambda: (site.leased(), site.gone, len(calls._waiting)) == (0, ["n"], 0), "the end of leases and calls")


def test_leases_found_on_adoption_are_the_owners_while_it_lives(site: Site) -> None:
    """An owner that has not connected to this holder yet keeps its leases; a reused pid is another owner (R8)."""
    start = process_start_time(ME)
    assert start is not None
    living, dead = Owner(ME, start, 1), Owner(ME, start - 1, 1)
    site.holder.replicas.ensure_free(4)
    with site.holder.replicas.lock:
        site.holder.replicas.table.lease(living, 2, attempt=1)
        site.holder.replicas.flush()
    site.holder.close()
    table = site.begin(64).replicas.table
    with site.holder.replicas.lock:
        table.lease(dead, 2, attempt=1)  # it died after the arena was adopted
    site.holder.ranks.reap()
    with site.holder.replicas.lock:
        assert {o: len(n) for o, n in table.leases.items() if n} == {living: 2}


def test_a_rank_that_connects_again_keeps_its_leases(site: Site) -> None:
    """Neither its broken link nor a reap at any moment costs a living rank a slot it fills (R8)."""
    site.holder.replicas.claim("job", PeerShare(0, {0: 3}, 0))
    link = HolderLink(site.holder.folder, nonce="n", job="job", rank=0)
    try:
        taken = Tenant()
        assert link.leases.take(taken, 3, WAIT_S)
        links = site.holder.state.ranks.links
        for moment in range(2):
            served = links["n"]
            served.channel.abort()
            site.holder.ranks.reap()
            wait_for(lambda old=served: links.get("n", old) is not old, "a new link")  # type: ignore[misc]
            site.holder.ranks.reap()
            assert (site.leased(), site.gone) == (3, []), moment
        assert sorted(link.leases.in_copy) == taken.slots
    finally:
        link.close()
    wait_for(lambda: site.leased() == 0, "the `bye`")


# -- a removed job ------------------------------------------------------------------------------------


def test_a_link_comes_back_in_a_process_without_a_descriptor_left(site: Site) -> None:
    """It needs only the descriptor that the broken link gave back; if it needed more, its reader thread would end."""
    with subprocess.Popen(
        [sys.executable, "-c", FULL_RANK, str(site.holder.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"full\n"
        first = wait_for(lambda: site.holder.state.ranks.links.get("n"), "the link to be known")
        first.channel.abort()
        wait_for(lambda: site.holder.state.ranks.links.get("n", first) is not first, "the link to come back")
        process.stdin.close()


def test_a_process_of_a_removed_job_waits_for_no_room(site: Site) -> None:
    """`rm --force` while it trains: its puts fail by name, on a new link too, instead of waiting for room (R21)."""
    link = HolderLink(site.holder.folder, nonce="n", job="job", rank=0)
    try:
        wait_for(lambda: "n" in site.holder.state.ranks.links, "the link to be known")  # the welcome is read before
        with site.holder.context.changed:
            link.attempt = site.holder.state.ranks.links["n"].attempt = 2
        site.holder.obey(DropJob(job="job", attempt=2, shards=()))
        assert not link.leases.take(Tenant(), 1, WAIT_S)
        with pytest.raises(FencedError, match=r"belongs to attempt 2 .* the job was removed; connect again"):
            raise link.fenced_error()
        link.fenced = ""
        site.holder.state.ranks.links["n"].channel.abort()
        wait_for(lambda: "the job was removed" in link.fenced, "the word on a new link")
    finally:
        link.close()


# -- a raised limit -----------------------------------------------------------------------------------


def test_a_rank_maps_an_arena_whose_limit_was_raised_again(site: Site) -> None:
    """Slots beyond the mapping are granted and viewed after a holder with more room; older views stay good (R9)."""
    site.holder.close()
    shutil.rmtree(site.holder.folder)
    site.begin(4).replicas.claim("job", PeerShare(0, {0: 2}, 0))
    link = HolderLink(site.holder.folder, nonce="n", job="job", rank=0)
    try:
        taken = Tenant()
        assert link.leases.take(taken, 2, WAIT_S)
        held = taken.slots
        mapping, before, channel = link.leases.mapping.open(), link.leases.mapping.view(held[0]), link.channel
        site.holder.close()
        replicas = site.begin(64).replicas
        wait_for(lambda: link.channel is not channel, "the next holder")
        replicas.claim("job", PeerShare(0, {0: 8}, 8))
        site.holder.io.run(ranks.grant_job, site.holder.state, "job")
        more = Tenant()
        assert link.leases.take(more, 6, WAIT_S)
        assert max(more.slots) >= 4
        for slot in more.slots:
            link.leases.mapping.view(slot)[:5] = b"fresh"
            assert replicas.arena.view(slot, 5) == b"fresh"
        before[:5] = b"still"
        assert replicas.arena.view(held[0], 5) == b"still"
        assert mapping.view(held[0], 5) == b"still"  # another thread may be about to look through it
        before.release()
    finally:
        link.close()


def test_a_reader_views_slots_beyond_its_mapping(site: Site) -> None:
    """A reader that mapped the arena before its limit was raised reads what lies beyond (R9)."""
    site.holder.close()
    shutil.rmtree(site.holder.folder)
    site.begin(4).replicas.ensure_free(4)
    link = HolderLink(site.holder.folder, nonce="n")
    try:
        with link.leases.mapping.view(3) as before:
            site.holder.close()
            site.begin(64).replicas.ensure_free(16)
            site.holder.replicas.arena.view(12)[:4] = b"far!"
            assert link.leases.mapping.view(12, 4) == b"far!"
            site.holder.replicas.arena.view(3)[:4] = b"near"
            assert before[:4] == b"near"
        with pytest.raises(IndexError):
            link.leases.mapping.view(40)
    finally:
        link.close()
