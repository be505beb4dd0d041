"""Holders that write increments of durable steps into a folder: what changed of chunks, and what it costs (R31)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from holder_io import ScriptedIo
from hypothesis import given
from hypothesis import strategies as st

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.durable.increments import BLOCK_BYTES, Origins, apply_patch, block_digests, make_patch
from memstore.core.durable.slice_format import SliceHeader, slice_range, slices_count
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, encode_manifest, shard_digest, spec_of
from memstore.core.holder import persist
from memstore.core.holder.holder_io import Stop, Storage
from memstore.core.wire.ids import WireShard, WireStep
from memstore.core.wire.orders import BaseShard, DurablePlace, SlicesOfShard, WriteSlices
from memstore.core.wire.reports import SliceWritten
from memstore.errors import DigestMismatch, IntegrityError
from memstore.shell.durable.codec import Codec
from memstore.shell.durable.directory import DirectoryFiles
from memstore.shell.durable.tier import PartsTier
from memstore.testing.durable_steps import JOB, lineage_of
from recovery.inventory import DurableMarker, ShardId, ShardSpec, SliceRef, StepId

CHUNK = 64 << 10
MIB = 1 << 20


@dataclass(eq=False)
class FolderHost(ScriptedIo):
    """A holder that has the newest step's shard in memory, and a folder."""

    key: str = ""
    tier: PartsTier = field(kw_only=True)
    chunk_bytes: int = CHUNK
    data: dict[str, bytes] = field(default_factory=dict)  # digest of a shard -> its manifest
    held: dict[ShardId, tuple[StoredReplica, bytes]] = field(default_factory=dict)
    markers: dict[int, DurableMarker] = field(default_factory=dict)

    def put(self, step: int, payload: bytes) -> ShardSpec:
        """Have a step in memory."""
        shard, size = ShardId(JOB, 1, step, 0), self.chunk_bytes
        chunks = [payload[at : at + size] for at in range(0, len(payload), size)]
        rows = tuple(Chunk(chunk_digest(chunk), len(chunk)) for chunk in chunks)
        data = encode_manifest(Manifest(shard, 1, b"", len(payload), size, rows))
        spec = spec_of(Manifest(shard, 1, b"", len(payload), size, rows), shard_digest(data))
        stored = StoredReplica(shard, spec, tuple(row.digest for row in rows), [0] * len(rows))
        self.data[spec.digest], self.held[shard] = data, (stored, payload)
        return spec

    def write(self, step: int, payload: bytes, base: DurableMarker | None = None, bases_max: int = 8) -> DurableMarker:
        """Write a step as the controller orders it, and its marker; return that."""
        spec, shard = self.put(step, payload), WireShard(JOB, 1, step, 0)
        older = None
        if base is not None:
            tags = tuple(use.tag for use in base.uses.get(0, ()))
            older = BaseShard(WireStep.of(base.step), base.specs[0].digest, tags)
        numbers = tuple(range(slices_count(spec)))
        part = SlicesOfShard(shard, spec.digest, numbers, older, bases_max)
        place = DurablePlace(url="/d", compression=None, key_file=None, bytes_per_s=None)
        order = WriteSlices(job=JOB, durable=place, step=WireStep(1, step), parts=(part,), key="")
        for piece in persist.slices(self.state, order):
            self.play(persist.write(self, self.state, piece))
        reports = [cast(SliceWritten, report) for report in self.reports]
        self.reports.clear()
        assert [report.problem for report in reports] == [None] * len(numbers)
        marker = DurableMarker(StepId(1, step), 1, {0: spec}, "", {0: tuple(report.use.uses[0] for report in reports)})
        self.tier.write_marker(JOB, marker, lineage_of(1))
        return marker

    def read(self, marker: DurableMarker) -> bytes:
        """Return a step's bytes, each chunk digested as a restore does."""
        spec, out = marker.specs[0], bytearray(marker.specs[0].nbytes)
        shard = ShardId(JOB, 1, marker.step.step, 0)
        stored, tier = self.held[shard][0], self._under([use.tag for use in marker.uses[0]])
        for index in range(spec.chunks_count):
            start = index * spec.chunk_bytes
            view = memoryview(out)[start : start + spec.chunk_nbytes(index)]
            tier.read_chunk_into(shard, spec, index, view)
            if chunk_digest(view) != stored.digests[index]:
                raise DigestMismatch(f"chunk {index}")
        return bytes(out)

    def _under(self, tags: Sequence[str]) -> PartsTier:
        return PartsTier(self.tier.files, self.tier.codec, self.tier.read_under, tags)

    def nbytes(self, step: int) -> int:
        """Return what a step takes in the folder."""
        return sum(path.stat().st_size for path in Path(self.tier.files.where, JOB, "1", str(step)).iterdir())

    def pin(self, shard: ShardId, digest: str) -> tuple[StoredReplica, int] | None:
        return self.held[shard][0], 1

    def unpin(self, stored: StoredReplica, pin: int) -> None:
        """Do nothing: nothing else wants the slots."""

    def manifest(self, stored: StoredReplica) -> bytes:
        return self.data[stored.spec.digest]

    async def copy_slice(self, stored: StoredReplica, number: int) -> tuple[list[bytes], int | None]:
        payload, size = self.held[stored.shard][1], self.chunk_bytes
        return [payload[index * size : (index + 1) * size] for index in slice_range(stored.spec, number)], None

    async def open_durable(self, place: DurablePlace) -> Storage:
        return self.tier

    async def read_durable_manifest(self, place: DurablePlace, shard: ShardId, spec: ShardSpec) -> bytes:
        return self._under(place.tags).read_manifest(shard, spec)

    async def read_slice_headers(
        self, storage: Storage, shard: ShardId, spec: ShardSpec, number: int, ref: SliceRef
    ) -> dict[SliceRef, SliceHeader]:
        return self.tier.read_headers(shard, spec, number, ref)

    async def write_slice(
        self,
        storage: Storage,
        shard: ShardId,
        spec: ShardSpec,
        number: int,
        manifest: bytes,
        chunks: Sequence[bytes],
        stop: Stop,
        origins: Origins = (),
    ) -> bool:
        wrote = self.tier.write_slice(shard, spec, number, manifest, chunks, should_stop=lambda: False, origins=origins)
        return wrote is not None


