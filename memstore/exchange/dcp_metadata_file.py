"""The `.metadata` of a DCP directory, which is a pickle, read under a list of harmless classes.

torch's own FileSystemReader unpickles any name in the file, and so runs what the file's author chose. This file is
the only one of ours that unpickles anything.
"""

from __future__ import annotations

import collections
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.serialization
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from memstore.errors import IntegrityError

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
