"""A DCP directory out of a step: torch's own FileSystemWriter writes it, a planner hands it one item at a time."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from memstore.exchange.step_view import Item, StepView

FILE_BYTES = 256 << 20  # torch's writer keeps every tensor of a file in memory until the file is done


def write_dcp(view: StepView, folder: Path) -> None:
    """Write a view into an empty folder: .distcp files of at most FILE_BYTES, or of one item, and .metadata.

    Raises:
        What reading the items raises, and OSError.
    """
    # No look-ahead, which is for tensors on devices; `new_folder` syncs.
    writer = FileSystemWriter(folder, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    files = [file for _, items in view.by_rank() for file in _cut(items)]
    plans = [writer.prepare_local_plan(SavePlan([_write_item(view, item) for item in file])) for file in files]
    results = []
    for plan, file in zip(writer.prepare_global_plan(plans), files, strict=True):
        results.append(writer.write_data(plan, _OneByOne(file)).wait())
    writer.finish(Metadata(view.entries, view.paths), results)


def _cut(items: list[Item]) -> Iterator[list[Item]]:
    file: list[Item] = []
    size = 0
    for item in items:
        if file and size + item.span[1] > FILE_BYTES:
            yield file
            file, size = [], 0
        file.append(item)
        size += item.span[1]
    yield file


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
