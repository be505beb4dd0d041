"""What a get returns, and the last check of its bytes: shared by Store and Reader (R7, R26)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memstore.core.manifest import Manifest, chunk_digest, decode_manifest
from memstore.errors import DigestMismatch, IntegrityError, ManifestMismatch
from memstore.shell.rank_link import RankLink
from memstore.shell.state_decode import decode_state

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
    """Copy a staged shard out, verify that its slots held it until then, and unpin it (R7).

    Raises:
        DigestMismatch: The bytes changed under the copy; a state given as `into` is unusable then.
    """
    started_s = time.perf_counter()
    manifest = decode_manifest(bytes(answer["manifest"]))
    try:
        views = shard_views(link, manifest, answer["slots"])
        if into is not None:
            check_views(manifest, views, "nothing was copied: call get() again")
        try:
            state = decode_state(manifest.layout, views, manifest.chunk_bytes, into=into)
            if isinstance(state, dict) and DCP_KEY in state:
                raise ManifestMismatch(
                    f"step {manifest.shard.step} was saved through torch.distributed.checkpoint: load it with "
                    "dcp.load(state, storage_reader=store.dcp_reader())"
                )
        finally:
            # Only now: a link that broke meanwhile has lost the pin, and others' bytes may lie in the slots.
            done = "the state given as into= holds wrong bytes: restart this process" if into is not None else ""
            check_views(manifest, views, done or "call get() again")
    finally:
        link.notify({"k": "unpin", "pin": answer["pin"]})
    seconds = {k: float(v) for k, v in answer.get("seconds", {}).items()}
    seconds["load"] = time.perf_counter() - started_s
    return Checkpoint(
        step=int(answer["step"]),
        attempt=int(answer["attempt"]),
        state=state,
        nbytes=manifest.nbytes,
        verdict=str(answer["verdict"]),
        reason=str(answer["why"]),
        steps_lost=int(answer.get("steps_lost", 0)),
        ranks_moved=tuple(answer.get("ranks_moved", ())),
        moved_bytes=int(answer.get("moved_bytes", 0)),
        bytes_by_tier=dict(answer.get("bytes", {})),
        seconds_by_phase=seconds,
    )


def shard_views(link: RankLink, manifest: Manifest, slots: Sequence[int | None]) -> list[memoryview]:
    """Return the slots' bytes in stream order, unverified."""
    views = []
    for index, (chunk, slot) in enumerate(zip(manifest.chunks, slots, strict=True)):
        if slot is None:
            raise IntegrityError(f"chunk {index} of {manifest.shard} was lost after staging: call get() again")
        views.append(link.view(slot, chunk.nbytes))
    return views


def check_views(manifest: Manifest, views: Sequence[memoryview], what_to_do: str) -> None:
    """Raise DigestMismatch if a slot does not hold what the manifest names."""
    for index, (chunk, view) in enumerate(zip(manifest.chunks, views, strict=True)):
        if chunk_digest(view) != chunk.digest:
            raise DigestMismatch(f"chunk {index} of {manifest.shard} changed after staging; {what_to_do}")


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
