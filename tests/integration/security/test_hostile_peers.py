"""A holder under attack: no bytes out, nothing stored changes, memory stays bounded, training goes on (F33, I19, I20).

One cluster of real processes for all tests; after each attack the inventory of every host is what it was, the holder
has not grown, and the next step of a job that trains meanwhile is committed.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
from msgspec.structs import replace

from memstore import errors
from memstore.core.arena.replica_index import PEER_INCOMING_MAX
from memstore.core.format.manifest import chunk_digest
from memstore.core.wire import frame
from memstore.core.wire.calls import AskPlan, Join, RankCall, ReserveRoom
from memstore.core.wire.codec import decode_reply, encode
from memstore.core.wire.error_message import decode_error
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import ClientProof, Hello, HolderIdentity, decode_server_proof
from memstore.core.wire.ids import WireShard
from memstore.core.wire.peer_messages import (
    Abort,
    ChunkBatch,
    ChunkRun,
    ChunksLacking,
    Done,
    HasCopy,
    Offer,
    OfferedChunk,
    Ping,
    Refused,
    Seal,
    decode_lacking,
)
from memstore.core.wire.rank_messages import Welcome, decode_greeting
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_tcp, connect_unix
from memstore.shell.rank.admin_link import Tool
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, RankProcess, together

GROWTH_MAX_BYTES = 96 << 20
"""Python keeps what it once took; one bomb let in costs ten times as much."""
HOSTS = {"h0": {"rack": "r0", "memstore": "replica"}, "h1": {"rack": "r1", "memstore": "replica"}}
SHARD = WireShard("train", 1, 1 << 40, 1)  # a peer of h0, of a step that no process puts


@dataclass
class Trained:
    """A cluster with a job of two ranks; `step` is the newest one that is committed."""

    cluster: ProcessCluster
    ranks: list[RankProcess]
    step: int
    address: tuple[str, int]

    def own_memory_bytes(self) -> int:
        """Memory of holder h0 that is its own: the arena and files do not count."""
        status = Path(f"/proc/{self.cluster.holders['h0'].pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1]) << 10

    def stranger(self) -> socket.socket:
        """A connection that says nothing yet."""
        return socket.create_connection(self.address, timeout=20)

    def peer(self, **changes: Any) -> Channel:
        """A connection as a host that knows the secret, unless `changes` says otherwise."""
        sides: dict[str, Any] = {"secret": self.cluster.secret, "store": self.cluster.config.store}
        sides |= {"identity": HolderIdentity(host="h9", incarnation=1), **changes}
        return connect_tcp(*self.address, timeout_s=10, **sides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, _nursery: RankNursery) -> Iterator[Trained]:
    """Two hosts, two ranks, one step committed on both."""
    with ProcessCluster(tmp_path_factory.mktemp("attacked"), HOSTS) as cluster:
        ranks = Fleet(cluster, _nursery).begin(["h0", "h1"], last_step=1)
        where, _, port = next(r["address"] for r in cluster.status()["hosts"] if r["host"] == "h0").rpartition(":")
        yield Trained(cluster, ranks, 1, (where, int(port)))
        _nursery.kill_all()


@pytest.fixture(autouse=True)
def _unharmed(trained: Trained) -> Iterator[None]:
    """Whichever way a test breaks holder h0, this is true afterwards."""
    before, memory_bytes = trained.cluster.settled_inventory(2), trained.own_memory_bytes()
    pids = {host: process.pid for host, process in trained.cluster.holders.items()}
    newest = trained.step
    yield
    if trained.step == newest:  # else the test itself has trained meanwhile
        # What an incoming replica held is given back when its connection has ended.
        wait_for(lambda: trained.cluster.settled_inventory(2) == before, "everything stored as it was")
    trained.step += 1
    assert together(trained.ranks, "train", first=trained.step, last=trained.step)[0]["level"] == "committed"
    assert trained.own_memory_bytes() - memory_bytes < GROWTH_MAX_BYTES
    assert {host: p.pid for host, p in trained.cluster.holders.items() if p.poll() is None} == pids


# -- who does not know the secret --------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"secret": bytes(32)}, {"secret": None}, {"store": "another"}])
def test_without_the_secret_no_process_is_a_peer(trained: Trained, changes: dict[str, Any]) -> None:
    """A wrong secret, none, and a wrong store's name are refused."""
    with pytest.raises(errors.AuthenticationError):
        trained.peer(**changes)


