"""One frozen Config, validated once, when it is made. Reads no environment; `check_config` takes one setting from it.

Store fields are fixed when the store is started; a different value later is a ConfigError that names both (R5).
Job fields belong to the job that connects with them; those given at the store's start are defaults for its jobs.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import numbers
import operator
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, fields
from typing import Any

from memstore.errors import ConfigError
from memstore.intervals import parse_every, parse_put_every

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECONDS_MAX = 1e8  # three years: a longer wait would overflow the system's clocks
WHOLE_LIMIT = 1 << 61  # a message carries numbers below 2**62, and a skip names a later step
DETECT_S: Mapping[str | float, float] = {"fast": 2.0, "normal": 5.0, "slow": 20.0}  # silence until a host is dead
SUSPECT_MAX_S, HEARTBEAT_MAX_S = 3.0, 0.5  # a controller's lease and what `status` shows depend on them as well
STREAMS = 4  # one connection fills no fast network; each is a thread and a descriptor per peer at both ends
ARENA_VARIABLE = "MEMSTORE_ARENA_DIR"  # where arenas lie in this container, for processes that do not say
SHOWN_CHARS_MAX = 160  # of a value in an error: it may come from a peer
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_COMMAND = re.compile(  # a command in a text but for verbs that are about no store; with nothing that names one yet
    r"`memstore (?!(?:stores|rehearse|completion|demo|drill)\b)[a-z]+\b(?! --store| --arena-dir)"
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": GIB, "t": GIB * KIB}

#: Fields that every process of one store must share; the rest belong to a job.
STORE_FIELDS = (
    "store",
    "arena_dir",
    "arena_bytes",
    "quota",
    "chunk_bytes",
    "failure_domains",
    "interface",
    "port",
    "detect",
    "repair_bytes_per_s",
    "scrub_bytes_per_s",
    "replicate_bytes_per_s",
    "dscp",
    "recovery_grace_s",
    "tls_dir",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every knob, in two groups. Durations are seconds, sizes bytes (or text such as "8GiB")."""

    _given: InitVar[frozenset[str]] = frozenset()  # first: dataclasses.replace() passes it before its changes

    # -- store fields -------------------------------------------------------------------------
    store: str = "default"  # name of the store; processes that give the same one share it
    arena_dir: str = "/dev/shm"  # folder of a memory file system, in which the arenas lie
    arena_bytes: int | str = "auto"  # most memory per host, grown as jobs reserve it; "auto": measured (R9)
    quota: str | int | Sequence[str] | None = None  # most memory of each host that a job may reserve, or by job (R10)
    chunk_bytes: int = 4 * MIB  # unit of storage and transfer; a multiple of 4096
    failure_domains: tuple[str, ...] = ("zone", "rack")  # node labels, coarsest first, as far as nodes have them (R18)
    interface: str | Sequence[str] | None = None  # network(s) of copies, each an interface or a CIDR; None: default's
    port: int = 0  # port of every holder; 0: any free one
    detect: str | float = "normal"  # silence until a host is dead, "fast": 2 s, "slow": 20 s, or a number (R28)
    repair_bytes_per_s: int = 2 * GIB  # most that one host sends to rebuild copies (R29)
    scrub_bytes_per_s: int = 64 * MIB  # most that a host digests again in the background; 0: no scrub (R30)
    replicate_bytes_per_s: int = 0  # most that a host sends to others, paced by the kernel; 0: no limit
    dscp: int = 1  # traffic class of copies: 1 is "lower effort" (RFC 8622), 8 its predecessor CS1, 0 the default
    recovery_grace_s: float = 30.0  # longest wait of a get for hosts that the newest commit names (R24)
    tls_dir: str | None = None  # folder of cert.pem, key.pem (mode 0600) and ca.pem, on every host; None: plain TCP

    # -- job fields ---------------------------------------------------------------------------
    replicas: int = 2  # copies of each shard, the owner's own included
    min_copies: int = 1  # copies without which no step is committed (R18)
    keep_steps: int = 1  # newest committed steps kept in RAM
    in_flight: int = 1  # steps that may wait for their commit at once, as far as every host has memory (R10)
    put_every: str | int = "step"  # when should_put() is true: "step", N steps, "30s", "2%", "epoch", "auto" (R33)
    stall_budget_s: float = 5.0  # longest that a put blocks for room before its step is skipped (R12)
    on_nonfinite: str = "ignore"  # a put with NaN or infinity: "warn" names it, "skip" gives the step up (R39)
    placement: str = "mixed"  # which hosts copy one another (placement/README.md)
    parity: int = 0  # k: parity of k shards in a row stands for the copies on peers (R37); 0: copies
    scatter: int = 1  # placements that the ranks of a host take by turns: a lost one's are restored from as many groups
    durable: str | None = None  # durable storage: a path, file://, s3://, gs:// or az://; None: RAM only
    durable_every: str | int = "30min"  # time between durable steps, or N steps; "auto": the optimum, as put_every's
    durable_keep: int = 3  # newest steps kept on durable storage
    durable_bases: int = 8  # most older steps whose equal chunks one there names and does not write; 0: each is whole
    durable_bytes_per_s: int = 0  # most that one host writes there, on average; 0: no limit
    durable_compression: str = "none"  # "auto" compresses chunks where a sample says that it pays
    durable_key_file: str | None = None  # 32 bytes, mode 0600, the same path on every host; steps are encrypted with it
    persist_on_sigterm_s: float = 0.0  # SIGTERM first makes the newest step durable, within this; 0: it does not
    job_ttl_s: float = 86_400.0  # a closed durable job, or one without holders, leaves RAM after this; 0: never (R5)
    connect_timeout_s: float = 120.0  # longest for all of connect(), and for Ray to answer

    def __new__(cls, **values: Any) -> Config:
        """Remember which fields are given: an unset one is not the same as one set to the default."""
        known = cls.__dataclass_fields__
        for name in values:
            if name not in known:
                names = ", ".join(sorted(name for name in known if not name.startswith("_")))
                raise ConfigError(f"unknown config field {name!r}: it is one of {names}", field=name)
        made = super().__new__(cls)
        # Of a copy by dataclasses.replace() that is what comes before `_given`, and what was given before.
        named = itertools.takewhile(lambda name: name != "_given", values)
        object.__setattr__(made, "_given", frozenset(named) | values.get("_given", frozenset()))
        return made

    def __post_init__(self, _given: frozenset[str]) -> None:
        if isinstance(self.failure_domains, list):
            object.__setattr__(self, "failure_domains", tuple(self.failure_domains))
        object.__setattr__(self, "interface", _interfaces(self.interface))
        check_name("store", self.store)
        _check_path("arena_dir", self.arena_dir)
        if self.arena_bytes != "auto":
            object.__setattr__(self, "arena_bytes", bytes_from_text("arena_bytes", self.arena_bytes))
        object.__setattr__(self, "quota", _quota(self.quota))
        for name, low, high in _RANGES:
            object.__setattr__(self, name, _check_number(name, getattr(self, name), low, high))
        object.__setattr__(self, "detect", _check_detect(self.detect))
        if self.chunk_bytes % 4096:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes} must be a multiple of 4096", field="chunk_bytes")
        if self.tls_dir is not None:
            _check_path("tls_dir", self.tls_dir)
        if self.min_copies > self.replicas:
            raise ConfigError(
                f"min_copies={self.min_copies} exceeds replicas={self.replicas}: lower min_copies or raise replicas",
                field="min_copies",
            )
        if self.parity == 1 or (self.parity and (self.replicas not in (2, 3) or self.scatter != 1)):
            raise ConfigError(
                f"parity={self.parity} with replicas={self.replicas}, scatter={self.scatter}: parity is for replicas=2 "
                "or 3 and scatter=1, and of 2 shards or more in a row (1 would be copies); set these, or parity=0",
                field="parity",
            )
        if self.on_nonfinite not in ("ignore", "warn", "skip"):
            raise ConfigError(
                f"on_nonfinite={self.on_nonfinite!r} is unknown: use ignore, warn or skip",
                field="on_nonfinite",
                value=self.on_nonfinite,
            )
        if self.placement not in ("mixed", "group", "ring"):
            raise ConfigError(f"placement={self.placement!r} is unknown: use mixed, group or ring", field="placement")
        parse_put_every(self.put_every)
        parse_every(self.durable_every)
        _check_durable(self.durable, self.durable_compression, self.durable_key_file)

    @property
    def given(self) -> frozenset[str]:
        """The fields that were passed explicitly."""
        named: frozenset[str] = vars(self)["_given"]
        return named

    @property
    def quotas(self) -> dict[str, int]:
        """The most bytes of each host that jobs may reserve, by name; "" stands for every other job."""
        named = [str(each).rpartition("=") for each in self.quota or ()]  # type: ignore[union-attr]
        return {job: bytes_from_text("quota", size) for job, _, size in named}

    @property
    def dead_after_s(self) -> float:
        """The silence after which a host is dead; its copies are rebuilt as long after that (R28)."""
        return float(DETECT_S.get(self.detect, self.detect))

    @property
    def suspect_after_s(self) -> float:
        """The silence after which new work avoids a host: free to undo, so never long (R28)."""
        return min(0.3 * self.dead_after_s, SUSPECT_MAX_S)

    @property
    def heartbeat_s(self) -> float:
        """The time between two heartbeats of a holder: three of them may be late before it is suspect."""
        return min(0.1 * self.dead_after_s, HEARTBEAT_MAX_S)

    @property
    def streams(self) -> int:
        """The connections for bulk bytes between two hosts, where there are so many cores: more only take turns."""
        return (
            STREAMS if isinstance(self.interface, str) or self.interface is None else max(STREAMS, len(self.interface))
        )

    @property
    def lease_s(self) -> float:
        """The time after its last sign of being the newest one in which a controller may record facts (R17)."""
        return 2 * self.suspect_after_s  # a controller silent for this long is not waited for

    def commands(self, text: str) -> str:
        """Return `text` with this store named in the `memstore` commands that it names."""
        return commands_naming(self.store, self.arena_dir, text)

    def store_fields(self) -> dict[str, Any]:
        """Return the fields that belong to the store, as plain values."""
        values = asdict(self)
        return {name: plain(values[name]) for name in STORE_FIELDS}

    def job_fields(self) -> dict[str, Any]:
        """Return the fields that belong to one job, as plain values."""
        values = asdict(self)
        return {f.name: plain(values[f.name]) for f in fields(self) if f.name not in STORE_FIELDS}

    def start_fields(self) -> dict[str, Any]:
        """Return the fields to start a store with: its own, and the job fields given as defaults for its jobs."""
        return {**self.store_fields(), **self.job_defaults()}

    def job_defaults(self) -> dict[str, Any]:
        """Return the job fields that were given, as plain values."""
        return {name: value for name, value in self.job_fields().items() if name in self.given}

    def with_defaults(self, defaults: dict[str, Any]) -> Config:
        """Return a copy in which `defaults` stand for the fields that were not given."""
        return self.with_fields({name: value for name, value in defaults.items() if name not in self.given})

    def with_fields(self, values: dict[str, Any]) -> Config:
        """Return a copy with `values` replaced; an unknown name is a ConfigError."""
        return Config(**{**{name: getattr(self, name) for name in self.given}, **values})


