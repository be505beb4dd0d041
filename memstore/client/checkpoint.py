"""What a get returns, and the last check of its bytes: shared by Store and Reader (R7, R26)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from memstore.client.restore import OpenShard
from memstore.client.shared_shard import check_shard, load_shared_shard, reader_of
from memstore.core.cluster.text import lost_text, plural
from memstore.core.format.shared_layout import SharedShardLayout
from memstore.core.wire.calls import Get
from memstore.core.wire.replies import ShardPlaced, StepList
from memstore.errors import ManifestMismatch
from memstore.shell.codec.interpreter import copying
from memstore.shell.rank.shard_read import ShardRead

log = logging.getLogger("memstore")
PATHS_SHOWN = 10
DCP_KEY = "memstore.dcp"  # in the tree of a shard that DCP's planner laid out: its bytes are no state


@dataclass(frozen=True)
class StepInfo:
    """One step the store knows, for people."""

    attempt: int
    step: int
    committed: bool
    degraded: str  # the redundancy it lacks; "" if none
    durable: bool
    copies: int  # of the shard that has fewest
    nbytes: int  # of all ranks, one copy
    in_lineage: bool
    retired: str  # why it is not restored; "" if it may be
    pins: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """The result of a get on this rank; from `steps_lost` to `seconds_by_phase` the fields are of the whole job.

    `steps_lost` is how many steps are to be trained again, at least: from the newest step known to be trained to the
    one restored. Known are the steps that a rank put, skipped, or named in should_put() until a second before its end.
    A job that puts every 10th step without should_put() may have trained up to 9 more.
    """

    step: int
    attempt: int
    state: Any
    nbytes: int  # of the rank's own shard
    source: str  # where the bytes came from: local, peer, mixed, durable
    source_reason: str  # why this step, and why nothing newer
    steps_lost: int
    ranks_moved: tuple[int, ...] = ()  # ranks on other hosts than their copies (R27)
    moved_bytes: int = 0  # its cost: bytes fetched for these ranks from other hosts
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    rank_state: Any = None  # what this rank put as rank_state=; None where the step has another world size
    not_filled: tuple[str, ...] = ()  # paths whose values no object of the caller has now, only `state` or `rank_state`

    def __repr__(self) -> str:
        """Return a line without the state, which may be gigabytes of numbers."""
        left = f", {len(self.not_filled)} paths not filled" if self.not_filled else ""
        return (
            f"Checkpoint(step={self.step}, attempt={self.attempt}, {self.nbytes} bytes from {self.source}, "
            f"steps_lost={self.steps_lost}{left})"
        )


@copying()
def open_shard(read: ShardRead, into: Any, *, rank_state_into: Any = None, timeout_s: float = 600.0) -> Checkpoint:
    """Copy a shard out, each chunk once it has come, verify every chunk after its copy, and unpin it (R7, R27).

    A chunk that is bad here by then is brought again from another copy, and copied again.

    Raises:
        RecoveryError, TransportError, DigestMismatch: It cannot be brought here. Once the first chunk was copied, a
            state given as `into` or `rank_state_into` is unusable then, and the message says so.
    """
    with read:
        staged, others = OpenShard(read, read.manifest()), reader_of(read.link, read.manifest(), timeout_s)
        started_s, rank_state = time.perf_counter(), None
        layout = SharedShardLayout.decode(staged.manifest)
        with staged.naming_partial_writes():
            if layout is not None:
                state, rank_state = load_shared_shard(staged, layout, others, into, rank_state_into)
            else:
                check_shard(staged.manifest, None, rank_state_into)
                state = staged.build(staged.manifest.layout, into)
            answer = read.answer()
        if isinstance(state, dict) and DCP_KEY in state:
            job = staged.manifest.shard.job
            source = "store" if job == read.link.job else f"memstore.reader({job!r})"
            raise ManifestMismatch(
                f"step {staged.manifest.shard.step} was saved through torch.distributed.checkpoint: load it with "
                f"dcp.load(state, storage_reader={source}.dcp_reader())"
            )
        return checkpoint(staged, answer, state, rank_state, time.perf_counter() - started_s)


def checkpoint(
    staged: OpenShard, answer: ShardPlaced, state: Any, rank_state: Any = None, load_s: float = 0.0
) -> Checkpoint:
    """Return the result of get(), from the controller's answer."""
    count, report = staged.repaired_count, answer.report
    if staged.not_filled:
        log.warning("%s", not_filled_line(staged.manifest.shard.job, staged.not_filled))
    if staged.in_copies:
        log.warning(
            "memstore %s: get(into=) filled %s, which state_dict() made, and not the object: give the object itself, "
            "or hand what was filled to its load_state_dict()",
            staged.manifest.shard.job,
            shown_paths(staged.in_copies),
        )
    repaired = f"; {count} of this rank's chunks were damaged or did not come, and were brought again" if count else ""
    return Checkpoint(
        step=staged.manifest.shard.step,
        attempt=staged.manifest.shard.attempt,
        state=state,
        nbytes=staged.manifest.nbytes,
        source="mixed" if count and answer.verdict == "local" else answer.verdict,
        source_reason=f"{answer.why}{repaired}",
        steps_lost=report.steps_lost if report is not None else 0,
        ranks_moved=report.ranks_moved if report is not None else (),
        moved_bytes=report.moved_bytes if report is not None else 0,
        bytes_by_tier=asdict(report.bytes) if report is not None else {},
        seconds_by_phase={**(asdict(report.seconds) if report is not None else {}), "load": load_s},
        rank_state=rank_state,
        not_filled=(*staged.not_filled, *staged.in_copies),
    )


