"""Export one committed step into a new folder while training goes on (R7, R19, R27)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from memstore.client.dcp.metadata import SavedLayout
from memstore.client.dcp.reader import DcpReader
from memstore.client.reader import Reader
from memstore.core.format.layout import batches
from memstore.core.format.shared_layout import SharedShardLayout
from memstore.errors import ConfigError, MemstoreError, StepDropped, UnsupportedState
from memstore.exchange import Progress
from memstore.exchange.step_items import items_of, read_items, write_items, write_put_step
from memstore.shell.rank.shard_read import ShardRanges

NOTE_NAME = "memstore.json"  # in every export: its description, and the parts it lacks
LIMIT_S = 7 * 86400.0  # of the lease, which ends with this process in any case
BATCH_BYTES = 256 << 20  # of a DCP step, in memory at a time
FILE_BYTES = 5 * 10**9  # of tensors in a safetensors file, as the hub's are


def export_step(
    reader: Reader,
    step: int | None,
    target: Path,
    format: str,
    progress: Progress,
    *,
    rank: int | None = None,
    attempt: int | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Write a step (None: the newest) into the folder `target`, which must not exist; return its note.

    Args:
        progress: Takes the bytes that were read; those written as safetensors come on top.
        rank: Only what this rank put, or saved for itself.
        attempt: The step's, where several have a step of that number.
        prefix: With safetensors, only names that begin with it, without it.

    Raises:
        ConfigError, UnsupportedState: it cannot be written so, or there; says what to do. Nothing is left behind.
        RecoveryError, IntegrityError, LeaseLost: the same for the step's bytes.
    """
    if prefix and format != "safetensors":
        raise ConfigError(f"prefix={prefix!r} is of format safetensors, not of {format}", field="prefix")
    with new_folder(target) as folder, reader.lease(step, attempt=attempt, limit_s=LIMIT_S) as lease:
        note = {"job": reader.job, "step": lease.step, "attempt": lease.attempt, "format": format, "rank": rank}
        files = folder if format == "dcp" else folder / "dcp"
        sizes = [row.nbytes for row in reader.steps() if (row.attempt, row.step) == (lease.attempt, lease.step)]
        progress(total=sum(sizes) * (1 if format == "dcp" else 2) if rank is None else None)
        try:
            note |= write_dcp(reader.ranges(attempt=lease.attempt), lease.step, rank, files, progress)
        except StepDropped as error:
            raise lease.lost() from error
        if format == "safetensors":
            note |= write_safetensors(files, folder, prefix, progress)
            shutil.rmtree(files)
        note["nbytes"] = sum(path.stat().st_size for path in folder.iterdir())
        (folder / NOTE_NAME).write_text(json.dumps(note, indent=1))
    return {**note, "directory": str(target), "not_kept": lease.why_not_kept}


# -- as a DCP directory -----------------------------------------------------------------------------


def write_dcp(ranges: ShardRanges, step: int, rank: int | None, folder: Path, progress: Progress) -> dict[str, Any]:
    """Write a step's files; return what the note says of it."""
    with ranges.ask(step, rank or 0) as read:
        first = read.manifest()
    if SharedShardLayout.decode(first) is not None:
        raise UnsupportedState(
            f"step {step} was put with connect(shard_rank=, shard_count=), and such a step cannot be exported: read it "
            f"with memstore.reader({first.shard.job!r}).get({step}, rank=r), whose .state is what the rank's shard "
            "shares and .rank_state what was its own, and save those"
        )
    is_dcp = SavedLayout.decode(first.layout) is not None
    folder.mkdir(exist_ok=True)
    # No look-ahead, which is for tensors on devices; `new_folder` syncs.
    writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    if is_dcp:
        metadata, results, per_rank = *_copy_dcp_step(ranges, step, rank, writer, progress), list[str]()
    else:
        ranks = range(first.world_size) if rank is None else [rank]
        metadata, results, per_rank = write_put_step(ranges, step, ranks, writer, progress)
    writer.finish(metadata, [results])
    return {"put_by": "dcp" if is_dcp else "put", "world_size": first.world_size, "per_rank": per_rank}