def _interfaces(value: Any) -> str | tuple[str, ...] | None:
    """Return the interface, or several as a tuple; ConfigError for anything else, none, or one that is named twice."""
    names = [value] if isinstance(value, str) else value
    if value is None:
        return None
    shown = repr(value)[:SHOWN_CHARS_MAX]
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(each, str) and each for each in names):
        raise ConfigError(
            f"interface={shown} must be a name, a network such as 10.20.0.0/16, an address, or several of "
            "these in a list",
            field="interface",
        )
    if len({*names}) < len(names):
        raise ConfigError(f"interface={shown} names one of them twice", field="interface")
    return names[0] if len(names) == 1 else tuple(names)


def _quota(value: Any) -> tuple[str, ...] | None:
    """Return quotas as "SIZE", of every job, or "JOB=SIZE"; ConfigError for anything else, none, or a job's second."""
    if value is None:
        return None
    each = [str(size) for size in (value if isinstance(value, list | tuple) else [value])]
    jobs = [check_name("job", job) if is_named else "" for job, is_named, _ in (size.rpartition("=") for size in each)]
    for size in each:
        bytes_from_text("quota", size.rpartition("=")[2])
    if len({*jobs}) < len(jobs) or not jobs:
        raise ConfigError(
            f'quota={str(value)[:SHOWN_CHARS_MAX]!r} must be a size for every job, such as "64GiB", or a list with one '
            'size for a job, such as ["64GiB", "eval=8GiB"]',
            field="quota",
        )
    return tuple(each)


