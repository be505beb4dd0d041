"""Make a new job out of a DCP directory: one step, of one rank, which dcp.load reads with any world size (R18, R20)."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from memstore.client.connect import connect
from memstore.config import Config, check_whole
from memstore.core.wire.calls import AskStatus, RemoveJob
from memstore.errors import ConfigError, FencedError, IntegrityError, MemstoreError
from memstore.exchange import Progress
from memstore.exchange.exporting import NOTE_NAME
from memstore.exchange.step_items import Values, items_of, read_items, write_items
from memstore.shell.rank.admin_link import any_tool


def import_job(
    job: str, folder: Path, *, config: Config, progress: Progress, step: int | None = None
) -> dict[str, Any]:
    """Commit the DCP directory as one step of the new job; return the result.

    Args:
        progress: Takes the bytes of tensors, when they are read and again when they are put.
        step: By default that of the export.

    Raises:
        ConfigError: the job exists, or an argument makes no sense. IntegrityError, UnsupportedState: the files.
        CommitError: the store. The job is removed again then.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "an import is one process, and a launcher has started several: start it by itself; or let each rank "
            "of the job dcp.load its part of the folder, and dcp.save(storage_writer=store.dcp_writer(step))"
        )
    found, values = read_dcp(folder, progress)
    step = check_whole("step", _step_of(folder) if step is None else step)
    exists = ConfigError(
        f"job {job!r} exists: import under another name, or {config.commands(f'`memstore rm {job}` first')}, with "
        "another --durable if durable storage has its steps",
        field="JOB",
    )
    with any_tool(config) as tool:
        if any(row.job == job and row.attempt is not None for row in tool.ask(AskStatus()).jobs):
            raise exists
    is_ours = False
    try:
        with connect(job, rank=0, world_size=1, config=config) as store:
            # Durable storage may know it, or another import was quicker. A removed job goes on counting its attempts.
            if store.attempt != 1 and store.agree_on_step() is not None:
                raise exists
            is_ours = True
            writer = store.dcp_writer(step, wait="committed" if store.config.durable is None else "durable")
            writer.set_up_storage_writer(True)
            [plan] = writer.prepare_global_plan([SavePlan([])])
            writer.finish(found, [write_items(writer, plan, found, values, progress)])
            [info], ticket = store.steps(), writer.ticket
            assert ticket is not None
            return {"job": job, "step": step, "nbytes": ticket.nbytes, "level": ticket.level, "degraded": info.degraded}
    except BaseException as error:
        if is_ours and not isinstance(error, FencedError):  # a fenced import has no job to remove: it is another's now
            with contextlib.suppress(MemstoreError), any_tool(config) as tool:
                tool.ask(RemoveJob(job=job, force=True))
        raise


def _step_of(folder: Path) -> int:
    try:
        return int(json.loads((folder / NOTE_NAME).read_text())["step"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise IntegrityError(f"{folder / NOTE_NAME} says no step: give --step ({error!r})") from error


_CLASSES = {
    metadata: (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem: ("_StorageInfo",),
    torch: ("Size",),
    torch.serialization: ("_get_layout",),
    collections: ("OrderedDict",),
    pathlib: ("PosixPath",),
}
_ALLOWED = {(module.__name__, name): getattr(module, name) for module, names in _CLASSES.items() for name in names}
_ALLOWED |= {("pathlib._local", "PosixPath"): pathlib.PosixPath}  # its name in Python 3.13


class _Harmless(pickle.Unpickler):
    """Builds DCP's own records and plain values only; torch's reader runs what the author of a pickle chose."""

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP metadata needs")
        return found


def read_dcp(folder: Path, progress: Progress) -> tuple[Metadata, Values]:
    """Return a DCP directory's metadata and all of its items; objects stay the bytes that they are there.

    Raises:
        ConfigError: it is another kind of folder. IntegrityError: its metadata names something else than DCP's records,
            or bytes that are not there, or its files cannot be read.
    """
    path, instead = folder / ".metadata", "is it the right folder?"
    if not path.exists():
        if any(folder.glob("*.safetensors")):
            stock = f"torch.distributed.checkpoint.HuggingFaceStorageReader({str(folder)!r})"
            instead = f"its safetensors files a job loads by itself, with dcp.load(state, storage_reader={stock})"
        elif any(folder.glob("*.pt")):
            instead = "its files of torch.save each rank loads by itself, with torch.load, and puts"
        raise ConfigError(f"{folder} has no .metadata of a DCP directory: {instead}", field="DIR")
    try:
        with path.open("rb") as file:
            found: Metadata = _Harmless(file).load()
        wanted = list(items_of(found))
        for index, _, _ in wanted:
            info = found.storage_data[index]
            if info.relative_path in ("", "..") or Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"{index.fqn!r} lies at {info.relative_path}, which is not a file of the folder")
            if not 0 <= info.offset <= info.offset + info.length <= (folder / info.relative_path).stat().st_size:
                raise ValueError(f"{index.fqn!r} ends behind {info.relative_path}")
    except Exception as error:  # bad pickles raise nearly anything
        raise IntegrityError(f"{path} is not the metadata of a whole DCP directory: {error}") from error
    progress(total=2 * sum(nbytes for _, _, nbytes in wanted))
    source = filesystem.FileSystemReader(folder)
    source.set_up_storage_reader(found, True)
    try:
        values = read_items(source, found, wanted, progress)
    except Exception as error:  # bad files, too
        raise IntegrityError(f"{folder} cannot be read: {(str(error) or repr(error)).splitlines()[0]}") from error
    return Metadata(found.state_dict_metadata, found.planner_data), values
