"""Whether the installed packages have the private names of theirs that in-place recovery relies on."""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping
from typing import Any


def missing(names: Mapping[tuple[str, str, str], str]) -> list[str]:
    """Return the names that are not there, with what they are for.

    Args:
        names: (module, object in it, attribute of that or "") -> what it is for.
    """
    found = []
    for (module, owner, attribute), purpose in names.items():
        try:
            value = getattr(importlib.import_module(module), owner)
            is_there = not attribute or _has(value, attribute)
        except (ImportError, AttributeError):
            is_there = False
        if not is_there:
            found.append(f"{module}.{owner}{'.' if attribute else ''}{attribute} ({purpose})")
    return found


def _has(owner: Any, attribute: str) -> bool:
    """Return whether a class has an attribute, declares it for its objects, or names it in a method."""
    if hasattr(owner, attribute) or attribute in getattr(owner, "__annotations__", {}):
        return True
    methods = [method for base in owner.__mro__ for method in vars(base).values()]
    return any(attribute in method.__code__.co_names for method in methods if isinstance(method, types.FunctionType))
