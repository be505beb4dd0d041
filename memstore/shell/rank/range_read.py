"""Reads of ranges of any rank's shard, without bringing the whole shard here (R7, R27)."""

from __future__ import annotations

from collections.abc import Iterable

from memstore.core.wire.calls import ReadRanges
from memstore.core.wire.orders import ChunkRange
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.shard_read import ShardRead

Range = tuple[int, int]  # first byte of the stream, nbytes


def chunk_runs(ranges: Iterable[Range], chunk_bytes: int) -> list[list[int]]:
    """Return the chunks that ranges touch as [first, count] runs.

    >>> chunk_runs([(0, 1), (5, 4), (40, 0)], 4)
    [[0, 3]]
    """
    spans = sorted((start // chunk_bytes, (start + size - 1) // chunk_bytes) for start, size in ranges if size)
    runs: list[list[int]] = []
    for first, last in spans:  # never chunk by chunk: the ranges may come from hostile metadata
        end = sum(runs[-1]) if runs else -1
        if first > end:
            runs.append([first, last + 1 - first])
        else:
            runs[-1][1] = max(end, last + 1) - runs[-1][0]
    return runs


class ShardRanges:
    """Reads of one job through one link; `attempt` chooses among steps of one number, None leaves it to the lineage."""

    def __init__(self, link: HolderLink, job: str, timeout_s: float = 600.0, attempt: int | None = None) -> None:
        self.link, self.job, self.timeout_s, self.attempt = link, job, timeout_s, attempt

    def ask(
        self, step: int | None, rank: int, ranges: Iterable[Range] = (), chunk_bytes: int = 1, *,
        attempt: int | None = None,
    ) -> ShardRead:  # fmt: skip
        """Begin to bring ranges of a shard of `chunk_bytes` here; no ranges: its manifest.

        `attempt` names who put the step, where several lineages have one of that number; None: the one of all reads.
        """
        attempt = self.attempt if attempt is None else attempt
        chunks = tuple(ChunkRange(first, count) for first, count in chunk_runs(ranges, chunk_bytes))
        request = ReadRanges(job=self.job, step=step, of_attempt=attempt, rank=rank, chunks=chunks)
        return ShardRead(self.link, request, self.timeout_s)
