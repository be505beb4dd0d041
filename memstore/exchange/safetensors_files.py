"""Global tensors as safetensors files: of bounded size, with the index that readers of sharded models look for."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from memstore.core.format.layout import batches
from memstore.errors import ConfigError, IntegrityError, UnsupportedState
from memstore.exchange.dcp_shares import Give
from memstore.exchange.step_view import Item, StepView, tensor_entry

HEADER_NAME = "__metadata__"
INDEX_NAME = "model.safetensors.index.json"


def stock_safetensors() -> Any:
    """Return safetensors.torch. ConfigError where it is not installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(f"{error}: pip install safetensors", field="format") from error
    return safetensors.torch


def write_safetensors(view: StepView, folder: Path, *, prefix: str, file_bytes: int) -> dict[str, Any]:
    """Write the tensors whose names begin with `prefix`, without it; return `tensors`, `files` and `left_out`.

    A file has at most `file_bytes` of tensors, or one tensor; one file's tensors are in memory at a time.

    Raises:
        ConfigError: nothing is left to write.
        UnsupportedState: a tensor has the name of a file's own header.
        OSError: a file cannot be written.
        What reading the items raises, and OSError.
    """
    parts: dict[str, list[Item]] = defaultdict(list)
    for _, items in view.by_rank(are_interleaved=True):
        for item in items:
            parts[item.index.fqn].append(item)
    left_out = _left_out(view, prefix)
    reserved = prefix + HEADER_NAME
    if reserved in parts and reserved not in left_out:
        raise UnsupportedState(
            f"{reserved!r} cannot be written: safetensors files keep their header under {HEADER_NAME!r}. Export with "
            "another --prefix or as dcp, or put the tensor under another name",
            path=reserved,
        )
    from safetensors import SafetensorError

    files = list(
        batches((name for name in parts if name not in left_out), lambda name: _nbytes(view, name), file_bytes)
    )
    if not files:
        raise ConfigError(f"no tensor's name begins with {prefix!r}: see {sorted(parts)[:5]}", field="prefix")
    weight_map, total = {}, 0
    for number, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {name.removeprefix(prefix): _assemble(view, name, parts[name]) for name in names}
        try:
            stock_safetensors().save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # what its own code says of a full disk, too
            raise OSError(str(error)) from error
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1, sort_keys=True))
    return {"tensors": len(weight_map), "files": len(files), "left_out": left_out}


def _left_out(view: StepView, prefix: str) -> dict[str, str]:
    """Return the names that have no place, each with the reason."""
    found = {}
    for name, entry in view.entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            found[name] = "an object, not a tensor"
        elif not name.startswith(prefix):
            found[name] = f"its name does not begin with {prefix!r}"
        elif name == prefix:
            found[name] = (
                f"its name is the prefix {prefix!r}, and nothing is left of it" if prefix else "it has no name"
            )
        elif not _has_type(entry.properties.dtype):
            found[name] = f"safetensors has no type for {entry.properties.dtype}"
    return found


@functools.cache
def _has_type(dtype: torch.dtype) -> bool:
    try:
        stock_safetensors().save({"x": torch.empty(1, dtype=dtype)})
    except (KeyError, ValueError, RuntimeError, TypeError):
        return False
    return True


def _nbytes(view: StepView, name: str) -> int:
    entry = tensor_entry(view.entries, name)
    return entry.size.numel() * entry.properties.dtype.itemsize


def _assemble(view: StepView, name: str, items: list[Item]) -> torch.Tensor:
    entry = tensor_entry(view.entries, name)
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for item in items:
        assert item.chunk is not None
        part = item.load()
        assert isinstance(part, torch.Tensor)
        box = tuple(slice(at, at + size) for at, size in zip(item.chunk.offsets, item.chunk.sizes, strict=True))
        whole[box] = part
    return whole


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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
