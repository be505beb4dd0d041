"""Increments of durable steps: what is equal in an older step is named, not written, and never read wrongly (R31)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.core.durable.increments import Base, chunk_path, needed_names, plan_origins
from memstore.core.durable.paths import MARKER
from memstore.core.durable.slice_format import SliceHeader, slice_chunks, slice_range, slice_tag, slices_count
from memstore.core.format.manifest import chunk_digest
from memstore.errors import IntegrityError
from memstore.shell.durable.codec import Codec
from memstore.shell.durable.directory import DirectoryFiles
from memstore.shell.durable.tier import PartsTier
from memstore.testing.durable_steps import (
    CHUNK,
    JOB,
    chunks_of,
    files_under,
    lineage_of,
    manifest_of,
    shard_of,
    spec_of,
)
from memstore.testing.simulator.world.memory import DurableStorage
from recovery.inventory import DurableMarker, ShardId, ShardSpec, SliceRef, SliceUse, StepId

CHUNKS = 32
NBYTES = CHUNKS * CHUNK - 5


@dataclass
class Chain:
    """Steps of one rank on a tier, each written as a holder writes it: what its base has is named."""

    tier: PartsTier
    bases_max: int = 8
    payloads: dict[int, bytes] = field(default_factory=dict)
    markers: dict[int, DurableMarker] = field(default_factory=dict)

    def write(self, step: int, payload: bytes, base: int | None = None, *, until: int | None = None) -> None:
        """Write a step with its marker; `until` ends the write before that slice."""
        shard = shard_of(step)
        spec = spec_of(shard, len(payload), 1)
        uses = [self._write_slice(shard, spec, n, payload, base) for n in range(slices_count(spec))[:until]]
        if until is None:
            marker = DurableMarker(StepId(1, step), 1, {0: spec}, self.tier.key, {0: tuple(uses)})
            self.tier.write_marker(JOB, marker, lineage_of(1))
            self.payloads[step], self.markers[step] = payload, marker

    def _write_slice(self, shard: ShardId, spec: ShardSpec, number: int, payload: bytes, base: int | None) -> SliceUse:
        chunks, origins, bases = chunks_of(payload), (), ()
        if base is not None:
            older, digests = self.markers[base], [chunk_digest(chunk) for chunk in chunks_of(self.payloads[base])]
            ref = SliceRef(older.step, older.specs[0].digest, older.use(0, number).tag)
            found = Base(ref, digests, self.tier.read_headers(shard, spec, number, ref))
            origins, bases = plan_origins(spec, number, [chunk_digest(c) for c in chunks], found, self.bases_max, {})
        own = [b"" if origins and origins[at] else bytes(chunks[i]) for at, i in enumerate(slice_range(spec, number))]
        wrote = self.tier.write_slice(
            shard, spec, number, manifest_of(shard), own, should_stop=lambda: False, origins=origins
        )
        assert wrote is not None
        return SliceUse(slice_tag(origins), bases)

    def read(self, step: int) -> bytes:
        """Return a step's bytes, as a reader that knows its marker gets them."""
        marker, shard = self.markers[step], shard_of(step)
        tags = [use.tag for use in marker.uses[0]]
        tier = PartsTier(self.tier.files, self.tier.codec, self.tier.read_under, tags)
        spec, out = marker.specs[0], bytearray(marker.specs[0].nbytes)
        for index in range(spec.chunks_count):
            view = memoryview(out)[index * CHUNK : index * CHUNK + spec.chunk_nbytes(index)]
            tier.read_chunk_into(shard, spec, index, view)
        assert tier.read_manifest(shard, spec) == manifest_of(shard)
        return bytes(out)

    def remove(self, step: int) -> None:
        """Remove a step as retention does."""
        self.tier.remove_step(JOB, StepId(1, step))
        del self.payloads[step], self.markers[step]

    def nbytes(self, step: int) -> int:
        """Return how much a step takes in a folder."""
        return sum(path.stat().st_size for path in Path(self.tier.files.where, JOB, "1", str(step)).iterdir())


def changed(payload: bytes, *indices: int, seed: int = 0) -> bytes:
    """Return the payload with other bytes in some chunks."""
    made = bytearray(payload)
    for index in indices:
        end = min(len(made), (index + 1) * CHUNK)
        made[index * CHUNK : end] = random.Random(f"{seed} {index}").randbytes(end - index * CHUNK)
    return bytes(made)


FIRST = changed(bytes(NBYTES), *range(CHUNKS))


@pytest.fixture(params=[Codec(), Codec(is_compressing=True), Codec(key=bytes(32))], ids=["plain", "packed", "sealed"])
def chain(request: pytest.FixtureRequest, tmp_path: Path) -> Chain:
    return Chain(PartsTier(DirectoryFiles(tmp_path), request.param))


