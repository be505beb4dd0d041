"""Classes that a state may hold instances of: enums, dataclasses and named tuples, by explicit consent.

Nothing is ever imported by a name found in stored bytes; a class comes back only if this process
registered it. Tensor subclasses need not be registered where they are imported before a get: `subclasses.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

import torch

from memstore.errors import ConfigError

C = TypeVar("C", bound=type)

_BY_NAME: dict[str, type[Any]] = {}


def register(cls: C) -> C:
    """Allow instances of `cls` in states; usable as a class decorator.

    A dataclass or named tuple is stored field by field and comes back without a call of its
    `__init__`; an enum member is stored by name. A tensor subclass is stored by its parts, registered
    or not, and comes back through its `__tensor_unflatten__`: to register it here imports it before a
    get, and lets a class come back that is defined in a function. Registering a class again, as a
    module reload does, replaces the older one.

    Raises:
        ConfigError: `cls` is neither an enum, nor a dataclass, nor a named tuple, nor a tensor subclass with
            `__tensor_flatten__` and `__tensor_unflatten__`.
    """
    if not isinstance(cls, type) or not (
        issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls) or is_namedtuple(cls) or is_wrapper_class(cls)
    ):
        raise ConfigError(
            f"{cls!r} cannot be registered: only enums, dataclasses, named tuples and tensor subclasses with "
            "__tensor_flatten__ and __tensor_unflatten__ can; give other classes state_dict() and load_state_dict()"
        )
    _BY_NAME[class_name(cls)] = cls
    return cls


def class_name(cls: type[Any]) -> str:
    """Return the name under which a class is stored."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_namedtuple(cls: type[Any]) -> bool:
    """Return whether `cls` came from namedtuple() or NamedTuple."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def is_wrapper_class(cls: type[Any]) -> bool:
    """Return whether a class is of tensors that can be built out of their parts."""
    return issubclass(cls, torch.Tensor) and hasattr(cls, "__tensor_flatten__") and hasattr(cls, "__tensor_unflatten__")


def is_registered(cls: type[Any]) -> bool:
    """Return whether exactly this class was registered."""
    return _BY_NAME.get(class_name(cls)) is cls


def registered(name: str) -> type[Any] | None:
    """Return the class registered under a stored name."""
    return _BY_NAME.get(name)
