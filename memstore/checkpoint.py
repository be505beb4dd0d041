"""What a get returns, and the last check of its bytes: shared by Store and Reader (R7, R26)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from memstore.core.layout import decode_layout
from memstore.core.manifest import Manifest, decode_manifest
from memstore.errors import ManifestMismatch, MemstoreError, ProtocolError
from memstore.shell.checked_stream import CheckedStream, ChunkSource
from memstore.shell.rank_link import RankLink
from memstore.shell.staged_shard import ShardRead, StagedShard
from memstore.shell.state_decode import build_state

DCP_KEY = "memstore.dcp"  # in the tree of a shard that DCP's planner laid out: its bytes are no state


@dataclass(frozen=True)
class StepInfo:
    """One step the store knows, for people."""

    attempt: int
    step: int
    committed: bool
    degraded: str
    durable: bool
    copies: int
    nbytes: int
    in_lineage: bool
    retired: str
    pins: tuple[str, ...] = ()
    forks: tuple[str, ...] = ()  # jobs that began with it


@dataclass(frozen=True)
class Checkpoint:
    """What a get returned on this rank; the fields from `steps_lost` on are of the whole job."""

    step: int
    attempt: int
    state: Any
    nbytes: int
    verdict: str
    reason: str
    steps_lost: int
    ranks_moved: tuple[int, ...] = ()  # sit on another host than their copies (R27): see Store.mesh_order
    moved_bytes: int = 0  # what that cost: fetched for these ranks from other hosts
    bytes_by_tier: dict[str, int] = field(default_factory=dict)
    seconds_by_phase: dict[str, float] = field(default_factory=dict)


def open_shard(link: RankLink, answer: dict[str, Any], into: Any) -> Checkpoint:
    """Copy a staged shard out, verify every chunk after its copy, and unpin it (R7).

    A chunk that is bad here by then is brought again from another copy, and copied again.

    Raises:
        DigestMismatch: Some chunk has no good copy; a state given as `into` is unusable then, and the message says so.
    """
    manifest = decode_manifest(bytes(answer["manifest"]))
    source = StagedShard(link, manifest, answer)
    try:
        return _opened(source, manifest, into, lambda: answer)
    finally:
        source.close()


def read_shard(link: RankLink, body: dict[str, Any], into: Any, timeout_s: float) -> Checkpoint:
    """Ask for one rank's shard and copy it out, chunk by chunk while others are still coming (R27).

    Raises:
        RecoveryError, TransportError, DigestMismatch: It cannot be brought here. Once the first chunk was copied, a
            state given as `into` is unusable then, and the message says so.
    """
    with ShardRead(link, body, timeout_s) as read:
        return _opened(read, read.manifest(), into, read.answer)


def _opened(source: ChunkSource, manifest: Manifest, into: Any, answered: Callable[[], dict[str, Any]]) -> Checkpoint:
    started_s = time.perf_counter()
    stream = CheckedStream(manifest, source)
    try:
        state = _built(manifest, stream, into)
        answer = answered()
    except MemstoreError as exc:
        if into is not None and stream.has_written:
            raise type(exc)(f"{exc}; the state given as into= is unusable: restart this process") from exc
        raise
    seconds = {k: float(v) for k, v in answer.get("seconds", {}).items()}
    seconds["load"] = time.perf_counter() - started_s
    return Checkpoint(
        step=int(answer["step"]),
        attempt=int(answer["attempt"]),
        state=state,
        nbytes=manifest.nbytes,
        verdict="mixed" if stream.mended and answer["verdict"] == "local" else str(answer["verdict"]),
        reason=f"{answer['why']}{_mended(stream)}",
        steps_lost=int(answer.get("steps_lost", 0)),
        ranks_moved=tuple(answer.get("ranks_moved", ())),
        moved_bytes=int(answer.get("moved_bytes", 0)),
        bytes_by_tier=dict(answer.get("bytes", {})),
        seconds_by_phase=seconds,
    )


def _mended(stream: CheckedStream) -> str:
    count = len(stream.mended)
    return f"; {count} of this rank's chunks were bad on its host and came from another copy" if count else ""


def _built(manifest: Manifest, stream: CheckedStream, into: Any) -> Any:
    layout = decode_layout(manifest.layout)
    if layout.nbytes > manifest.nbytes:
        raise ProtocolError(f"the layout of {manifest.shard} is of {layout.nbytes} bytes, it has {manifest.nbytes}")
    state = build_state(layout, stream, into=into)
    if isinstance(state, dict) and DCP_KEY in state:
        raise ManifestMismatch(
            f"step {manifest.shard.step} was saved through torch.distributed.checkpoint: load it with "
            "dcp.load(state, storage_reader=store.dcp_reader())"
        )
    return state


def step_infos(body: dict[str, Any]) -> list[StepInfo]:
    """Return StepInfo rows from the controller's answer."""
    return [
        StepInfo(
            int(r["attempt"]), int(r["step"]), bool(r["committed"]), str(r["degraded"]), bool(r["durable"]),
            int(r["copies"]), int(r["nbytes"]), bool(r["in_lineage"]), str(r["retired"]),
            tuple(r["pins"]), tuple(r["forks"]),
        )
        for r in body["steps"]
    ]  # fmt: skip


def restore_line(job: str, attempt: int, got: Checkpoint, answer: dict[str, Any]) -> str:
    """The one log line of a restore: what, from where, how long, and why nothing newer."""
    tiers = ", ".join(f"{nbytes / 1e9:.3g} GB {tier}" for tier, nbytes in got.bytes_by_tier.items())
    seconds = " ".join(f"{name} {value:.2f}" for name, value in got.seconds_by_phase.items())
    lost = f"{got.steps_lost} steps lost" if got.steps_lost else "0 steps lost"
    count = len(got.ranks_moved)
    moved = f" · {count} {'rank' if count == 1 else 'ranks'} moved, {got.moved_bytes / 1e9:.3g} GB" if count else ""
    unused = "; ".join(f"{step} ({why})" for _, step, why in answer.get("rejected", [])[:3])
    return (
        f"memstore {job} att {attempt}: restored step {got.step} ({lost}) · {got.verdict} · {tiers}{moved} · "
        f"{seconds} s · every digest ok{' · not used: ' + unused if unused else ''}"
    )
