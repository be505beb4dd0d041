"""Global tensors and objects by name, to be imported: out of a DCP directory or safetensors files, one at a time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from memstore.errors import IntegrityError, MemstoreError
from memstore.exchange.dcp_metadata_file import read_dcp_metadata
from memstore.exchange.safetensors_files import INDEX_NAME, stock_safetensors

Give = Callable[[MetadataIndex, "torch.Tensor | bytes"], None]


class Source(Protocol):
    """What a step is made of; `metadata` has no storage."""

    metadata: Metadata

    def read(self, wanted: Iterable[MetadataIndex], give: Give) -> None:
        """Yield every wanted part or object, in any order. IntegrityError if it contradicts the metadata."""


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
            self._reader.read_data(LoadPlan(items), _Giving(self.metadata, give)).wait()
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
        sizes = next(c.sizes for c in _tensor(self.metadata, index).chunks if c.offsets == index.offset)
        start = torch.Size([0] * len(sizes))
        return ReadItem(LoadItemType.TENSOR, index, start, index, start, sizes)


class _Giving(DefaultLoadPlanner):
    """A planner whose targets are handed on as soon as they are filled."""

    def __init__(self, metadata: Metadata, give: Give) -> None:
        super().__init__()
        self._all, self._give = metadata, give

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return an empty tensor for a part."""
        return torch.empty(read_item.lengths, dtype=_tensor(self._all, read_item.storage_index).properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note that a part exists."""
        self._give(read_item.storage_index, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Note that an object exists; it is not decoded."""
        self._give(read_item.storage_index, value.getvalue())


class SafetensorsSource:
    """The safetensors files of a folder: those of its index if it has one, else all. Mapped, not read at once."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._places: dict[str, tuple[Path, str]] = {}
        entries: dict[str, Any] = {}
        for path in self._files(folder):
            with self._open(path) as file:
                for name in file.keys():  # noqa: SIM118  not a dict
                    if prefix + name in self._places:
                        raise IntegrityError(f"{name!r} is in {path} and in {self._places[prefix + name][0]}")
                    tensor = file.get_tensor(name)
                    chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
                    properties = TensorProperties(tensor.dtype)
                    entries[prefix + name] = TensorStorageMetadata(properties, tensor.shape, [chunk])
                    self._places[prefix + name] = path, name
        self.metadata = Metadata(entries, {name: (name,) for name in entries})

    def _files(self, folder: Path) -> list[Path]:
        index = folder / INDEX_NAME
        if not index.exists():
            return sorted(folder.glob("*.safetensors"))
        try:
            names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IntegrityError(f"{index} is no index of safetensors files: {error!r}") from error
        absent = sorted(name for name in names if Path(name).name != name or not (folder / name).is_file())
        if absent:
            raise IntegrityError(f"{index} names {absent[:5]}, which are not in {folder}")
        return sorted(folder / name for name in names)

    def _open(self, path: Path) -> Any:
        try:
            return stock_safetensors().safe_open(path, framework="pt")
        except Exception as error:  # SafetensorError, whose module is an extra
            raise IntegrityError(f"{path} is not a whole safetensors file: {error}") from error

    def read(self, wanted: Iterable[MetadataIndex], give: Give) -> None:
        """Give every wanted tensor."""
        for index in wanted:
            path, name = self._places[index.fqn]
            with self._open(path) as file:
                give(index, file.get_tensor(name))


def _indices(metadata: Metadata) -> Iterable[MetadataIndex]:
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield MetadataIndex(name)
        else:
            yield from (MetadataIndex(name, chunk.offsets) for chunk in entry.chunks)


def _tensor(metadata: Metadata, index: MetadataIndex) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    return entry
