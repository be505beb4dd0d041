"""Work of a pool that is shut down has ended, also what had not begun; a peer that goes ends the pushes to it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from memstore.core.wire.handshake import HolderIdentity
from memstore.core.wire.ids import Endpoint
from memstore.errors import PeerTimeout, PeerUnreachable, TransportError
from memstore.shell.net.pacing import Pacing
from memstore.shell.peer.chunk_frames import Damage
from memstore.shell.peer.client import Peer
from memstore.shell.threads.waits import await_ended

WAIT_S = 30.0


def test_work_that_was_cancelled_has_ended() -> None:
    """`concurrent.futures.wait` would wait for ever: no worker has taken it."""
    go = threading.Event()
    pool = ThreadPoolExecutor(1)
    begun, queued = pool.submit(go.wait, WAIT_S), pool.submit(int)
    pool.shutdown(wait=False, cancel_futures=True)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(await_ended, [queued, begun])
        assert not waits.done()
        go.set()
        waits.result(WAIT_S)
    assert queued.cancelled()
    assert begun.done()


def test_an_error_of_the_work_is_no_error_of_the_wait() -> None:
    """It stays in its future."""
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(int, "x")
        late = pool.submit(lambda: (_ for _ in ()).throw(TimeoutError("of the work")))
        await_ended([failed, late])
    assert isinstance(failed.exception(), ValueError)
    assert isinstance(late.exception(), TimeoutError)


def peer_of_one_stream() -> Peer:
    """Return the client of a host that nothing has to answer for."""
    return Peer(
        "h2", [Endpoint("127.0.0.1", 1)], secret=b"s", store="s", identity=HolderIdentity(host="h1", incarnation=1),
        streams=1, damage=Damage(), pacing=Pacing(0, 0, 4 << 20),
    )  # fmt: skip


def test_a_push_to_a_peer_that_goes_ends() -> None:
    """Batches that wait for a stream are cancelled; their push would keep one of the few threads for ever."""
    peer = peer_of_one_stream()
    is_begun, go = threading.Event(), threading.Event()

    def send(batch: list[int]) -> None:
        is_begun.set()
        go.wait(WAIT_S)

    with ThreadPoolExecutor(1) as threads:
        push = threads.submit(peer.over_streams, [[0], [1], [2]], send)
        assert is_begun.wait(WAIT_S)
        peer.close()
        go.set()
        with pytest.raises(PeerUnreachable, match="host h2 is gone"):
            push.result(WAIT_S)


@pytest.mark.parametrize(("error", "begun"), [(PeerTimeout("silent"), [[0]]), (PeerUnreachable("reset"), [[0], [1]])])
def test_a_silence_is_paid_for_once(error: TransportError, begun: list[list[int]]) -> None:
    """Batches that have not begun would each wait as long for the same peer; after a reset they are sent."""
    done = []

    def fetch(batch: list[int]) -> None:
        done.append(batch)
        if batch == [0]:
            raise error

    peer = peer_of_one_stream()
    with pytest.raises(type(error), match=str(error)):
        peer.over_streams([[0], [1]], fetch)
    peer.close()
    assert done == begun