def step_infos(answer: StepList) -> list[StepInfo]:
    """Return StepInfo rows from the controller's answer."""
    return [
        StepInfo(
            r.attempt,
            r.step,
            r.committed,
            r.degraded,
            r.durable,
            r.copies,
            r.nbytes,
            r.in_lineage,
            r.retired,
            tuple(r.pins),
        )
        for r in answer.steps
    ]


def not_filled_line(job: str, paths: Sequence[str]) -> str:
    """Say which values into= has no place for."""
    values = "1 value" if len(paths) == 1 else f"{len(paths)} values"
    return (
        f"memstore {job}: get(into=) left {values} as they were: no entry holds them, or a tensor or an object is "
        f"there now; take them from got.state: {shown_paths(paths)}"
    )


def shown_paths(paths: Sequence[str]) -> str:
    """Return the first paths of a list, for a message."""
    return ", ".join(paths[:PATHS_SHOWN]) + (", ..." if len(paths) > PATHS_SHOWN else "")


def restore_line(request: Get, got: Checkpoint, answer: ShardPlaced) -> str:
    """Return the log line of a restore: the step, its source, its duration, and why none newer."""
    tiers = ", ".join(f"{nbytes / 1e9:.3g} GB {tier}" for tier, nbytes in got.bytes_by_tier.items())
    seconds = " ".join(f"{name} {value:.2f}" for name, value in got.seconds_by_phase.items())
    lost = lost_text(got.steps_lost)
    count = len(got.ranks_moved)
    moved = f" · {plural(count, 'rank')} moved, {got.moved_bytes / 1e9:.3g} GB" if count else ""
    rejected = answer.report.rejected[:3] if answer.report is not None else ()
    unused = "; ".join(f"{row.step} ({row.reason})" for row in rejected)
    of = f" of job {request.from_job}" if request.from_job is not None else ""
    return (
        f"memstore {request.job} att {request.attempt}: restored step {got.step}{of} ({lost}) · {got.source} · "
        f"{tiers}{moved} · {seconds} s · every digest ok{' · not used: ' + unused if unused else ''}"
    )