def trained(payload: bytes, share: float, seed: int, row_bytes: int = 512) -> bytes:
    """Return the payload with other bytes in some of its rows, which lie scattered."""
    made, rng = bytearray(payload), random.Random(seed)
    for row in rng.sample(range(len(payload) // row_bytes), max(1, int(share * len(payload) / row_bytes))):
        made[row * row_bytes : (row + 1) * row_bytes] = rng.randbytes(row_bytes)
    return bytes(made)


@pytest.fixture(params=[Codec(), Codec(is_compressing=True)], ids=["plain", "packed"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> FolderHost:
    return FolderHost(tier=PartsTier(DirectoryFiles(tmp_path), request.param))


def test_scattered_rows_of_a_table_cost_their_blocks(tmp_path: Path) -> None:
    """0.1 % of the rows of 512 bytes change, in every 4 MiB chunk some: a step takes less than 2 % of the table.

    As a table of 1 GiB does: rows and chunks are as large, and there are as many of each for the other.
    """
    host = FolderHost(tier=PartsTier(DirectoryFiles(tmp_path)), chunk_bytes=4 * MIB)
    table = random.Random(0).randbytes(64 * MIB)
    markers = [host.write(1, table)]
    assert host.nbytes(1) > len(table)
    for step in range(2, 5):
        table = trained(table, 0.001, step)
        markers.append(host.write(step, table, markers[-1]))
        assert 0 < host.nbytes(step) < 0.02 * len(table)
    assert host.read(markers[-1]) == table


def test_every_step_of_a_chain_of_patches_comes_back(host: FolderHost) -> None:
    """Rows change here and there, and now and then many; more older steps than the bound are never read."""
    payload = random.Random(1).randbytes(40 * CHUNK - 777)
    steps = {1: (host.write(1, payload), payload)}
    for step in range(2, 13):
        payload = trained(payload, 0.2 if step == 6 else 0.0005, step)
        steps[step] = host.write(step, payload, steps[step - 1][0], bases_max=4), payload
        assert all(len(use.bases) <= 4 for use in steps[step][0].uses[0])
    assert host.nbytes(6) > 0.9 * len(payload)  # half of every chunk and more: it is written as it is
    assert host.nbytes(3) < 0.1 * len(payload)
    for marker, was in steps.values():
        assert host.read(marker) == was
        assert host.tier.lacks(JOB, marker.step) == ""


def test_a_patch_is_read_under_a_key(tmp_path: Path) -> None:
    """It is a piece of its slice like any other: bound to it, and unreadable without the key."""
    tier = PartsTier(DirectoryFiles(tmp_path), Codec(key=bytes(32)))
    host = FolderHost(tier=tier)
    payload = random.Random(2).randbytes(4 * CHUNK)
    stored = [payload, trained(payload, 0.002, 2)]
    shards = [ShardId(JOB, 1, step, 0) for step in (1, 2)]
    specs = [host.put(step, data) for step, data in enumerate(stored, 1)]
    patch = make_patch(stored[1][:CHUNK], block_digests(stored[1][:CHUNK]), block_digests(payload[:CHUNK]))
    ref = SliceRef(StepId(1, 1), specs[0].digest)
    pieces = [stored[0][:CHUNK], stored[0][CHUNK : 2 * CHUNK]]
    never = {"should_stop": lambda: False}
    tier.write_slice(shards[0], specs[0], 0, host.data[specs[0].digest], pieces, **never)
    tier.write_slice(shards[1], specs[1], 0, host.data[specs[1].digest], [patch, b""], origins=(ref, ref), **never)
    [name] = tier.files.names(JOB, StepId(1, 2))
    reader = PartsTier(tier.files, tier.codec, tags=[name.rpartition("-")[2]])
    out = bytearray(CHUNK)
    reader.read_chunk_into(shards[1], specs[1], 0, memoryview(out))
    assert out == stored[1][:CHUNK] != payload[:CHUNK]


def test_a_holder_that_did_not_write_the_base_writes_whole_chunks(host: FolderHost) -> None:
    """It names equal chunks all the same, and from then on it knows the blocks."""
    payload = random.Random(3).randbytes(16 * CHUNK)
    first = host.write(1, payload)
    other = FolderHost(tier=host.tier, data=host.data, held=host.held)
    payload = payload[: 8 * CHUNK] + trained(payload[8 * CHUNK :], 0.05, 3)
    second = other.write(2, payload, first)
    assert 8 * CHUNK < other.nbytes(2) < 9 * CHUNK
    third = other.write(3, trained(payload, 0.0005, 4), second)
    assert other.nbytes(3) < CHUNK
    assert other.read(second) == payload
    assert other.read(third) == trained(payload, 0.0005, 4)


def test_without_a_bound_on_older_steps_no_block_is_remembered(host: FolderHost) -> None:
    """`durable_bases=0` costs no memory; nor does a job's older step, once a newer one is written."""
    payload = random.Random(4).randbytes(8 * CHUNK)
    first = host.write(1, payload, bases_max=0)
    assert (first.uses[0][0].tag, host.state.blocks) == ("", {})
    for step in range(2, 6):
        first = host.write(step, trained(payload, 0.01, step), first)
    assert {key[0].step for key in host.state.blocks} == {4, 5}
    host.state.keep_blocks(JOB, ())
    assert host.state.blocks == {}


def test_a_patch_over_other_bytes_is_found_by_the_chunk(host: FolderHost) -> None:
    """A person put another file in the base's place: the blocks fit, and the chunk's own digest says no."""
    payload = random.Random(5).randbytes(4 * CHUNK)
    first = host.write(1, payload)
    second = host.write(2, trained(payload, 0.002, 5), first)
    assert host.read(second)
    for path in Path(host.tier.files.where, JOB, "1", "1").glob("rank-0.*"):
        data = bytearray(path.read_bytes())
        data[-CHUNK + 7 * BLOCK_BYTES] ^= 1
        path.write_bytes(data)
    with pytest.raises(DigestMismatch):
        host.read(second)


@given(st.data())
def test_a_patch_makes_the_old_chunk_the_new_one(data: st.DataObject) -> None:
    """Whatever changed, also in a last block that is short; and no other patch fits."""
    was = data.draw(st.binary(min_size=1, max_size=5 * BLOCK_BYTES + 9))
    now: Any = bytearray(was)
    for at in data.draw(st.lists(st.integers(0, len(was) - 1), max_size=4)):
        now[at] ^= 1
    patch = make_patch(bytes(now), block_digests(now), block_digests(was))
    view = bytearray(was)
    apply_patch(memoryview(view), patch)
    assert view == now
    for bad in (patch[:-1], patch + b"x", bytes([patch[0] | 0xC0]) + patch[1:]):
        with pytest.raises(IntegrityError, match="does not fit"):
            apply_patch(memoryview(bytearray(was)), bad)
