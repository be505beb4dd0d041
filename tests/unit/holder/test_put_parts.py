"""A put on the wire before it is submitted: parts that are pushed while the rank copies the rest (R11, R13)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from link_site import WAIT_S, Site, break_link, together

from memstore.client.pending_put import PendingPut
from memstore.client.store import Store
from memstore.client.ticket import Ticket
from memstore.shell.native import copy_loops, extension
from memstore.shell.tensors import slot_stream
from memstore.testing.clusters.processes import wait_for

CHUNK_BYTES = 64 << 10
PART_CHUNKS = 4
CHUNKS = 19
pytestmark = pytest.mark.skipif(not extension.is_there(), reason="the native helper is not built, or is turned off")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Two hosts, each of which holds a copy of the other one's rank; puts are passed on in parts of 4 chunks."""
    monkeypatch.setattr(slot_stream, "PART_BYTES", PART_CHUNKS * CHUNK_BYTES)
    monkeypatch.setattr(slot_stream, "THREAD_BYTES", PART_CHUNKS * CHUNK_BYTES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    made = Site(tmp_path, ["a", "b"], monkeypatch)
    yield made
    made.close()


class Gate:
    """Rank 0's copies, which stop before their third part until the test lets them go on, or fails them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._parts = 0
        self._real = copy_loops.put_chunks
        monkeypatch.setattr(copy_loops, "put_chunks", self._put_chunks)

    def put(self, store: Store, step: int, *, is_held: bool) -> tuple[Ticket, torch.Tensor]:
        """Put a step of 19 chunks."""
        if is_held:
            self._thread, self._parts = threading.current_thread(), 0
        wide = torch.rand(
            CHUNKS * CHUNK_BYTES // 4 - 20, generator=torch.Generator().manual_seed(step * 2 + store.rank)
        )
        return store.put(step, {"wide": wide}, timeout_s=WAIT_S), wide

    def _put_chunks(self, *given: Any, **how: Any) -> list[bytes]:
        if threading.current_thread() is self._thread:
            self._parts += 1
            if self._parts == 3:
                self.is_there.set()
                assert self.may_go_on.wait(WAIT_S)
                if self.error is not None:
                    raise self.error
        return self._real(*given, **how)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Before any copy."""
    return Gate(monkeypatch)


def put_all(site: Site, gate: Gate, step: int) -> None:
    """Put a step on both ranks and wait for its commit."""
    for ticket, _ in together(*[lambda s=store: gate.put(s, step, is_held=False) for store in site.stores]):
        ticket.wait("committed", WAIT_S)


def received_of_rank_0(site: Site) -> int:
    """The bytes that host b has of host a's rank."""
    return site.holders["b"].peer_server.received_bytes


def test_a_peer_has_the_first_parts_while_the_rank_still_copies(site: Site, gate: Gate) -> None:
    """The bytes are there before put returns; the copy is sealed only after the put is submitted."""
    site.connect()
    put_all(site, gate, 1)
    before = received_of_rank_0(site)
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(gate.put, site.stores[0], 2, is_held=True)
        assert gate.is_there.wait(WAIT_S)
        parts_bytes = 2 * PART_CHUNKS * CHUNK_BYTES
        wait_for(lambda: received_of_rank_0(site) - before == parts_bytes, "the first two parts")
        assert not held.done()
        other, _ = gate.put(site.stores[1], 2, is_held=False)
        assert not any(shard.step == 2 and shard.rank == 0 for shard, _ in site.holders["b"].replicas.index.shards)
        gate.may_go_on.set()
        ticket, wide = held.result(WAIT_S)
    ticket.wait("committed", WAIT_S)
    other.wait("committed", WAIT_S)
    assert received_of_rank_0(site) - before == CHUNKS * CHUNK_BYTES - 80  # each byte once
    copies = {shard: stored for (shard, _), stored in site.holders["b"].replicas.index.shards.items()}
    theirs = next(stored for shard, stored in copies.items() if (shard.step, shard.rank) == (2, 0))
    assert site.holders["b"].replicas.verify(theirs) == []
    got = site.stores[0].get(2, rank=0)
    assert got is not None
    assert torch.equal(got.state["wide"], wide)


def test_a_copy_that_needs_all_cores_is_sent_afterwards(
    site: Site, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder would take turns with the copy, and training would wait for both."""
    site.connect()
    put_all(site, gate, 1)
    streams = site.config.streams
    passed = []
    real = PendingPut.pass_part

    def pass_part(self: PendingPut, *given: Any) -> None:
        passed.append(self.step)
        real(self, *given)

    monkeypatch.setattr(PendingPut, "pass_part", pass_part)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(streams))  # the copy has one thread
    put_all(site, gate, 2)
    assert not passed
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(streams + 1))
    put_all(site, gate, 3)
    assert passed == [3] * 4 * len(site.stores)


def test_a_put_that_fails_in_its_copy_leaves_nothing_at_the_peer(site: Site, gate: Gate) -> None:
    """Its pushes end, the peer has its slots back, and the next step commits."""
    site.connect()
    put_all(site, gate, 1)
    gate.error = MemoryError("no page")
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(gate.put, site.stores[0], 2, is_held=True)
        assert gate.is_there.wait(WAIT_S)
        wait_for(lambda: site.holders["b"].replicas.index.incoming, "the copy to begin")
        gate.may_go_on.set()
        with pytest.raises(MemoryError, match="no page"):
            held.result(WAIT_S)
    wait_for(lambda: not site.holders["b"].replicas.index.incoming, "the peer to give the copy up")
    assert not site.holders["a"].state.puts.parts
    put_all(site, gate, 3)
    assert site.holders["b"].peer_server.damage.stats()["digest_errors"] == 0


def test_a_link_that_breaks_in_the_copy_costs_no_put(site: Site, gate: Gate) -> None:
    """The rest is pushed with the submission, on the link that came back."""
    site.connect()
    put_all(site, gate, 1)
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(gate.put, site.stores[0], 2, is_held=True)
        assert gate.is_there.wait(WAIT_S)
        break_link(site.stores[0])
        other, _ = gate.put(site.stores[1], 2, is_held=False)
        gate.may_go_on.set()
        ticket, _ = held.result(WAIT_S)
    assert not ticket.wait("committed", WAIT_S).degraded
    other.wait("committed", WAIT_S)
