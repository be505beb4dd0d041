"""Export one committed step into a new folder while training goes on (R7, R19, R27)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memstore.client.checkpoint import StepInfo
from memstore.client.dcp.metadata import SavedLayout
from memstore.client.reader import Reader
from memstore.core.format.shared_layout import SharedShardLayout
from memstore.errors import CapacityError, ConfigError, MemstoreError, RecoveryError, UnsupportedState
from memstore.exchange.dcp_files import write_dcp
from memstore.exchange.put_tree import write_torch
from memstore.exchange.safetensors_files import stock_safetensors, write_safetensors
from memstore.exchange.shard_bytes import ShardBytes
from memstore.exchange.step_view import view_of_dcp_step, view_of_put_step
from memstore.shell.arena.lock import boot_id, is_alive, process_start_time

FORMATS = ("dcp", "torch", "safetensors")
NOTE_NAME = "memstore.json"  # in every export: its description, and the parts it lacks
FILE_BYTES = 5 * 10**9


def export_step(
    reader: Reader, step: int | None, target: Path, format: str, *, rank: int | None = None,
    attempt: int | None = None, prefix: str = "", file_bytes: int = FILE_BYTES,
) -> dict[str, Any]:  # fmt: skip
    """Write a step into the folder `target`, which must not exist; return what `memstore.json` in it says.

    Args:
        step: A committed step; None: the newest of the lineage.
        format: "dcp", "torch" or "safetensors".
        rank: Only what this rank put.
        attempt: The step's attempt, where several have a step of that number.
        prefix: With safetensors, only names that begin with it, without it.
        file_bytes: With safetensors, the most bytes of tensors in one file.

    Raises:
        ConfigError, UnsupportedState: it cannot be written so, or there; says what to do. Nothing is left behind.
        RecoveryError, IntegrityError: the same for the step's bytes.
    """
    if format not in FORMATS:
        raise ConfigError(f"format={format!r} is unknown: use one of {', '.join(FORMATS)}", field="format")
    if prefix and format != "safetensors":
        raise ConfigError(f"prefix={prefix!r} is of format safetensors, not of {format}", field="prefix")
    if format == "safetensors":
        stock_safetensors()
    info = _choose(reader, step, attempt)
    with new_folder(target) as folder, _pinned(reader, info) as not_pinned:
        ranges = reader.ranges(attempt=info.attempt)
        first = ShardBytes(ranges, info.step, rank or 0)
        if SharedShardLayout.decode(first.manifest) is not None:
            raise UnsupportedState(
                f"step {info.step} was put with connect(shard_rank=, shard_count=), and such a step cannot be "
                f"exported: read it with memstore.reader({reader.job!r}).get({info.step}, rank=r), whose .state is "
                "what the rank's shard shares and .rank_state what was its own, and save those"
            )
        is_dcp = SavedLayout.decode(first.manifest.layout) is not None
        note = {
            "job": reader.job, "step": info.step, "attempt": info.attempt, "format": format,
            "put_by": "dcp" if is_dcp else "put", "world_size": first.manifest.world_size, "rank": rank,
        }  # fmt: skip
        ranks = range(first.manifest.world_size) if rank is None else [rank]
        if format == "torch":
            if is_dcp:
                raise UnsupportedState(
                    f"step {info.step} was saved through DCP, where ranks have no state of their own: use --format "
                    "dcp, then `python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR FILE`"
                )
            note["files"] = [write_torch(ShardBytes(ranges, info.step, r), folder) for r in ranks]
        else:
            view = (
                view_of_dcp_step(ranges, info.step, rank) if is_dcp
                else view_of_put_step([ShardBytes(ranges, info.step, r) for r in ranks])
            )  # fmt: skip
            note["per_rank"] = view.per_rank
            if format == "dcp":
                write_dcp(view, folder)
            else:
                note |= write_safetensors(view, folder, prefix=prefix, file_bytes=file_bytes)
        note["nbytes"] = sum(path.stat().st_size for path in folder.iterdir())
        (folder / NOTE_NAME).write_text(json.dumps(note, indent=1))
    return {**note, "directory": str(target), "not_pinned": not_pinned}


def _choose(reader: Reader, step: int | None, attempt: int | None) -> StepInfo:
    """Return the committed step that is meant; of several of one number the one in the lineage, then the newest."""
    committed = [s for s in reader.steps() if s.committed]
    mine = [s for s in committed if attempt in (None, s.attempt)]
    found = [s for s in mine if (s.in_lineage if step is None else s.step == step)]
    if not found:
        have = ", ".join(f"{s.step} (attempt {s.attempt})" for s in committed[:10]) or "none"
        what = (
            f"committed step{'' if step is None else f' {step}'}{'' if attempt is None else f' of attempt {attempt}'}"
        )
        raise RecoveryError(f"job {reader.job!r} has no {what}: it has {have}")
    return max(found, key=lambda s: (s.in_lineage, s.step if step is None else 0, s.attempt))


@contextlib.contextmanager
def _pinned(reader: Reader, info: StepInfo) -> Iterator[str]:
    """Keep the step while it is read; yield "", or why it could not be kept: it may be dropped meanwhile then."""
    machine = f"export-{boot_id()[:8]}-"
    for left in reader.pins():
        if _is_left_over(left, machine):
            reader.unpin(left)
    name, why = f"{machine}{_this_process()}-{secrets.token_hex(2)}", ""
    try:
        reader.pin(info.step, name, attempt=info.attempt)
    except (CapacityError, RecoveryError) as error:  # no room for one more, or it lies on durable storage only
        why = str(error)
    try:
        yield why
    finally:
        if not why:
            reader.unpin(name)


# -- a folder that appears whole or not at all ----------------------------------------------------


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` to fill; synced and renamed at the end, removed if anything is raised.

    What a killed process of this host left beside the same target is removed first.

    Raises:
        ConfigError: the target exists, or its parent does not, or the file system refused something, such as for want
            of room.
    """
    try:
        with _filled(target) as folder:
            yield folder
    except MemstoreError:  # a PeerTimeout is an OSError too
        raise
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror or error}. Name a new folder in a place that this user may "
            "write, on a file system with room", field="DIR", value=str(target),
        ) from error  # fmt: skip


@contextlib.contextmanager
def _filled(target: Path) -> Iterator[Path]:
    _check_absent(target)
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} is no folder: create it first", field="DIR", value=str(target))
    prefix = f".{target.name}.partial-{socket.gethostname()}-"
    for left in target.parent.iterdir():
        if _is_left_over(left.name, prefix):
            shutil.rmtree(left, ignore_errors=True)
    folder = target.parent / f"{prefix}{_this_process()}"
    folder.mkdir()
    try:
        yield folder
        for path in [*sorted(folder.rglob("*")), folder]:
            _sync(path)
        _check_absent(target)
        folder.rename(target)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch's archive cannot be closed after the disk said no
        raise
    _sync(target.parent)


def _check_absent(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists: name a folder that does not, or remove it first", field="DIR")


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _this_process() -> str:
    return f"{os.getpid()}-{process_start_time(os.getpid()) or 0}"


def _is_left_over(name: str, prefix: str) -> bool:
    """Return whether an export that was killed left what has this name."""
    pid, start = [*name.removeprefix(prefix).split("-"), ""][:2]
    return name.startswith(prefix) and pid.isdigit() and start.isdigit() and not is_alive(int(pid), int(start))
