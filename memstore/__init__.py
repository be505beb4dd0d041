"""memstore: every step's checkpoint in the memory of the training hosts, replicated to peers.

    import memstore

    with memstore.connect("llama3-8b") as store:
        got = store.get(into=state)
        for step in range(got.step + 1 if got else 0, STEPS):
            train_step(...)
            store.put(step, state)

Importing memstore imports neither torch nor ray, and refuses versions of them that are too old: every public name is
loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memstore import errors as errors
from memstore.config import Config as Config
from memstore.distribution import VERSION, installed_versions, refused_versions

if TYPE_CHECKING:
    from memstore.admin.cluster import ClusterStatus as ClusterStatus
    from memstore.admin.cluster import start as start
    from memstore.admin.cluster import status as status
    from memstore.admin.cluster import stop as stop
    from memstore.client.checkpoint import Checkpoint as Checkpoint
    from memstore.client.checkpoint import StepInfo as StepInfo
    from memstore.client.connect import connect as connect
    from memstore.client.prepare import PutPreparation as PutPreparation
    from memstore.client.reader import Lease as Lease
    from memstore.client.reader import Reader as Reader
    from memstore.client.reader import reader as reader
    from memstore.client.store import Store as Store
    from memstore.client.ticket import Ticket as Ticket
    from memstore.shell.tensors.subclasses import register as register

__version__ = VERSION

if _why := refused_versions(installed_versions()):
    raise errors.ConfigError(_why)

_MODULES = {
    "Checkpoint": "memstore.client.checkpoint",
    "ClusterStatus": "memstore.admin.cluster",
    "PutPreparation": "memstore.client.prepare",
    "Lease": "memstore.client.reader",
    "Reader": "memstore.client.reader",
    "StepInfo": "memstore.client.checkpoint",
    "Store": "memstore.client.store",
    "Ticket": "memstore.client.ticket",
    "connect": "memstore.client.connect",
    "reader": "memstore.client.reader",
    "register": "memstore.shell.tensors.subclasses",
    "start": "memstore.admin.cluster",
    "status": "memstore.admin.cluster",
    "stop": "memstore.admin.cluster",
}
_ERRORS = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]

_NEEDED = {"ray": "'ray[default]'", "torch": "torch", "numpy": "numpy", "msgpack": "msgpack", "xxhash": "xxhash"}

__all__ = sorted([*_MODULES, *_ERRORS, "Config", "__version__", "errors"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        try:
            return getattr(importlib.import_module(_MODULES[name]), name)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _NEEDED:
                raise
            raise errors.ConfigError(
                f"memstore.{name} needs the package {package}, which is not installed: pip install {_NEEDED[package]}"
            ) from error
    if name in _ERRORS:
        return getattr(errors, name)
    raise AttributeError(f"module 'memstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
