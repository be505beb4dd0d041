"""How a shard's chunks are cut into requests and frames."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from memstore.core.network.send_gate import BATCH_CHUNKS_MAX, batches
from memstore.shell.peer.chunk_frames import RUN_BYTES, runs


@given(chunks=st.lists(st.integers(0, 10_000), unique=True, max_size=400), streams=st.integers(1, 8))
def test_every_chunk_is_asked_for_once_in_order(chunks: list[int], streams: int) -> None:
    """Nothing is left out or doubled, and no request is longer than it may be."""
    cut = list(batches(chunks, streams))
    assert list(itertools.chain.from_iterable(cut)) == chunks
    assert all(0 < len(batch) <= BATCH_CHUNKS_MAX for batch in cut)


@given(count=st.integers(1, 400), streams=st.integers(1, 8))
def test_all_streams_have_work_from_the_start(count: int, streams: int) -> None:
    """A small shard is cut so that no stream is idle if there are chunks for it, or nearly."""
    cut = list(batches(range(count), streams))
    assert len(cut) >= min(streams, -(-count // -(-count // streams)))


@given(sizes=st.lists(st.integers(1, 1 << 26), max_size=60))
def test_frames_hold_as_many_chunks_as_fit(sizes: list[int]) -> None:
    """In order, at least one each, and never two where the next would have fitted."""
    cut = [sizes[part] for part in runs(sizes)]
    assert list(itertools.chain.from_iterable(cut)) == sizes
    assert all(sum(run) <= RUN_BYTES or len(run) == 1 for run in cut)
    assert all(sum(run) + after[0] > RUN_BYTES for run, after in itertools.pairwise(cut))