def _copy_dcp_step(
    ranges: ShardRanges, step: int, rank: int | None, writer: FileSystemWriter, progress: Progress
) -> tuple[Metadata, list[WriteResult]]:
    reader = DcpReader(ranges, step)
    metadata = reader.read_metadata(**({} if rank is None else {"rank": rank}))
    cut = list(batches(items_of(metadata), lambda item: item[2], BATCH_BYTES))
    results = []
    for plan, batch in zip(writer.prepare_global_plan([SavePlan([]) for _ in cut]), cut, strict=True):
        values = read_items(reader, metadata, batch, progress)
        results += write_items(writer, plan, metadata, values, lambda nbytes: None)
    return Metadata(metadata.state_dict_metadata, metadata.planner_data), results


# -- as safetensors ---------------------------------------------------------------------------------


def write_safetensors(source: Path, folder: Path, prefix: str, progress: Progress) -> dict[str, Any]:
    """Write the tensors of a DCP directory whose names begin with `prefix`, without it; return what the note says.

    A file has at most FILE_BYTES of tensors, or one tensor; more than one get the index of sharded models.
    """
    try:
        import safetensors.torch as stock
    except ImportError as error:
        raise ConfigError(f"{error}: pip install safetensors", field="format") from error

    def has_place(name: str, entry: Any) -> bool:
        if not (isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)):
            return False
        with contextlib.suppress(KeyError, ValueError, RuntimeError, TypeError):  # of a type that it does not have
            stock.save({"x": torch.empty(0, dtype=entry.properties.dtype)})
            return name.removeprefix(prefix) not in ("", "__metadata__")  # the header's own name
        return False

    entries: dict[str, Any] = FileSystemReader(source).read_metadata().state_dict_metadata
    names = [name for name, entry in entries.items() if has_place(name, entry)]
    if not names:
        raise ConfigError(f"no tensor's name begins with {prefix!r}: see {sorted(entries)[:5]}", field="prefix")
    sizes = {name: entries[name].size.numel() * entries[name].properties.dtype.itemsize for name in names}
    files = list(batches(names, sizes.__getitem__, FILE_BYTES))
    weight_map = {}
    for number, batch in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        state = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in batch}
        dcp.load(state, storage_reader=FileSystemReader(source), no_dist=True)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        try:
            stock.save_file(tensors, folder / file, metadata={"format": "pt"})
        except Exception as error:  # SafetensorError, which is what it makes of a full disk, too
            raise OSError(str(error)) from error
        weight_map.update(dict.fromkeys(tensors, file))
        progress(sum(sizes[name] for name in batch))
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
    return {"files": len(files), "left_out": sorted(entries.keys() - set(names))}


# -- a folder that appears whole or not at all ----------------------------------------------------


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder beside `target` to fill; synced and renamed at the end, removed if anything is raised.

    Raises:
        ConfigError: the target, or the folder of an export that was killed, exists, or the file system refused
            something, such as for want of room.
    """
    folder = target.with_name(f".{target.name}.partial")
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists: name a folder that does not, or remove it first", field="DIR")
    try:
        folder.mkdir()
        try:
            yield folder
            for path in (*folder.iterdir(), folder):
                _sync(path)
            folder.rename(target)  # over an empty folder at most
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
                raise error.__context__ from None  # torch's archive cannot be closed after the disk said no
            raise
        _sync(target.parent)
    except MemstoreError:  # a PeerTimeout is an OSError too
        raise
    except FileExistsError as error:
        raise ConfigError(
            f"{folder} exists: another export writes it, or was killed, and then `rm -r {folder}`", field="DIR"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror or error}. Name a new folder in a place that this user may "
            "write, on a file system with room",
            field="DIR",
            value=str(target),
        ) from error


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
