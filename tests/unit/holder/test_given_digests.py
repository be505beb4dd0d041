"""Puts whose digests come with the copy: their holder digests nothing, and a false digest is found (R14)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from link_site import WAIT_S, Site, together

import memstore.client.put
import memstore.core.arena.replica_store
from memstore.client.ticket import Ticket
from memstore.core.format.manifest import chunk_digest
from memstore.errors import CommitError
from memstore.shell.native import extension
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
pytestmark = pytest.mark.skipif(not extension.is_there(), reason="the native helper is not built, or is turned off")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Two hosts, each of which holds a copy of the other one's rank."""
    made = Site(tmp_path, ["a", "b"], monkeypatch)
    yield made
    made.close()


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what holders digest when they seal or verify; what comes from a peer is not among it."""
    found: list[int] = []

    def counted(view: memoryview) -> bytes:
        found.append(view.nbytes)
        return chunk_digest(view)

    monkeypatch.setattr(memstore.core.arena.replica_store, "chunk_digest", counted)
    return found


def put(site: Site, step: int) -> list[tuple[Ticket, torch.Tensor]]:
    """Put a step on both ranks, of more bytes than travel in one request."""

    def one(store: Any, seed: int) -> tuple[Ticket, torch.Tensor]:
        wide = torch.rand(300_000, generator=torch.Generator().manual_seed(seed))
        return store.put(step, {"wide": wide, "odd": torch.ones(3)}, timeout_s=WAIT_S), wide

    return together(*[lambda s=store: one(s, step * 10 + s.rank) for store in site.stores])


def commit(site: Site, step: int) -> list[torch.Tensor]:
    """Put a step and wait for its commit."""
    puts = put(site, step)
    for ticket, _ in puts:
        ticket.wait("committed", WAIT_S)
    return [wide for _, wide in puts]


def give_up_and_go_on(site: Site, monkeypatch: pytest.MonkeyPatch, copy: Callable[..., Any]) -> None:
    """Put a step with a copy that goes wrong, which is given up, and one without, which is committed."""
    with monkeypatch.context() as patch:
        patch.setattr(memstore.client.put, "copy_into", copy)
        for ticket, _ in put(site, 2):
            with pytest.raises(CommitError, match="no copy has all chunks of some rank's shard"):
                ticket.wait("committed", WAIT_S)
    commit(site, 3)


def test_a_put_that_brings_its_digests_is_not_digested_by_its_holder(site: Site, digested: list[int]) -> None:
    """It is sealed, copied and read like any other."""
    site.connect()
    puts = commit(site, 1)
    assert not digested
    for store, wide in zip(site.stores, puts, strict=True):
        got = store.get(1, rank=store.rank)
        assert got is not None
        assert torch.equal(got.state["wide"], wide)


def test_without_the_helper_the_holder_digests(
    site: Site, digested: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is no compiler."""
    monkeypatch.setattr(extension, "built", None)
    site.connect()
    puts = commit(site, 1)
    assert len(digested) >= 2 * -(-puts[0].nbytes // CHUNK_BYTES)


def test_a_false_digest_gives_the_step_up_and_the_next_one_commits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of it is ever good, which the hosts find when they send it: no second copy is counted."""
    site.connect()
    commit(site, 1)
    real = memstore.client.put.copy_into

    def spoilt(*args: Any, **kwargs: Any) -> list[bytes]:
        digests = real(*args, **kwargs)
        assert digests is not None
        return [*digests[:-1], bytes(16)]

    give_up_and_go_on(site, monkeypatch, spoilt)


def test_bytes_that_change_between_copy_and_seal_are_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder's own digest came after the change, and would have sealed it as good."""
    site.connect()
    commit(site, 1)
    real = memstore.client.put.copy_into

    def changed(plan: Any, views: list[memoryview], *rest: Any, **kwargs: Any) -> Any:
        digests = real(plan, views, *rest, **kwargs)
        views[0][100] ^= 1
        return digests

    give_up_and_go_on(site, monkeypatch, changed)


@pytest.fixture
def sealed(site: Site) -> Callable[..., list[int]]:
    """Seals one chunk of equal bytes on host a, with the digest of good ones; returns its slots."""

    def seal(step: int, given: bool, fill: int = 7) -> list[int]:
        replicas = site.replicas
        replicas.ensure_free(4)
        slots = replicas.take_slots(1)
        replicas.arena.view(slots[0], CHUNK_BYTES)[:] = bytes([fill]) * CHUNK_BYTES
        stored = replicas.seal_local(
            ShardId("train", 1, step, 0),
            world_size=1,
            layout=b"",
            nbytes=CHUNK_BYTES,
            slots=slots,
            attempt=1,
            given=[chunk_digest(bytes([7]) * CHUNK_BYTES)] if given else None,
        )
        return [number for number in stored.slots if number is not None]

    return seal


def test_a_slot_whose_digest_was_given_is_digested_before_it_stands_in(
    sealed: Callable[..., list[int]], digested: list[int]
) -> None:
    """Fresh bytes are dropped only for a slot that this host has verified itself (R13)."""
    first = sealed(1, given=True)
    assert not digested
    assert sealed(2, given=True) == first
    assert digested == [CHUNK_BYTES]
    assert sealed(3, given=True) == first
    assert digested == [CHUNK_BYTES]


def test_a_slot_that_is_not_what_its_given_digest_says_does_not_stand_in(sealed: Callable[..., list[int]]) -> None:
    """The good bytes of the next put are kept."""
    false = sealed(1, given=True, fill=8)
    assert sealed(2, given=True) != false