def answers(peer: Channel, timeout_s: float) -> bool:
    """Say whether the holder answers a ping."""
    return decode_reply(Ping(), peer.request(Ping(), timeout_s=timeout_s).data) == Done()


def received(sock: socket.socket) -> bytes:
    """Everything the other side says until it hangs up."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(1 << 16):
            answer += part
    return answer


def test_a_recorded_handshake_opens_nothing(trained: Trained) -> None:
    """The bytes of a good handshake, sent again, are answered with a nonce and a refusal, and not one byte more."""
    sent: list[bytes] = []

    class Recorded(socket.socket):
        def sendmsg(self, buffers: Any, *rest: Any) -> int:  # type: ignore[override]
            data = b"".join(buffers)
            sent.append(data)
            return self.send(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memstore.shell.net.listener.socket.socket", Recorded)
        with trained.peer() as peer:
            assert answers(peer, timeout_s=5)
    assert len(sent) == 3
    with trained.stranger() as again:
        for data in sent:
            again.sendall(data)
        answer = received(again)
    kinds = []
    while answer:
        header = frame.unpack_header(answer[: frame.HEADER_BYTES])
        kinds.append(header.kind)
        answer = answer[frame.HEADER_BYTES + header.body_bytes :]
    assert kinds in ([Kind.AUTH1, Kind.ERROR], [Kind.AUTH1])  # a reset may swallow the refusal


def test_a_challenge_sent_back_proves_nothing(trained: Trained) -> None:
    """A process that mirrors the holder's own nonce or proof is refused."""
    with Channel(trained.stranger()) as mirror:
        mirror.send(Kind.HELLO, 0, Hello(nonce=bytes(32)), deadline_s=5)
        first = decode_server_proof(mirror.recv(timeout_s=5).data)
        proof = ClientProof(identity=encode(HolderIdentity(host="h9", incarnation=1)), proof=first.proof)
        mirror.send(Kind.AUTH2, 0, proof, deadline_s=5)
        assert mirror.recv(timeout_s=5).kind is Kind.ERROR


def forged(kind: int = 1, body_bytes: int = 0, bulk_bytes: int = 0) -> bytes:
    """A header that pack_header would not make."""
    return struct.pack("<4sBBHQIQI", frame.MAGIC, frame.VERSION, kind, 0, 1, body_bytes, bulk_bytes, 0)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(forged(body_bytes=2**32 - 1) + bytes(1 << 20), id="body of 4 GiB"),
        pytest.param(forged(bulk_bytes=2**63), id="bulk of 8 EiB"),
        pytest.param(forged(kind=Kind.CALL), id="call"),
        pytest.param(forged(kind=Kind.CHUNK, bulk_bytes=1 << 20) + bytes(1 << 20), id="chunk"),
        pytest.param(b"GET /etc/passwd HTTP/1.1\r\n\r\n" * 10, id="http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(505), id="tls"),
        pytest.param(bytes(1 << 20), id="zeros"),
        pytest.param(forged(body_bytes=4096)[:20], id="half a header"),
        pytest.param(forged(body_bytes=4096) + bytes(100), id="half a body"),
    ],
)
def test_what_a_stranger_sends_is_not_answered(trained: Trained, data: bytes) -> None:
    """Lengths beyond every limit, frames out of turn, other protocols, torn frames: the end of the connection."""
    with trained.stranger() as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
        assert received(stranger) == b""


