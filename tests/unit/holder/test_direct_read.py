"""Reads whose bytes go from another host's holder straight into the reader's memory (R4, R23, R26, R27)."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from link_site import WAIT_S, Site, Stop, together
from msgspec import structs

import memstore.client.reader
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.holder_io import HolderIo
from memstore.core.holder.reads import bring, fetch, ready
from memstore.core.holder.state import HolderState, Ready
from memstore.core.wire.codec import Message, Request
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import ReaderIdentity
from memstore.core.wire.ids import Endpoint, WireShard, WireSpec
from memstore.core.wire.orders import Bring, Run
from memstore.core.wire.peer_messages import FetchChunks, FetchManifest, Ping, Verify
from memstore.errors import DigestMismatch, FencedError, IntegrityError, PeerUnreachable, RecoveryError
from memstore.shell.arena.folder import SECRET_NBYTES
from memstore.shell.holder.holder import Holder
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_tcp
from memstore.shell.peer import server
from memstore.shell.peer.client import PeerClient
from memstore.shell.rank import peer_chunks, shard_read
from memstore.shell.rank.admin_link import Tool
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
SHARD = ShardId("train", 1, 2, 0)
FILLS = b"\1\2\3\4\5\6"


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Holder, Holder]]:
    monkeypatch.setattr(fetch, "RETRY_S", 0.01)
    with two_holders(CHUNK_BYTES, detect=0.6) as found:
        yield found


def seal(holder: Holder, fills: bytes = FILLS, shard: ShardId = SHARD) -> StoredReplica:
    """Store a shard of one chunk per fill byte."""
    replicas = holder.replicas
    replicas.ensure_free(len(fills))
    slots = replicas.take_slots(len(fills))
    for slot, fill in zip(slots, fills, strict=True):
        replicas.arena.view(slot, CHUNK_BYTES)[:] = bytes([fill]) * CHUNK_BYTES
    return replicas.seal_local(shard, world_size=1, layout=b"", nbytes=len(fills) * CHUNK_BYTES, slots=slots, attempt=1)


def rot(holder: Holder, stored: StoredReplica, index: int) -> None:
    """Flip a bit of a sealed chunk behind all processes' back."""
    slot = stored.slots[index]
    assert slot is not None
    holder.replicas.arena.view(slot, CHUNK_BYTES)[7] ^= 1


def order(stored: StoredReplica, *, holders: Sequence[str] = ("a",), source: str = "a", number: int = 1) -> Bring:
    """Stage a shard whole for a get of all ranks, from one host."""
    return Bring(
        read=number,
        job="train",
        shard=WireShard.of(stored.shard),
        spec=WireSpec.of(stored.spec),
        chunks=None,
        attempt=2,
        holders=tuple(holders),
        runs=(Run("peer", source, 0, len(stored.slots)),),
        durable=None,
        reader="",
        use="get",
    )


def staged(holder: Holder, wanted: Bring) -> dict[str, list[int]]:
    bring.begin(holder.state, wanted)
    return holder.io.run(bring._bring, holder.state, wanted)


# -- at the reader's holder ---------------------------------------------------------------------------


def test_a_staged_round_brings_no_byte_here(pair: tuple[Holder, Holder]) -> None:
    """The source digests the chunks, and this host takes no slot for them and counts no copy (R10, R23)."""
    a, b = pair
    stored, free = seal(a), len(b.replicas.table.free)
    assert staged(b, order(stored)) == {}
    assert b.state.reads.ready[1].sources == {"a": [0, 1, 2, 3, 4, 5]}
    assert len(b.replicas.table.free) == free
    assert b.replicas.index.copies("b") == []
    assert b.replicas.index.used_by_rank("train", 0) == 0


def test_what_rotted_at_its_source_is_evidence_before_any_rank_goes_on(pair: tuple[Holder, Holder]) -> None:
    """The source finds the chunk as it digests its copy for the round: the controller plans again (R23, R25)."""
    a, b = pair
    stored = seal(a)
    rot(a, stored, 4)
    assert staged(b, order(stored)) == {"a": [4]}
    assert stored.missing == {4}
    assert not b.state.reads.ready
    assert not b.replicas.index.incoming


