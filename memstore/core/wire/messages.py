"""Every event that can reach the controller's catalog and every action it can order. Pure.

The catalog is a state machine: `handle(now, event) -> list[Action]`. The controller actor feeds it
from sockets and a clock; a simulator feeds it from a seeded schedule. Bodies are plain msgpack-able
values; shards travel as `[job, attempt, step, rank]`, specs as
`[digest, nbytes, chunk_bytes, chunks_count, world_size]`.

Orders to a holder (`Tell.kind`):
    journal        seq, records, reset | keep, short
                                                append records of facts (R16), to nothing (reset), or to the records of
                                                these (term, seq) alone (keep), of which some (short) say less now;
                                                answered by FactAck. Before it may come pages of its records (is_page)
    fence          job, attempt, members        refuse processes of older attempts but members (nonces) (R21)
    clock          clock_s                      the controller's clock, for the next beats to echo (R17)
    view           hosts, gone, jobs            addresses for peers: of all hosts (gone None), or of those that came or
                                                moved, and who is gone; room of other jobs is given back
    targets        job, attempt, targets, copiers
                                                where this host pushes its ranks' shards (R13); for those that copy what
                                                others hold too: [rank, its own targets, ranks that copy the same] (R34)
    reserve        job, attempt, call, ranks, guest_slots, world_size, versions
                                                claim room (R10); the call is a pin's or a fork's
    grow           as reserve                   have memory and connections ready for such room; claims nothing
    fork           job, call, what, shards      look at copies (with a call), or make manifests over their slots (R32)
    push           shard, digest, target, is_repair            copy one shard to a peer (R13, R29)
    stage          job, round, rank, shard, spec, runs          bring a shard here and verify it (R23)
    check          job, round, rank             let the rank check `into=` against the manifest (R26)
    release        job, round, rank, result     hand the staged shard to the rank
    level          job, attempt, step, level, reason, degraded  for the tickets of this host's ranks (R15)
    abandon        job, attempt, step, resume   forget an uncommitted step; put again from `resume` (R12)
    drop           shards, number, removed      free copies (R19), and the room of a removed job: [job, attempt] (R10);
                                                its processes are fenced (R21), unless it `is_refused_fork`
    persist        job, what, step, parts | specs              write slices of parts, or the marker, to durable storage;
                                                or remove it, and say so if it is torn (R31)
    markers        job, durable, call, check    list durable markers; with a step to check, look at all its slices
    dropped        job, story                   remember why a job is gone, outside the host's folder; or "" (R5)
    outdated       above                        a later life of this host was here: take a higher incarnation (R3)

Reports from a holder (`Report.kind`): sealed, freed (a drop, by its number, was obeyed), pushed, push_failed, fenced,
reserved, staged, checked, persisted, markers, forked, verified, rank_here. A rank's own seal carries `put`:
{stall_s, age_s}, and `unchanged_since`, a step, where its chunks are those of the put before; for people only
(observer.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memstore.config import check_name
from recovery.inventory import Copy, ShardId, ShardSpec

Body = dict[str, Any]
ORDINAL_LIMIT = 1 << 62  # of attempts, steps and ranks, as in manifests


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Who a holder is: announced when its session with the controller starts."""

    host_id: str
    incarnation: int
    address: str
    port: int
    machine: str = ""
    is_explicit: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostUp:
    """A holder's session began: its verified copies and its journal come with it (R16)."""

    info: HostInfo
    copies: tuple[Copy, ...] = ()
    journal: tuple[bytes, ...] = ()
    ranks: tuple[str, ...] | None = None  # nonces of the processes that live there; None: not reported
    asked_s: float = -math.inf  # by the controller's clock, when it asked for this session (R17)
    up_s: float = 0.0  # how long its holder had been up then, by its own clock
    idle_s: float = 0.0  # for how long no holder had run there before it, if no rank has used it since
    dropped: Mapping[str, str] = field(default_factory=dict)  # job -> what this host remembers of its end (R5)


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat; it echoes the last `clock` that the host was sent in this session."""

    host_id: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    clock_s: float = -math.inf
    trained: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # job -> attempt, newest step trained there


@dataclass(frozen=True, slots=True)
class HostLost:
    """A reset connection or Ray's notice: the holder process is gone (R28)."""

    host_id: str
    why: str


@dataclass(frozen=True, slots=True)
class RankCall:
    """A rank or tool asked something through its holder; answered once by `Answer`."""

    host_id: str
    call_id: int
    verb: str
    body: Body


@dataclass(frozen=True, slots=True)
class RankGone:
    """The process of a rank is proved dead by its pid (R20)."""

    host_id: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Report:
    """A holder's report of something it did; see the module docstring."""

    host_id: str
    kind: str
    body: Body


@dataclass(frozen=True, slots=True)
class FactAck:
    """A holder has every fact up to and including `seq` in its journal."""

    host_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The controller's term was confirmed: it may record facts until `until_s` (R17)."""

    until_s: float


@dataclass(frozen=True, slots=True)
class DrainsSeen:
    """The cluster manager will take these hosts away, each at its moment (wall clock)."""

    until_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; which hosts sent something meanwhile, unless each was an event of its own."""

    heard: tuple[Heard, ...] = ()


Event = HostUp | Heard | HostLost | RankCall | RankGone | Report | FactAck | LeaseRenewed | DrainsSeen | Tick


@dataclass(frozen=True, slots=True)
class Tell:
    """Send an order to one holder."""

    host_id: str
    kind: str
    body: Body


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a RankCall; `error` is (class name, message) of the memstore error to raise there."""

    host_id: str
    call_id: int
    body: Body
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log; `level` is "info" or "warning"."""

    text: str
    level: str = "info"


Action = Tell | Answer | Note


def shard_to_wire(shard: ShardId) -> list[Any]:
    """Return a shard id as plain values."""
    return [shard.job, shard.attempt, shard.step, shard.rank]


def shard_from_wire(value: Any) -> ShardId:
    """Return the shard id that `shard_to_wire` wrote; ValueError for what no rank could have put.

    The one gate for ids that come from elsewhere: jobs become folder names, numbers go into manifests and files.
    """
    if not isinstance(value, (list, tuple)) or len(value) != 4:
        raise ValueError("a shard is [job, attempt, step, rank]")
    job, *numbers = value
    check_name("job", job)
    if any(type(number) is not int or not 0 <= number < ORDINAL_LIMIT for number in numbers):
        raise ValueError(f"attempt, step and rank are whole numbers from 0 to 2**62, not {str(numbers)[:160]}")
    return ShardId(job, *numbers)


def spec_to_wire(spec: ShardSpec) -> list[Any]:
    """Return a shard spec as plain values."""
    return [spec.digest, spec.nbytes, spec.chunk_bytes, spec.chunks_count, spec.world_size]


def spec_from_wire(value: Any) -> ShardSpec:
    """Return the spec that `spec_to_wire` wrote."""
    digest, nbytes, chunk_bytes, chunks_count, world_size = value
    return ShardSpec(str(digest), int(nbytes), int(chunk_bytes), int(chunks_count), int(world_size))


def copy_to_wire(copy: Copy) -> list[Any]:
    """Return a copy (without its host) as plain values."""
    return [shard_to_wire(copy.shard), spec_to_wire(copy.spec), sorted(copy.missing)]


def copy_from_wire(value: Any, host_id: str) -> Copy:
    """Return the copy on `host_id` that `copy_to_wire` wrote."""
    shard, spec, missing = value
    return Copy(shard_from_wire(shard), spec_from_wire(spec), host_id, frozenset(int(i) for i in missing))
