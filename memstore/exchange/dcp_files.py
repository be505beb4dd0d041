"""DCP directories: one is written out of a step, and one is read as what a new job is made of.

torch's own FileSystemWriter and FileSystemReader write and read the files; planners hand them one item at a time. But
for `.metadata`, which is a pickle: torch's reader unpickles any name in it, and so runs what its author chose.
Here it is read under a list of harmless classes. This file is the only one of ours that unpickles anything.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from memstore.core.format.layout import batches
from memstore.errors import IntegrityError, MemstoreError
from memstore.exchange.dcp_shares import Give
from memstore.exchange.step_view import Entry, Item, StepView, tensor_entry

FILE_BYTES = 256 << 20  # torch's writer keeps every tensor of a file in memory until the file is done


# -- written ----------------------------------------------------------------------------------


def write_dcp(view: StepView, folder: Path) -> None:
    """Write a view into an empty folder: .distcp files of at most FILE_BYTES, or of one item, and .metadata.

    Raises:
        What reading the items raises, and OSError.
    """
    # No look-ahead, which is for tensors on devices; `new_folder` syncs.
    writer = filesystem.FileSystemWriter(folder, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    ranks = (items for _, items in view.by_rank())
    files = [file for items in ranks for file in batches(items, lambda item: item.span[1], FILE_BYTES)]
    plans = [writer.prepare_local_plan(SavePlan([_write_item(view, item) for item in file])) for file in files]
    results = []
    for plan, file in zip(writer.prepare_global_plan(plans), files, strict=True):
        results.append(writer.write_data(plan, _OneByOne(file)).wait())
    writer.finish(Metadata(view.entries, view.paths), results)


def _write_item(view: StepView, item: Item) -> WriteItem:
    entry = view.entries[item.index.fqn]
    if item.chunk is None or not isinstance(entry, TensorStorageMetadata):
        return WriteItem(item.index, WriteItemType.BYTE_IO)
    return WriteItem(
        item.index, WriteItemType.SHARD, tensor_data=TensorWriteData(item.chunk, entry.properties, entry.size)
    )


class _OneByOne(DefaultSavePlanner):
    """Reads an item when the writer asks for it."""

    def __init__(self, items: list[Item]) -> None:
        super().__init__()
        self.items: dict[MetadataIndex, Item] = {item.index: item for item in items}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an item's tensor, or an object's bytes."""
        found = self.items[write_item.index].load()
        return io.BytesIO(found) if isinstance(found, bytes) else found


# -- read -------------------------------------------------------------------------------------

_CLASSES = {
    metadata: (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    filesystem: ("_StorageInfo",),
    torch: ("Size",),
    torch.serialization: ("_get_layout",),
    collections: ("OrderedDict",),
    pathlib: ("PosixPath",),
}  # fmt: skip
_ALLOWED = {(module.__name__, name): getattr(module, name) for module, names in _CLASSES.items() for name in names}
_ALLOWED |= {("pathlib._local", "PosixPath"): pathlib.PosixPath}  # its name in Python 3.13


class _Harmless(pickle.Unpickler):
    """Builds DCP's own records and plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP metadata needs")
        return found


def read_dcp_metadata(folder: Path) -> Metadata:
    """Return what `folder/.metadata` says, checked: every item lies inside a file of the folder.

    Raises:
        IntegrityError: it is no metadata, names something else than DCP's records, or files that are not there.
    """
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            found = _Harmless(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"it holds a {type(found).__name__}")
        for index, info in (found.storage_data or {}).items():
            place = Path(info.relative_path)
            if place.name != str(info.relative_path) or place.name in ("", ".."):
                raise ValueError(f"{index.fqn!r} lies at {place}, which is not a file of the folder")
            if not 0 <= info.offset <= info.offset + info.length <= (folder / place).stat().st_size:
                raise ValueError(f"{index.fqn!r} ends behind {place}")
    except Exception as error:  # bad pickles raise nearly anything
        raise IntegrityError(f"{path} is not the metadata of a whole DCP directory: {error}") from error
    return found


class DcpSource:
    """A DCP directory, read by torch's FileSystemReader; objects stay the bytes that they are there."""

    def __init__(self, folder: Path) -> None:
        self._folder, found = folder, read_dcp_metadata(folder)
        self._reader = filesystem.FileSystemReader(folder)
        self._reader.set_up_storage_reader(found, True)
        self.metadata = Metadata(found.state_dict_metadata, found.planner_data)
        missing = [i.fqn for i in _indices(self.metadata) if i not in (found.storage_data or {})]
        if missing:
            raise IntegrityError(f"{folder}: {missing[:5]} are in its metadata and not in its files")

    def read(self, wanted: Iterable[MetadataIndex], give: Give) -> None:
        """Give every wanted part or object, in the order of the files."""
        items = [self._item(index) for index in wanted]
        items.sort(key=lambda item: self._place(item.storage_index))
        try:
            self._reader.read_data(LoadPlan(items), _Giving(self.metadata.state_dict_metadata, give)).wait()
        except (OSError, MemstoreError):
            raise
        except Exception as error:  # bad files raise nearly anything
            said = (str(error) or repr(error)).splitlines()[0]
            raise IntegrityError(f"{self._folder} cannot be read: {said}") from error

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        info = self._reader.storage_data[index]
        return info.relative_path, info.offset

    def _item(self, index: MetadataIndex) -> ReadItem:
        none = torch.Size([])
        if index.offset is None:
            return ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
        sizes = next(
            c.sizes
            for c in tensor_entry(self.metadata.state_dict_metadata, index.fqn).chunks
            if c.offsets == index.offset
        )
        start = torch.Size([0] * len(sizes))
        return ReadItem(LoadItemType.TENSOR, index, start, index, start, sizes)


class _Giving(DefaultLoadPlanner):
    """A planner whose targets are handed on as soon as they are filled."""

    def __init__(self, entries: Mapping[str, Entry], give: Give) -> None:
        super().__init__()
        self._entries, self._give = entries, give

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return an empty tensor for a part."""
        return torch.empty(
            read_item.lengths, dtype=tensor_entry(self._entries, read_item.storage_index.fqn).properties.dtype
        )

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """A part is there."""
        self._give(read_item.storage_index, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Note that an object exists; it is not decoded."""
        self._give(read_item.storage_index, value.getvalue())


def _indices(metadata: Metadata) -> Iterable[MetadataIndex]:
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield MetadataIndex(name)
        else:
            yield from (MetadataIndex(name, chunk.offsets) for chunk in entry.chunks)