def test_another_holder_is_the_source_where_the_planned_one_does_not_answer(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is gone from the view is no evidence about its bytes; who has the shard as well is asked (R25)."""
    a, b = pair
    stored = seal(a)
    assert staged(b, order(stored, holders=("gone", "a"), source="gone")) == {}
    assert b.state.reads.ready[1].sources == {"a": [0, 1, 2, 3, 4, 5]}
    monkeypatch.setattr(fetch, "RETRY_LIMIT_S", 0.0)
    monkeypatch.setattr(fetch, "deadline_s", lambda state: 0.0)
    with pytest.raises(PeerUnreachable, match="host gone is not in the store's view"):
        staged(b, order(stored, holders=("gone",), source="gone", number=2))


def test_a_newer_round_takes_the_place_of_an_older_one(pair: tuple[Holder, Holder]) -> None:
    """A rank is in one round at a time: what was held for the older one is given back (R7)."""
    a, b = pair
    stored = seal(a)
    beside = seal(b, FILLS[:2], ShardId("train", 1, 1, 0))
    for number in (1, 2):
        assert staged(b, order(stored, number=number)) == {}
    assert list(b.state.reads.ready) == [2]
    ready.release(b.state, 2)
    assert not b.replicas.index.incoming
    assert [b.replicas.table.slots[slot or 0].refs for slot in beside.slots] == [1, 1]


def hold_up_first(monkeypatch: pytest.MonkeyPatch, kind: type[Request[Any]]) -> Stop:
    """Have the first request of a kind to any peer wait for the test."""
    real = PeerClient.call
    stop = Stop(real)

    def call(self: PeerClient, request: Request[Any], timeout_s: float = 30.0) -> Any:
        return (stop if isinstance(request, kind) else real)(self, request, timeout_s)

    monkeypatch.setattr(PeerClient, "call", call)
    return stop


@pytest.mark.parametrize("held_up", [FetchManifest, Verify])
def test_a_round_that_was_overtaken_takes_nothing_from_the_newer_one(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch, held_up: type[Request[Any]]
) -> None:
    """Some ranks of a round may still be staged when it is planned again: what is kept is the newest round's (R23)."""
    a, b = pair
    older, newer = seal(a), seal(a, FILLS[:3], ShardId("train", 1, 3, 0))
    stop = hold_up_first(monkeypatch, held_up)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(staged, b, order(older))
        assert stop.at.wait(WAIT_S)
        assert staged(b, order(newer, number=2)) == {}
        stop.go.set()
        with pytest.raises(IntegrityError, match="its rank began another get"):
            first.result(WAIT_S)
    assert b.state.reads.ready[2].replica.shard == newer.shard
    assert [replica.shard for replica in b.replicas.index.incoming.values()] == [newer.shard]


def test_a_step_that_is_dropped_while_it_is_staged_is_not_kept(
    pair: tuple[Holder, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks here are given back with it: their slots may be another step's when a reader comes (R7)."""
    a, b = pair
    stored = seal(a)
    seal(b, FILLS[:2], ShardId("train", 1, 1, 0))
    stop = hold_up_first(monkeypatch, Verify)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(staged, b, order(stored))
        assert stop.at.wait(WAIT_S)
        b.replicas.drop_step("train", 1, 2)
        stop.go.set()
        with pytest.raises(IntegrityError, match="was dropped"):
            first.result(WAIT_S)
    assert not b.state.reads.ready


def reader_of(a: Holder) -> Channel:
    address, port = a.listeners[0].address[:2]
    return connect_tcp(
        str(address), int(port), secret=a.secret, store=a.config.store, identity=ReaderIdentity(host="b"), timeout_s=5.0
    )


@pytest.mark.parametrize("request_kind", ["manifest", "ping"])
def test_a_reader_may_ask_for_chunks_alone(pair: tuple[Holder, Holder], request_kind: str) -> None:
    """Anything else ends its connection: it is no holder, and speaks for no host (R4)."""
    a, _ = pair
    stored = seal(a)
    wanted: Message = Ping()
    if request_kind == "manifest":
        wanted = FetchManifest(shard=WireShard.of(SHARD), digest=stored.spec.digest)
    with reader_of(a) as channel:
        channel.send(Kind.CALL, 1, wanted, deadline_s=5.0)
        with pytest.raises(PeerUnreachable):
            channel.recv(timeout_s=5.0)


def test_a_reader_that_sends_bytes_ends_its_connection(
    pair: tuple[Holder, Holder], caplog: pytest.LogCaptureFixture
) -> None:
    """A call has none; it is counted as what arrives broken, and is no mistake of the holder's (R14)."""
    a, _ = pair
    stored = seal(a)
    request = FetchChunks(shard=WireShard.of(SHARD), digest=stored.spec.digest, chunks=(0,))
    with reader_of(a) as channel:
        channel.send(Kind.CALL, 1, request, [memoryview(bytes(9))], deadline_s=5.0)
        with pytest.raises(PeerUnreachable):
            channel.recv(timeout_s=5.0)
    wait_for(lambda: a.damage.stats()["broken_frames"] == 1, "the frame to be counted")
    assert "error of ours" not in caplog.text


def test_a_reader_learns_what_the_holder_lacks(pair: tuple[Holder, Holder]) -> None:
    """A shard that is not there is an error by name; its connection goes on."""
    a, _ = pair
    with reader_of(a) as channel:
        for _ in range(2):
            channel.send(
                Kind.CALL, 1, FetchChunks(shard=WireShard.of(SHARD), digest="0" * 32, chunks=(0,)), deadline_s=5.0
            )
            assert channel.recv(timeout_s=5.0).kind is Kind.ERROR


# -- in the reader's process --------------------------------------------------------------------------


@pytest.fixture
def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(*hosts: str, replicas: int = 1) -> Site:
        made.append(Site(tmp_path, list(hosts), monkeypatch))
        made[-1].config = dataclasses.replace(made[-1].config, replicas=replicas)
        return made[-1]

    yield make
    for site in made:
        site.close()


def put_apart(site: Site) -> list[dict[str, torch.Tensor]]:
    """Have each host's rank put a state of its own at step 1."""
    stores = site.connect()
    states = [{"w": torch.arange(400_000, dtype=torch.int32) + (rank << 20)} for rank in range(len(stores))]
    together(*[lambda s=s: s.put(1, states[s.rank]).wait("committed", WAIT_S) for s in stores])
    return states


def reader_on(site: Site, host: str) -> Any:
    return memstore.client.reader.Reader("job", Tool(site.folder(host)), memstore.Config())


@pytest.mark.parametrize("has_into", [False, True])
def test_a_shard_of_another_host_comes_straight_into_the_state(make_site: Callable[..., Site], has_into: bool) -> None:
    """No slot of the reader's host is taken, and every byte is what was put (R4, R26)."""
    site = make_site("a", "b")
    states = put_apart(site)
    free = len(site.replicas.table.free)
    target = {"w": torch.zeros_like(states[1]["w"])} if has_into else None
    with reader_on(site, "a") as reader:
        got = reader.get(rank=1, into=target)
    wait_for(lambda: not site.replicas.index.incoming, "the read to be given back")
    assert torch.equal(got.state["w"], states[1]["w"])
    assert target is None or torch.equal(target["w"], states[1]["w"])
    assert (got.source, len(site.replicas.table.free)) == ("peer", free)


class Wire:
    """Damages or ends what a holder sends readers, once or always."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work: Callable[[Channel, list[Any]], None] = lambda channel, views: None
        real = server.send_run

        def send(channel: Channel, request_id: int, views: list[Any], **given: Any) -> None:
            views = [None if view is None else memoryview(bytearray(view)) for view in views]
            self.work(channel, views)
            real(channel, request_id, views, **given)

        monkeypatch.setattr(server, "send_run", send)


@pytest.mark.parametrize("fault", ["flip", "lack", "reset"])
def test_what_does_not_come_whole_is_brought_by_the_readers_holder(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A chunk that is damaged on the way, lacking, or cut off comes from the holder's own fetch (R26)."""
    site, wire, hits = make_site("a", "b"), Wire(monkeypatch), [1]
    states = put_apart(site)

    def break_once(channel: Channel, views: list[Any]) -> None:
        if not hits:
            return
        hits.pop()
        middle = len(views) // 2
        if fault == "flip":
            views[middle][100] ^= 1
        elif fault == "lack":
            views[middle] = None
        else:
            channel.abort()

    wire.work = break_once
    target = {"w": torch.zeros_like(states[1]["w"])}
    with reader_on(site, "a") as reader:
        got = reader.get(rank=1, into=target)
    assert not hits
    assert torch.equal(target["w"], states[1]["w"])
    assert "were brought again" in got.source_reason
    counts = {"digest_errors": int(fault == "flip"), "broken_frames": 0}
    wait_for(lambda: site.holders["a"].damage.stats() == counts, f"{counts} of the reader's host (R14)")
    wait_for(lambda: not site.replicas.index.incoming, "the read to be given back")


def test_without_a_good_copy_the_get_fails_and_names_the_state(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way brings damaged bytes: `into` was written to, and the error says that it is unusable (R26)."""
    site, wire = make_site("a", "b"), Wire(monkeypatch)
    states = put_apart(site)

    def always(channel: Channel, views: list[Any]) -> None:
        for view in views:
            view[5] ^= 1

    wire.work = always
    monkeypatch.setattr(fetch, "RETRY_S", 0.01)
    monkeypatch.setattr(fetch, "deadline_s", lambda state: state.now())
    with reader_on(site, "a") as reader, pytest.raises((DigestMismatch, RecoveryError), match="into= is unusable"):
        reader.get(rank=1, into={"w": torch.zeros_like(states[1]["w"])})


def test_a_reader_that_may_not_dial_has_its_holder_bring_some_chunks_at_a_time(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard may be larger than the room of the reader's host, and slower than the limit of one request (R10, R26)."""
    site = make_site("a", "b")
    states = put_apart(site)
    monkeypatch.setattr(peer_chunks, "read_secret", lambda folder: bytes(SECRET_NBYTES))  # not the holders'
    monkeypatch.setattr(shard_read, "REPAIR_BYTES", 4 * CHUNK_BYTES)
    brought: list[int] = []
    real = ready.keep

    def keep(state: HolderState, read: Ready) -> None:
        brought.append(len(read.replica.wanted))
        real(state, read)

    monkeypatch.setattr(ready, "keep", keep)
    with reader_on(site, "a") as reader:
        got = reader.get(rank=1)
    assert torch.equal(got.state["w"], states[1]["w"])
    assert max(brought) == 4
    assert "chunks of host b are brought by this host's holder instead" in caplog.text


def test_a_host_that_does_not_answer_is_not_dialled_for_every_read(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only holders reach each other a load of many reads would wait for each; the bytes come all the same."""
    site = make_site("a", "b")
    states = put_apart(site)
    monkeypatch.setattr(peer_chunks, "CONNECT_S", 0.2)
    real = ready.sources_of
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        deaf.setblocking(False)

        async def elsewhere(io: HolderIo, read: Ready) -> Any:
            rows = await real(io, read)
            return tuple(structs.replace(row, endpoints=(Endpoint(*deaf.getsockname()),)) for row in rows)

        monkeypatch.setattr(ready, "sources_of", elsewhere)
        with reader_on(site, "a") as reader:
            assert torch.equal(reader.get(rank=1).state["w"], states[1]["w"])
            for _ in range(peer_chunks.Dialler(site.folder("a"), site.config.store_fields()).streams):
                deaf.accept()[0].close()
            assert torch.equal(reader.get(rank=1).state["w"], states[1]["w"])
            with pytest.raises(BlockingIOError):
                deaf.accept()


def test_a_network_that_failed_is_not_dialled_first_by_the_next_read(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a load would lose the time of a dial, and a stream, to what the one before it found broken."""
    site, dialled = make_site("a", "b"), list[Endpoint]()
    states = put_apart(site)
    real_rows, real_connect = ready.sources_of, peer_chunks.Dialler.connect
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = Endpoint(*free.getsockname())

    async def elsewhere(io: HolderIo, read: Ready) -> Any:
        rows = await real_rows(io, read)
        return tuple(structs.replace(row, endpoints=(gone, *row.endpoints)) for row in rows)

    def connect(self: peer_chunks.Dialler, host: str, endpoint: Endpoint) -> Channel:
        dialled.append(endpoint)
        return real_connect(self, host, endpoint)

    monkeypatch.setattr(ready, "sources_of", elsewhere)
    monkeypatch.setattr(peer_chunks.Dialler, "connect", connect)
    with reader_on(site, "a") as reader:
        assert torch.equal(reader.get(rank=1).state["w"], states[1]["w"])
        assert gone in dialled
        dialled.clear()
        assert torch.equal(reader.get(rank=1).state["w"], states[1]["w"])
    assert dialled
    assert gone not in dialled


def test_a_get_of_all_ranks_is_direct(make_site: Callable[..., Site]) -> None:
    """Ranks that changed hosts get their shards from where they lie, and both go on with a put (R23, R27)."""
    site = make_site("a", "b")
    states = put_apart(site)
    for store in site.stores:
        store.close()
    hosts = list(site.holders)
    site.holders = {host: site.holders[host] for host in reversed(hosts)}
    stores = site.connect()
    into = [{"w": torch.zeros_like(states[0]["w"])} for _ in stores]
    got = together(*[lambda s=s: s.get(into=into[s.rank]) for s in stores])
    assert [found.source for found in got] == ["peer", "peer"]
    assert all(torch.equal(into[rank]["w"], states[rank]["w"]) for rank in range(2))
    together(*[lambda s=s: s.put(2, into[s.rank]).wait("committed", WAIT_S) for s in stores])
    for holder in site.holders.values():
        wait_for(lambda h=holder: not h.state.reads.ready, "the reads to be given back")


def test_an_interrupted_link_ends_a_fetch(make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that says nothing more holds a process whose peers were lost for no deadline."""
    site, wire = make_site("a", "b"), Wire(monkeypatch)
    put_apart(site)
    store = site.stores[0]
    monkeypatch.setattr(peer_chunks, "SILENT_S", 10 * WAIT_S)

    def hang(channel: Channel, views: list[Any]) -> None:
        store._link.interrupt("a test ends it")
        wait_for(lambda: channel.is_closed or channel._readable.poll(0) != [], "the reader to go")

    wire.work = hang
    with pytest.raises(FencedError, match="a test ends it"):
        store.get(1, rank=1)


def test_chunks_of_shared_content_are_not_fetched(make_site: Callable[..., Site]) -> None:
    """What the reader's host holds of any shard is read there (R13)."""
    site = make_site("a", "b")
    stores = site.connect()
    same = torch.arange(400_000, dtype=torch.int32)
    together(*[lambda s=s: s.put(1, {"w": same}).wait("committed", WAIT_S) for s in stores])
    fetched: list[Sequence[int]] = []
    real = ready.sources_of

    async def noted(io: HolderIo, read: Any) -> Any:
        rows = await real(io, read)
        fetched.extend(tuple(row.chunks) for row in rows)
        return rows

    with pytest.MonkeyPatch.context() as patch, reader_on(site, "a") as reader:
        patch.setattr(ready, "sources_of", noted)
        got = reader.get(rank=1)
    assert torch.equal(got.state["w"], same)
    count = sum(part.count for parts in fetched for part in parts)
    assert count <= 1  # the last chunk has the layout's own bytes, if any differ


def test_what_a_reader_fetches_is_named_in_ranges() -> None:
    """The answer to a read of a shard of many chunks stays small."""
    assert len(tuple(ready.ranges(range(100_000)))) == 1