def test_a_chain_restores_every_step_and_writes_what_changed(chain: Chain) -> None:
    """One of 32 chunks changes from step to step: each is its size and the names of the others, and all come back."""
    payload = FIRST
    chain.write(1, payload)
    for step in range(2, 6):
        payload = changed(payload, 3 * step, seed=step)
        chain.write(step, payload, base=step - 1)
        assert CHUNK < chain.nbytes(step) < 2.5 * CHUNK + 2000
    assert {step: chain.read(step) for step in range(1, 6)} == chain.payloads
    assert chain.tier.lacks(JOB, StepId(1, 5)) == ""


def test_an_unchanged_step_writes_no_chunk_and_names_none_but_the_oldest(chain: Chain) -> None:
    """However long the chain is, a reader opens two slices: so a frozen layer is written once."""
    chain.write(1, FIRST)
    for step in range(2, 14):
        chain.write(step, FIRST, base=step - 1)
    assert {ref.step.step for use in chain.markers[13].uses[0] for ref in use.bases} == {1}
    assert chain.nbytes(13) < 4000
    assert chain.read(13) == FIRST


def test_a_step_with_nothing_equal_is_whole(chain: Chain) -> None:
    """It has the name that it would have without a base, and needs none."""
    chain.write(1, FIRST)
    chain.write(2, changed(FIRST, *range(CHUNKS), seed=2), base=1)
    assert set(chain.markers[2].uses[0]) == {SliceUse()}
    chain.remove(1)
    assert chain.read(2) == chain.payloads[2]


def test_a_base_that_was_removed_by_hand_is_refused_by_name(chain: Chain) -> None:
    """The reader, the look and the next marker name the file and the remedy; what does not need it still reads."""
    chain.write(1, FIRST)
    chain.write(2, changed(FIRST, 0, seed=2), base=1)
    [name] = {path for path in files_under(chain.tier.files.where) if "/1/1/rank-0.1." in f"/{path}"}
    Path(chain.tier.files.where, name).unlink()
    with pytest.raises(IntegrityError, match=r"reads step 1 \(attempt 1\): .*rank-0\.1\..* is gone.*put that step's"):
        chain.read(2)
    assert "rank-0.1." in chain.tier.lacks(JOB, StepId(1, 2))
    with pytest.raises(IntegrityError, match=r"rank-0\.1\."):
        chain.write(3, FIRST, base=2)


def test_a_slice_that_lost_what_it_names_cannot_be_marked(chain: Chain) -> None:
    """The slices were written, and then the base went: there is no marker, and the words say what follows."""
    chain.write(1, FIRST)
    kept = chain.markers[1]
    chain.write(2, changed(FIRST, 0, seed=2), base=1)
    chain.tier.files.remove(JOB, StepId(1, 2), [MARKER])
    chain.tier.files.remove(JOB, kept.step, chain.tier.files.names(JOB, kept.step))
    with pytest.raises(
        IntegrityError, match=r"reads 16 slices of step 1 .* are gone, .*the next write of a step is whole"
    ):
        chain.tier.write_marker(JOB, chain.markers[2], lineage_of(1))


def test_retention_and_the_sweep_keep_what_a_marker_needs_and_nothing_more(chain: Chain) -> None:
    """Step 1 loses its marker and the slices that only it has; they go with the last step that needs them."""
    chain.write(1, FIRST)
    chain.write(2, changed(FIRST, *range(6), seed=2), base=1)  # all chunks of the first three slices
    chain.remove(1)
    left = chain.tier.files.names(JOB, StepId(1, 1))
    assert left == needed_names([chain.markers[2]])[StepId(1, 1)]
    assert len(left) == slices_count(chain.markers[2].specs[0]) - 3
    chain.write(3, changed(FIRST, 31, seed=3), until=2)  # a writer was killed half-way
    assert chain.tier.sweep(JOB, {StepId(1, 4)}) == (StepId(1, 3),)
    assert chain.read(2) == chain.payloads[2]
    chain.write(4, changed(FIRST, *range(CHUNKS), seed=4), base=2)
    chain.remove(2)
    assert chain.tier.sweep(JOB, {StepId(1, 4)}) == (StepId(1, 1),)
    assert {path.split("/")[2] for path in files_under(chain.tier.files.where)} == {"4"}