def commands_naming(store: str, arena_dir: str, text: str) -> str:
    """Return `text` with a store named in the `memstore` commands that it names.

    A command without --store is for the store "default": run as printed it would stop or clear another one.
    """
    named = "" if store == Config.store else f" --store {store}"
    named += "" if arena_dir == Config.arena_dir else f" --arena-dir {shlex.quote(arena_dir)}"
    return _COMMAND.sub(lambda found: found[0] + named, text)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("chunk_bytes", 4096, 64 * MIB),
    ("port", 0, 65_535),
    ("repair_bytes_per_s", 8 * MIB, 1 << 50),
    ("scrub_bytes_per_s", 0, 1 << 50),
    ("replicate_bytes_per_s", 0, 1 << 50),
    ("dscp", 0, 63),
    ("recovery_grace_s", 0, 86_400),
    ("replicas", 1, 16),
    ("min_copies", 1, 16),
    ("parity", 0, 62),
    ("scatter", 1, 16),
    ("keep_steps", 1, 1000),
    ("in_flight", 1, 4),  # the puts that a rank may be ahead of a commit (R33)
    ("stall_budget_s", 0, 3600),
    ("durable_keep", 1, 10_000),
    ("durable_bases", 0, 16),
    ("durable_bytes_per_s", 0, 1 << 50),
    ("persist_on_sigterm_s", 0, 3600),
    ("job_ttl_s", 0, 1e9),
    ("connect_timeout_s", 0.1, 86_400),
)


