"""The native helper, which is optional: `native.c` as this Python can import it, or nothing.

It is not there where it was not built, where the processor lacks what it was built for, and with MEMSTORE_NATIVE=0.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from memstore.errors import ConfigError

VERSION = 1  # of native.c, as it is called here


def _find() -> Any:
    if os.environ.get("MEMSTORE_NATIVE") == "0":
        return None
    try:
        from memstore.shell.native import _native
    except ImportError:  # not built, or built for a processor that can do more than this one
        return None
    if (found := getattr(_native, "VERSION", 0)) != VERSION:  # an older one lacks functions, or takes other tables
        raise ConfigError(
            f"{_native.__file__} was built from another memstore (its version is {found}, this one calls {VERSION}): "
            "build it again, with `make native` in a clone or `pip install --force-reinstall --no-deps .`; "
            "MEMSTORE_NATIVE=0 does without it, and copies are slower"
        )
    return _native


built: Any = _find()  # None: Python does it all


def problem() -> str:
    """Return why the helper is not used, unless it was turned off, and what to do; "" if it is."""
    if built is not None or os.environ.get("MEMSTORE_NATIVE") == "0":
        return ""
    return (
        f"{Path(__file__).parents[2]} runs without its native helper, so copies are slower: it was not built there, or "
        "not for this processor. With a C compiler and xxhash.h (package libxxhash-dev), `pip install -e .` in a clone "
        "builds it there; start memstore from another folder to use one that is installed elsewhere; or accept it with "
        "MEMSTORE_NATIVE=0"
    )


def is_there() -> bool:
    """Return whether the helper is used."""
    return built is not None