def test_a_damaged_marker_keeps_what_it_may_need(chain: Chain) -> None:
    """What it names cannot be read, so nothing that is older goes but its marker."""
    chain.write(1, FIRST)
    chain.write(2, FIRST, base=1)
    Path(chain.tier.files.where, JOB, "1", "2", MARKER).write_bytes(b"torn")
    slices = chain.tier.files.names(JOB, StepId(1, 1)) - {MARKER}
    with pytest.raises(IntegrityError, match="torn or altered"):
        chain.tier.remove_step(JOB, StepId(1, 1))
    assert chain.tier.files.names(JOB, StepId(1, 1)) == slices


def test_two_plans_of_one_slice_never_meet(chain: Chain) -> None:
    """A try with a base, abandoned, and one without: the marker's slices are read, whatever else lies there."""
    chain.write(1, FIRST)
    chain.write(2, changed(FIRST, 0, seed=2), base=1, until=3)
    chain.write(2, changed(FIRST, 0, seed=2))
    chain.remove(1)
    assert chain.read(2) == chain.payloads[2]


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sets(st.integers(0, CHUNKS - 1), max_size=6), st.integers(0, 3)),
        st.tuples(st.just("abandon"), st.sets(st.integers(0, CHUNKS - 1), max_size=6), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.just(set()), st.integers(0, 5)),
        st.tuples(st.just("sweep"), st.just(set()), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(ops=OPS, bases_max=st.integers(0, 4))
def test_no_kept_marker_ever_needs_a_removed_slice(ops: list[tuple[str, set[int], int]], bases_max: int) -> None:
    """In any order of writes on any base, ends of writes, removals and sweeps every marked step reads as it was put."""
    storage = DurableStorage()
    chain = Chain(storage.tier(""), bases_max)
    for step, (kind, indices, pick) in enumerate(ops, 1):
        kept = sorted(chain.payloads)
        older = kept[-1 - pick % len(kept)] if kept else None
        payload = changed(chain.payloads[older] if older else FIRST, *indices, seed=step)
        if kind in ("write", "abandon"):
            chain.write(step, payload, older if bases_max else None, until=pick if kind == "abandon" else None)
        elif kind == "remove" and older is not None:
            chain.remove(older)
        elif kind == "sweep" and kept:
            chain.tier.sweep(JOB, {StepId(1, kept[-1])})
        assert not storage.lost(JOB)
        for marker in chain.markers.values():
            assert all(len(use.bases) <= bases_max for use in marker.uses[0])
    assert {step: chain.read(step) for step in chain.payloads} == chain.payloads


# -- planning -----------------------------------------------------------------------------------------

SPEC = ShardSpec("0" * 32, 8 * CHUNK, CHUNK, 8, 1)
A, B, C = (SliceRef(StepId(1, step), f"{step:032x}") for step in (1, 2, 3))


def header_of(*origins: SliceRef | None) -> SliceHeader:
    """Make the header of a slice of so many chunks."""
    sizes = tuple(CHUNK if ref is None else 0 for ref in origins)
    return SliceHeader(1, SPEC, 0, sizes, (False,) * len(sizes), origins=origins if any(origins) else ())


def test_chunks_of_slices_that_are_mostly_out_of_use_are_written_again() -> None:
    """So that what is kept of older slices is at most twice what is read of them."""
    spec = SPEC._replace(nbytes=128 * CHUNK, chunks_count=128)
    assert slice_chunks(spec) == 8
    sizes = (CHUNK,) * 8
    base = Base(A, [b"a"] * 128, {A: SliceHeader(1, spec, 0, sizes, (False,) * 8)})
    for equal_count, named in ((4, 4), (3, 0)):
        digests = [b"a" if index < 8 + equal_count else b"b" for index in range(128)]
        origins, bases = plan_origins(spec, 1, digests, base, 8, {})
        assert (origins.count(A), bases) == (named, (A,) if named else ())


def test_of_too_many_slices_those_with_the_least_go() -> None:
    """The bound holds for the whole slice; what goes is written again."""
    origins = (None, A)
    base = Base(B, [b"x"] * 8, {A: header_of(None, None), B: header_of(*origins)})
    assert slice_range(SPEC, 1) == range(2, 4)
    digests = [b"x"] * 8
    assert plan_origins(SPEC, 1, digests, base, 2, {}) == ((B, A), (A, B))
    assert plan_origins(SPEC, 1, digests, base, 1, {}) == ((B, None), (B,))
    assert plan_origins(SPEC, 1, digests, base, 0, {}) == ((None, None), ())


def test_a_slice_that_names_a_newer_one_is_refused() -> None:
    """Such a chain might have no end."""
    headers = {B: header_of(C, None), C: header_of(B, None)}
    with pytest.raises(IntegrityError, match="reads step 3, which is not older"):
        list(chunk_path(headers, B, 2))
