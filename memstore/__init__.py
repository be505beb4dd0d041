"""memstore: every step's checkpoint in the memory of the training hosts, replicated to peers.

    import memstore

    with memstore.connect("llama3-8b") as store:
        got = store.get(into=state)
        for step in range(got.step + 1 if got else 0, STEPS):
            train_step(...)
            store.put(step, state)

Importing memstore imports neither torch nor ray: every public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from memstore import errors as errors
from memstore.config import Config as Config

if TYPE_CHECKING:
    from memstore.api import Reader as Reader
    from memstore.api import connect as connect
    from memstore.api import reader as reader
    from memstore.checkpoint import Checkpoint as Checkpoint
    from memstore.checkpoint import StepInfo as StepInfo
    from memstore.cluster import ClusterStatus as ClusterStatus
    from memstore.cluster import start as start
    from memstore.cluster import status as status
    from memstore.cluster import stop as stop
    from memstore.history import Fork as Fork
    from memstore.history import fork as fork
    from memstore.preparation import Preparation as Preparation
    from memstore.shell.registry import register as register
    from memstore.store import Store as Store
    from memstore.ticket import Ticket as Ticket

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "memstore.checkpoint",
    "ClusterStatus": "memstore.cluster",
    "Fork": "memstore.history",
    "Preparation": "memstore.preparation",
    "Reader": "memstore.api",
    "StepInfo": "memstore.checkpoint",
    "Store": "memstore.store",
    "Ticket": "memstore.ticket",
    "connect": "memstore.api",
    "fork": "memstore.history",
    "reader": "memstore.api",
    "register": "memstore.shell.registry",
    "start": "memstore.cluster",
    "status": "memstore.cluster",
    "stop": "memstore.cluster",
}
_ERRORS = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]

_NEEDED = {"ray": "'ray[default]'", "torch": "torch", "numpy": "numpy", "msgpack": "msgpack", "xxhash": "xxhash"}

__all__ = sorted([*_HOMES, *_ERRORS, "Config", "__version__", "errors"])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(importlib.import_module(_HOMES[name]), name)
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