def _check_number(name: str, value: object, low: float, high: float) -> int | float:
    """Return a field's value as a plain number, numpy's too; what is counted must be whole, a rate is rounded up."""
    is_whole = type(getattr(Config, name)) is int
    plain = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        plain = value if isinstance(value, int) else float(value)
    if name.endswith("_bytes_per_s") and math.isfinite(plain):
        plain = math.ceil(plain)
    if low <= plain <= high and not (is_whole and plain % 1):
        return int(plain) if is_whole else plain
    raise ConfigError(
        f"{name}={value!r} is out of range: it must be a {'whole ' if is_whole else ''}number from {_bound(low)} to "
        f"{_bound(high)}",
        field=name,
        value=value,
    )


def _check_detect(value: object) -> str | float:
    """Return a word of `DETECT_S`, or a silence in seconds."""
    if isinstance(value, str) and value in DETECT_S:
        return value
    plain = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if 0.1 <= plain <= 3600:
        return plain
    raise ConfigError(
        f"detect={value!r} is not understood: use {', '.join(map(repr, DETECT_S))}, or a number of seconds from 0.1 to "
        "3600, the silence after which a host is dead",
        field="detect",
        value=value,
    )


def _check_durable(place: object, compression: object, key_file: object) -> None:
    """Refuse credentials before they are logged or stored, and what means something else in another process."""
    scheme, is_url, rest = str(place).partition("://")
    if is_url and scheme != "file" and ("@" in rest or "?" in rest):  # a secret may have a slash in it
        raise ConfigError(
            f"durable={scheme[:16]}://...: credentials and queries have no place in it, for it is logged and stored; "
            "put credentials into the environment of the holders",
            field="durable",
        )
    if place is not None and not is_url:
        _check_path("durable", place)
    if compression not in ("none", "auto"):
        raise ConfigError(
            f"durable_compression={compression!r} is unknown: use none or auto",
            field="durable_compression",
            value=compression,
        )
    if key_file is not None:
        _check_path("durable_key_file", key_file)
    for field, value, package, is_needed in (
        ("durable", place, "obstore", is_url and scheme != "file"),
        ("durable_compression", compression, "zstandard", compression == "auto"),
        ("durable_key_file", key_file, "cryptography", key_file is not None),
    ):
        if is_needed and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{field}={value!r} needs the package {package} on every host: pip install {package}", field=field
            )


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ConfigError(
            f"{name}={value!r} is not an absolute path, the same for every process", field=name, value=str(value)
        )