@pytest.mark.parametrize("verb", ["offer", "abort"])
def test_a_peer_that_speaks_for_another_host_is_refused_by_both_names(trained: Trained, verb: str) -> None:
    """It knows the secret, and would end what that host is sending: the error and the holder's log name both."""
    shard = WireShard("train", 1, 1, 0)
    request = replace(offer_of(shard), sender="h1") if verb == "offer" else Abort(shard=shard, sender="h1")
    with trained.peer() as peer:
        ours = "tcp:{}:{}".format(*peer._sock.getsockname())  # type: ignore[union-attr]
        with pytest.raises(errors.AuthenticationError, match="proved to be host 'h9' and speaks for host 'h1'"):
            peer.request(request, timeout_s=10)
        with pytest.raises(errors.TransportError):
            answers(peer, timeout_s=10)
        assert f"{ours}: it has proved to be host 'h9' and speaks for host 'h1'" in trained.cluster.logs()


def test_hundreds_of_idle_connections_keep_no_process_out(trained: Trained) -> None:
    """While strangers hold every place they can get, a step commits, and a new peer is served."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(trained.stranger()) for _ in range(300)]
        for stranger in strangers[::2]:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(forged(body_bytes=4096)[:31])
        trained.step += 1
        assert together(trained.ranks, "train", first=trained.step, last=trained.step)[0]["level"] == "committed"
        with trained.peer() as peer:
            assert answers(peer, timeout_s=10)
        assert threads_of(trained) < 150


def threads_of(trained: Trained) -> int:
    """Threads of holder h0: one per connection that it still serves."""
    return len(list(Path(f"/proc/{trained.cluster.holders['h0'].pid}/task").iterdir()))


# -- who knows the secret and sends nonsense ----------------------------------------------------------

ROW = [*("train", 1, 1 << 40, 1)]
OFFER = {"k": "offer", "shard": ROW, "digest": None, "attempt": 1, "sender": "h9", "chunks_count": 1}
CHUNKS = {"k": "chunks", "shard": ROW, "sender": "h9", "chunks": [[0, bytes(16), 10]]}
FETCHES = ({"k": "fetch_manifest"}, {"k": "fetch_chunks", "chunks": [0]}, {"k": "verify"})
BOMB = msgpack.packb([[]] * 15)
NONSENSE: list[dict[str, Any]] = [
    {},
    {"k": ["offer"]},
    {"k": "__class__"},
    {"k": "offer"},
    {**OFFER, "more": 1},
    {**OFFER, "sender": None},
    *({**OFFER, "chunks_count": count} for count in (-1, 2**40, 2**63, True, "1", None, [1], 1.5)),
    *({**OFFER, "attempt": attempt} for attempt in (-1, 2**63, True, "1", None, float("inf"))),
    *({**OFFER, "digest": digest} for digest in ("", "00" * 15, "AB" * 16, 5, [])),
    *({**OFFER, "shard": [job, 1, 7, 0]} for job in ("../../x", "", "x" * 300, "naïve", "a\0b", ".hidden", b"job", 5)),
    *({**OFFER, "shard": ["train", *numbers]} for numbers in ((1, -1, 0), (1, 2**63, 0), (True, 7, 0), (1, 7, "0"))),
    *({**OFFER, "shard": shard} for shard in (None, "abcd", 5, {}, [], ["other", 1, 7])),
    *({**CHUNKS, "chunks": [[index, bytes(16), 10]]} for index in (-1, 1, 2**63, "0", None)),
    *({**CHUNKS, "chunks": [[0, bytes(16), 10]] * count} for count in (2, 100_000)),
    *({**CHUNKS, "chunks": [[0, digest, 10]]} for digest in (b"short", "0" * 16, bytes(1 << 20), 5)),
    *({**CHUNKS, "chunks": [[0, bytes(16), size]]} for size in (0, -1, 2**63, 1 << 20, True, "1", None)),
    *({**CHUNKS, "chunks": chunks} for chunks in (5, {"0": 0}, [[]], [[0, bytes(16)]], [[0, bytes(16), 10, 1]])),
    *({"k": "seal", "shard": ROW, "sender": "h9", "manifest": m} for m in (b"", "text", 10**15, BOMB, BOMB * 10**6)),
    *({**fetch, "shard": ["train", 1, 1, 0], "digest": d} for fetch in FETCHES for d in ("", 5, [], "00" * 16)),
    {"k": "fetch_chunks", "shard": ["train", 1, 1, 0], "digest": "00" * 16, "chunks": [-1]},
]


def test_nonsense_from_a_peer_is_refused_in_words(trained: Trained) -> None:
    """Wrong types, absurd counts, names with separators: a request is refused in words, or ends its connection."""
    for body in NONSENSE:
        with trained.peer() as peer:
            try:
                if body.get("k") in ("chunks", "seal"):
                    assert offered(peer, SHARD) == Done()
                data = msgpack.packb(body)
                peer.send(Kind.CALL, 1, data, deadline_s=10)
                reply = peer.recv(timeout_s=10)
            except errors.TransportError:
                continue
            assert reply.bulk_bytes == 0
            if reply.kind is Kind.ERROR:
                assert isinstance(decode_error(reply.data).rebuilt(), errors.IntegrityError), body
            else:
                assert isinstance(decode_reply(offer_of(SHARD), reply.data), Refused), body


def offer_of(shard: WireShard, chunks_count: int = 1) -> Offer:
    """An offer by the peer that the tests are."""
    return Offer(shard=shard, digest=None, attempt=1, sender="h9", chunks_count=chunks_count)


def offered(peer: Channel, shard: WireShard, chunks_count: int = 1) -> Any:
    """Offer a shard; return the reply."""
    offer = offer_of(shard, chunks_count)
    return decode_reply(offer, peer.request(offer, timeout_s=10).data)


def announce(peer: Channel, digest: bytes) -> ChunkBatch:
    """Announce the only chunk of the shard, of 10 bytes, which the holder lacks."""
    batch = ChunkBatch(shard=SHARD, sender="h9", chunks=(OfferedChunk(0, digest, 10),))
    peer.send(Kind.CALL, 77, batch, deadline_s=10)
    assert decode_lacking(peer.recv(timeout_s=10).data) == ChunksLacking(chunks=(0,))
    return batch


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        pytest.param(Kind.REPLY, b"\x80", id="a reply no process asked for"),
        pytest.param(Kind.HELLO, b"\x80", id="hello again"),
        pytest.param(Kind.CALL, b"\x81\xa1a" + b"\x91" * 100_000, id="deep"),
        pytest.param(Kind.CALL, b"\x81\xa1a\xdd\x00\xe0\x00\x00" + b"\x90" * 0xE00000, id="14 million empty arrays"),
        pytest.param(
            Kind.CALL, b"\x81\xa1a" + b"\xdd\x00\x0f\xff\xff" * 500 + b"\xc0" * (1 << 20), id="lengths in lengths"
        ),
        pytest.param(Kind.CALL, b"\xde\xff\xff", id="a map cut short"),
    ],
)
def test_bombs_in_a_peers_frame_end_its_connection(trained: Trained, kind: Kind, data: bytes) -> None:
    """A body that would unfold to gigabytes is refused while it is small."""
    with trained.peer() as peer:
        peer._sock.setblocking(True)  # type: ignore[union-attr]
        peer._sock.sendall(frame.pack_header(kind, 1, data) + data)  # type: ignore[union-attr]
        peer._sock.setblocking(False)  # type: ignore[union-attr]
        with pytest.raises(errors.PeerUnreachable):
            peer.recv(timeout_s=20)


@pytest.mark.parametrize("bulk_bytes", [0, 11, 1 << 20, frame.BULK_BYTES_MAX])
def test_a_chunk_of_another_size_than_announced_is_not_kept(trained: Trained, bulk_bytes: int) -> None:
    """Empty, longer than it said, longer than a slot: bad, or the end of the connection; no slot is lost by it."""
    with trained.peer() as peer:
        assert offered(peer, SHARD) == Done()
        batch = announce(peer, chunk_digest(bytes(10)))
        with contextlib.suppress(errors.TransportError):
            run = ChunkRun(sizes=(bulk_bytes,))
            peer.send(Kind.CHUNK, 77, run, [memoryview(bytes(bulk_bytes))], deadline_s=10)
            assert decode_reply(batch, peer.recv(timeout_s=10).data) == Done()
            announce(peer, chunk_digest(bytes(10)))


@pytest.mark.parametrize(
    "fields",
    [
        {"nbytes": 1 << 30, "chunk_bytes": 1 << 30},
        {"nbytes": 9, "chunk_bytes": 4096},
        {"nbytes": 10, "chunk_bytes": 1 << 40},
        {"nbytes": 10, "chunk_bytes": 5},
        {"step": 8},
        {"job": "../../x"},
        {"world_size": 0},
    ],
)
def test_a_manifest_that_contradicts_the_chunks_is_not_stored(trained: Trained, fields: dict[str, Any]) -> None:
    """The right digests under other sizes, another step or no name: refused, and the incoming replica is forgotten."""
    digest = chunk_digest(bytes(10))
    row = {"format": 1, "job": "train", "attempt": 1, "step": 1 << 40, "rank": 1, "world_size": 2, "nbytes": 10}
    row |= {"chunk_bytes": 4096, "layout": b"", "digests": digest}
    with trained.peer() as peer:
        assert offered(peer, SHARD) == Done()
        batch = announce(peer, digest)
        peer.send(Kind.CHUNK, 77, ChunkRun(sizes=(10,)), [memoryview(bytes(10))], deadline_s=10)
        assert decode_reply(batch, peer.recv(timeout_s=10).data) == Done()
        seal = Seal(shard=SHARD, sender="h9", manifest=msgpack.packb(list((row | fields).values())))
        with contextlib.suppress(errors.MemstoreError):
            assert decode_reply(seal, peer.request(seal, timeout_s=10).data) != HasCopy()


def test_endless_offers_are_bounded(trained: Trained) -> None:
    """A peer that only ever offers is refused at the limit of unfinished shards; the rest goes with its connection."""
    with trained.peer() as peer:
        refusals = 0
        for step in range(PEER_INCOMING_MAX + 200):
            refusals += isinstance(offered(peer, WireShard("train", 1, (1 << 40) + step, 1), 0), Refused)
    assert refusals == 200


# -- ranks: the same user, but not always the same sanity ------------------------------------------------

HELLO = {
    "k": "rank_hello",
    "nonce": "n",
    "life": 1,
    "pid": 1,
    "job": "other",
    "rank": 0,
    "attempt": 0,
    "held": [],
    "arena": "",
}
HELLOS: list[dict[str, Any]] = [
    {},
    {"k": "rank_hello"},
    {**HELLO, "held": [-1, 2**63]},
    {**HELLO, "held": 5},
    {**HELLO, "rank": "x"},
    {**HELLO, "attempt": float("nan")},
    {**HELLO, "nonce": [1]},
    {**HELLO, "job": {"a": 1}},
    {**HELLO, "extra": 1},
]
PUT = {
    "k": "put_ready",
    "attempt": 1,
    "step": 1,
    "slots": [0],
    "arena": "",
    "sample": {"seed": 1, "digests": bytes(8)},
    "layout": b"",
    "nbytes": 1,
    "world_size": 1,
    "shared_chunks": None,
    "began_s": 0.0,
    "stall_s": 0.0,
}
EVENTS: list[dict[str, Any]] = [
    {}, {"k": None}, {"k": "ask"}, {"k": "ask", "id": 1, "call": 5}, {"k": "unpin", "pin": "x"},
    {"k": "put_ready"}, {**PUT, "step": -1}, {**PUT, "slots": [-1]}, {**PUT, "nbytes": 2**62}, {**PUT, "world_size": 0},
    {**PUT, "stall_s": float("nan")}, {**PUT, "slots": [0, 2**40], "nbytes": 2}, {**PUT, "shared_chunks": 9},
    {**PUT, "layout": 5}, {**PUT, "sample": {"seed": 1}}, {**PUT, "sample": {"seed": "1", "digests": bytes(8)}},
    {"k": "into_checked"}, {"k": "bye"}, {"k": "ask", "id": 1, "call": {"k": "join"}},
    {"k": "ask", "id": 1, "call": {"k": "get", "job": "train", "attempt": 1, "rank": "0", "step": 1, "timeout_s": 1.0}},
    {"k": "ask", "id": 1, "call": {"k": "no such request"}}, {"k": "ask", "id": 1, "call": {"k": "status", "extra": 1}},
]  # fmt: skip


def test_nonsense_on_the_ranks_socket_ends_its_own_link(trained: Trained) -> None:
    """First messages and events of every wrong shape cost the link, never the holder or another link."""
    path = trained.cluster.arena("h0") / "holder.sock"
    for hello in HELLOS:
        with contextlib.closing(connect_unix(path, timeout_s=5)) as link:
            link.send(Kind.EVENT, 0, msgpack.packb(hello), deadline_s=5)
    for event in EVENTS:
        with contextlib.closing(connect_unix(path, timeout_s=5)) as link:
            link.send(Kind.EVENT, 0, msgpack.packb(HELLO), deadline_s=5)
            assert isinstance(decode_greeting(link.recv(timeout_s=5).data), Welcome)
            with contextlib.suppress(errors.TransportError):  # no such process lives, so the link may be ended at once
                link.send(Kind.EVENT, 0, msgpack.packb(event), deadline_s=5)
                link.recv(timeout_s=0.05)


JOIN = Join(
    job="other",
    rank=0,
    world_size=2,
    key=None,
    launcher="x",
    nonce="n",
    pid=1,
    config={},
    fresh=False,
    takeover=False,
    shard=None,
    shards=None,
    limit_s=10.0,
)
NO_JOBS: list[Any] = ["../../x", "", "x" * 300, "naïve", "a\0b", ".hidden", None, 5]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        *((replace(JOIN, job=job), "job") for job in NO_JOBS),
        (replace(JOIN, rank=-1), "rank"),
        (replace(JOIN, rank=2), "outside the world of 2 ranks"),
        (replace(JOIN, world_size=2**60), "over the limit"),
        (ReserveRoom(job="train", attempt=1, rank=0, slots=cast(Any, "many")), "slots"),
        (ReserveRoom(job="train", attempt=1, rank=0, slots=0), "slots"),
        (AskPlan(job="train", lose=cast(Any, [5])), "lose"),
    ],
)
def test_a_call_that_makes_no_sense_is_answered_with_an_error(trained: Trained, request_: RankCall, says: str) -> None:
    """The controller goes on, opens no attempt for a job of that name, and the error names what is wrong."""
    with Tool(trained.cluster.arena("h0")) as tool, pytest.raises(errors.MemstoreError, match=says) as caught:
        tool.ask(request_, timeout_s=10)
    assert not isinstance(caught.value, errors.PeerTimeout)
    assert [job["job"] for job in trained.cluster.status()["jobs"]] == ["train"]


@pytest.mark.parametrize("step", [-1, 2**62, 2**63, True, "1", 1.5, None])
def test_a_step_that_is_none_is_refused_before_anything_is_copied(trained: Trained, step: Any) -> None:
    """Negative, huge, bool and mistyped steps are a StepConflict of put."""
    refused: Callable[..., Any] = trained.ranks[0].fails
    assert refused("put", step=step).error in ("StepConflict", "TypeError")
