"""Paths of durable files: `<where>/<job>/<attempt>/<step>/<file>` (R31). Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import xxhash

from memstore.core.wire.orders import DurablePlace
from memstore.errors import ConfigError
from recovery.inventory import DurableMarker

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", re.ASCII)
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,17})\Z", re.ASCII)
_FILE = re.compile(
    r"marker\Z|facts-[0-9a-f]{32}\Z|rank-(?:0|[1-9][0-9]{0,17})\.(?:0|[1-9][0-9]{0,8})\.[0-9a-f]{32}(?:\.[0-9a-f]{16})?(?:-[0-9a-f]{16})?\Z",
    re.ASCII,
)
MARKER = "marker"


def place_of(config: Mapping[str, Any], marker: DurableMarker | None = None, rank: int = 0) -> DurablePlace | None:
    """Return the place of a job's durable storage, as a holder needs it; None if the job has none.

    Args:
        config: The job's settings.
        marker: Of the step that will be read, whose slices carry its key's name.
        rank: Whose shard of it will be read.
    """
    if not config.get("durable"):
        return None
    return DurablePlace(
        url=config["durable"],
        compression=config.get("durable_compression"),
        key_file=config.get("durable_key_file"),
        bytes_per_s=math.ceil(config.get("durable_bytes_per_s") or 0) or None,  # a setting may be a float
        key=marker.key if marker is not None else None,
        tags=tuple(use.tag for use in marker.uses.get(rank, ())) if marker is not None else (),
    )


def storage_of(config: Mapping[str, Any]) -> DurablePlace:
    """Return the durable storage of a job that has one; ValueError if it has none."""
    place = place_of(config)
    if place is None:
        raise ValueError("the job has no durable storage")
    return place


def slice_name(rank: int, number: int, digest: str, key: str = "", tag: str = "") -> str:
    """Return the name of a slice's file or object; of one under a key it carries the key's name, and it has its tag.

    So slices of one step under two keys never meet, and a marker that names one key cannot count the other's. Nor do
    two that read different older slices, or none.

    Raises:
        ConfigError: the rank is not a whole number from 0; it must not lead out of the folder.
    """
    if type(rank) is not int or not 0 <= rank < 10**18:
        raise ConfigError(f"rank {rank!r} is not a whole number from 0")
    return f"rank-{rank}.{number}.{digest}" + (f".{key}" if key else "") + (f"-{tag}" if tag else "")


def facts_name(store: str, host: str) -> str:
    """Return the name of the file in which a host's facts about a step are salvaged: a file name for every host's."""
    return f"facts-{xxhash.xxh3_128_hexdigest(repr((store, host)).encode())}"


def other_key(needed: str, here: str) -> str:
    """Say that a step's key is not the one that a host has, which may have none, and what to do.

    >>> other_key("a", "b")
    'it is under key a, durable_key_file here has key b: put the file of key a here; a new key belongs on every host'
    """
    has = f"key {here}" if here else "none"
    return (
        f"it is under key {needed}, durable_key_file here has {has}: put the file of key {needed} here; "
        "a new key belongs on every host"
    )


def step_path(where: str, job: str, *names: object) -> str:
    """Return the place of a job, attempt, step or file below `where`, after checking names from outside.

    Raises:
        ConfigError: a name that memstore would not write; joined to the root it might lead elsewhere.
    """
    if not _JOB.match(job):
        raise ConfigError(
            f"job {job!r} is no folder name: use 1 to 64 of A-Z a-z 0-9 . _ - and start with a letter or digit"
        )
    for name in names[:2]:
        if not _NUMBER.match(str(name)):
            raise ConfigError(f"attempt or step {name} of job {job} is not a whole number from 0")
    for name in names[2:]:
        if not _FILE.match(str(name)):
            raise ConfigError(f"{name!r} is no file of a durable step")
    return "/".join((where, job, *map(str, names)))


def is_step_number(name: str) -> bool:
    """Say whether a folder of this name may be an attempt or a step."""
    return _NUMBER.match(name) is not None


def is_step_file(name: str) -> bool:
    """Say whether memstore writes files of this name into a step."""
    return _FILE.match(name) is not None