def plain(value: Any) -> Any:
    """Return a field's value as it travels: several values are a list."""
    return list(value) if isinstance(value, tuple) else value


def check_name(what: str, name: object) -> str:
    """Return `name` if it may name a store, job, pin or host; else raise ConfigError, which says `what` it is of.

    Names become file names, so: a letter or digit, then up to 63 letters, digits, '.', '_' or '-'.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = repr(name)[:SHOWN_CHARS_MAX]
        raise ConfigError(
            f"{what} name {shown} is not allowed: use 1 to 64 letters, digits, '.', '_' or '-', "
            "the first a letter or digit",
            field=what,
            value=shown,
        )
    return name


def check_config(config: object) -> Config:
    """Return a caller's Config, or the defaults if it is None; ConfigError if it is something else.

    MEMSTORE_ARENA_DIR counts as a given `arena_dir` where the caller gives none: a container sets it once for all of
    its processes, and no training script need know where it mounted memory (D304).
    """
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config= is of type {type(config).__name__}: pass a memstore.Config", field="config")
    found, arena_dir = config or Config(), os.environ.get(ARENA_VARIABLE)
    return found if not arena_dir or "arena_dir" in found.given else found.with_fields({"arena_dir": arena_dir})


def check_seconds(name: str, value: object) -> float:
    """Return a time in seconds as a plain float; numpy's and torch's numbers are times, too.

    A negative time is 0, as one that is over; one of more than three years is three years.

    Raises:
        ConfigError: It is no number.
    """
    try:
        found = math.nan if isinstance(value, bool | str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if math.isnan(found):
        shown = repr(value)[:SHOWN_CHARS_MAX]
        raise ConfigError(f"{name}={shown} is no time: use a number of seconds", field=name, value=shown)
    return min(max(found, 0.0), SECONDS_MAX)


def check_limit(name: str, value: object) -> float:
    """Return a time that something may take; ConfigError if it is no time, or none at all."""
    found = check_seconds(name, value)
    if found <= 0:
        raise ConfigError(
            f"{name}={value!r} is no limit: use a number of seconds above 0", field=name, value=str(value)
        )
    return found


def check_whole(name: str, value: object, low: int = 0) -> int:
    """Return a step, rank, attempt or count as a plain int, numpy's too.

    Raises:
        ConfigError: It is no whole number from `low` on, or more than a message can carry.
    """
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if not low <= found < WHOLE_LIMIT:
        shown = repr(value)[:SHOWN_CHARS_MAX]
        raise ConfigError(
            f"{name}={shown} is out of range: it must be an int from {low} to 2**61 - 1", field=name, value=shown
        )
    return found


def check_given_whole(name: str, value: object) -> int | None:
    """Return as `check_whole` does, or None if it is not given."""
    return None if value is None else check_whole(name, value)


def _bound(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def bytes_from_text(what: str, value: object) -> int:
    """Return a size in bytes from an int or text such as "8GiB"; ConfigError if it is neither."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f'{what}={value!r} is not a size: use bytes, or text such as "8GiB"', field=what, value=value)
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()[:1]])
