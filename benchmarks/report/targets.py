"""What is promised about speed, line by line, and where the answer to a missed line stands.

A benchmark hands the constant of its line to `Record.ratio` or `Record.figure` as the target; report.py
finds the figures by it and shows every line as met, MISSED or not measured.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.report.harness import AT_LEAST, AT_MOST, Target


class Line(NamedTuple):
    """One promise: what is promised, in words, and the note with profile and reason should it be missed."""

    what: str
    note: str


LINES: dict[str, Line] = {}
TARGETS: dict[str, Target] = {}


def _at_most(limit: float, key: str, what: str, note: str) -> Target:
    return _promised(Target(limit, AT_MOST, key), what, note)


def _at_least(limit: float, key: str, what: str, note: str) -> Target:
    return _promised(Target(limit, AT_LEAST, key), what, note)


def _promised(target: Target, what: str, note: str) -> Target:
    LINES[target.line] = Line(what, note)
    TARGETS[target.line] = target
    return target


# On two cores, 1 GiB of a GPT's tensor list, warm, unless a line says otherwise.
STALL_COPY = _at_most(1.10, "stall copy", "put's stall / plain copy of the same tensors", "transfer")
STALL_DCP = _at_most(0.7, "stall dcp", "put's stall / DCP async_save's (the quicker of thread and process)", "peers")
SMALL_STALL_DCP = _at_most(0.5, "small stall dcp", "16 MiB: put's stall / DCP async_save's, the quicker", "peers")
SMALL_DONE_DCP = _at_most(0.7, "small done dcp", "16 MiB: put to committed / DCP async_save until done", "peers")
STALL_DLROVER = _at_most(1.0, "stall dlrover", "put's stall / DLRover's shared-memory save", "peers")
WAITS = _at_most(0, "waits", "waits on another process in a put's blocking part", "transfer")
SEALED_TCP = _at_least(0.60, "sealed tcp", "put to sealed on the peer: speed / raw TCP, shared cores", "transfer")
SEALED_TCP_HOSTS = _at_least(0.70, "sealed tcp hosts", "the same, hosts emulated with a core each", "transfer")
SEALED_CPU = _at_most(
    1.05, "sealed cpu", "put to sealed: CPU seconds / those of copy, TCP and digests in the same run", "transfer"
)
SEALED_TORCHFT = _at_least(
    1.2, "sealed torchft", "put to sealed on the peer: speed / torchft's HTTP transport", "peers"
)
SEALED_RAY = _at_least(4, "sealed ray", "put to sealed on the peer: speed / Ray's object store", "transfer")
TWO_WAYS = _at_most(
    0.8, "two ways", "two ranks, 1 GiB each way, put to both sealed / lm-resiliency's save + replicate", "peers"
)
FIRST_PUT_PEER = _at_most(
    0.15, "first put peer", "first put once ready / lm-resiliency's first save + replicate", "peers"
)
FIRST_PUT = _at_most(1.5, "first put", "first put once ready / warm put", "put")
COMMIT = _at_most(0.020, "commit", "put to committed beyond the last seal, 4 hosts, in seconds", "scale")
GET_LOCAL = _at_most(1.15, "get local", "get from local RAM into existing tensors / plain copy, digests checked", "get")
GET_LOCAL_SMALL = _at_most(1.35, "get local small", "the same, 256 MiB", "get")
GET_PEER = _at_least(
    0.70, "get peer", "get(step, rank=) from one peer into existing tensors: speed / raw TCP, shared cores", "get"
)
GET_PEER_HOSTS = _at_least(0.90, "get peer hosts", "the same, hosts emulated with a core each", "get")
GET_TWO_PEERS = _at_least(
    1.8, "get two peers", "get from 2 peers over 1 Gbit links into a 10 Gbit one: speed / from one peer", "get"
)
WIRE_TENTH = _at_most(12, "wire tenth", "put again, 10 % of the bytes changed: bytes on the wire, percent", "transfer")
WIRE_NONE = _at_most(1, "wire none", "put again, nothing changed: bytes on the wire, percent", "transfer")
WIRE_NATURAL = _at_most(
    2,
    "wire natural",
    "put by 4 data-parallel ranks with equal state on 4 hosts, with shard_rank=: bytes on the wire, percent",
    "wire",
)
MEMORY = _at_most(1.05, "memory", "memory used / versions reserved (R10), peak", "scale")
IDLE_CPU = _at_most(1, "idle cpu", "idle: percent of a core", "scale")
IDLE_MEMORY = _at_most(80e6, "idle memory", "idle: memory of its own, without the arena", "scale")
COPIES_MEMORY = _at_most(4.01, "copies memory", "memory of the worst host, peak / bytes put: two copies", "parity")
PARITY_MEMORY = _at_most(2.55, "parity memory", "the same, parity of 4 + 1 hosts", "parity")
PARITY_WIDE_MEMORY = _at_most(2.30, "parity wide memory", "the same, parity of 8 + 1 hosts", "parity")
PARITY_TWO_MEMORY = _at_most(3.05, "parity two memory", "the same, parity of 4 + 2 hosts", "parity")
PARITY_STALL = _at_most(1.02, "parity stall", "parity of 4 + 1 / two copies: put's stall", "parity")
PARITY_CPU = _at_most(1.2, "parity cpu", "the same: CPU seconds of all hosts, put to committed", "parity")
PARITY_CPU_PLAIN = _at_most(1.2, "parity cpu plain", "the same, links without token buckets", "parity")
PARITY_PUT = _at_most(1.2, "parity put", "the same: put to committed, links of 40 MB/s", "parity")
PARITY_WIRE = _at_most(1.02, "parity wire", "the same: bytes on the wire, of the worst host", "parity")
PARITY_GET = _at_most(1.3, "parity get", "the same: get after a lost host, links of 40 MB/s", "parity")
PARITY_LOCAL = _at_most(1.02, "parity local", "the same: a local get", "parity")
PARITY_COMPLETE = _at_most(1.1, "parity complete", "the same: a lost host until nothing is missing", "parity")
LOADER = _at_most(1.02, "loader", "step time of a data-loader-bound training, with / without memstore", "scale")
CATALOG = _at_most(1.0, "catalog", "catalog: seals of 16,384 ranks per step, seconds of one core", "scale")
CATALOG_LARGE = _at_most(5.0, "catalog large", "catalog: seals of 131,072 ranks per step, seconds of one core", "scale")
COMMIT_SENT = _at_most(1024, "commit sent", "controller: a commit of 16,384 ranks, bytes sent to a host", "scale")
COMMIT_CPU = _at_most(0.2, "commit cpu", "the same: core seconds, once the last seal is here", "scale")
CONNECT_SENT = _at_most(10e6, "connect sent", "controller: all of 16,384 ranks connect, bytes sent", "scale")
SUCCESSOR_CPU = _at_most(2.0, "successor cpu", "controller: a successor of 2,048 hosts serves, core seconds", "scale")
CATALOG_GROWTH = _at_most(1.25, "catalog growth", "catalog: seconds per rank, 16,384 / 4,096 ranks", "scale")
PLACEMENT = _at_most(2.0, "placement", "placement: 100,000 hosts in 2,500 racks, 3 replicas, seconds", "scale")
PLACEMENT_GROWTH = _at_most(10.0, "placement growth", "placement: 100,000 hosts / 25,000 hosts, seconds", "scale")
PLANNER = _at_most(2.0, "planner", "planner: 131,072 hosts, 128 lost, seconds", "scale")
PLANNER_MEMORY = _at_most(1.25, "planner memory", "planner: peak memory per host, 131,072 / 32,768 hosts", "scale")
SHARING = _at_most(
    1.03,
    "sharing",
    "training over a shaped link, a put every step: interleaved / without, time per iteration",
    "sharing",
)
MANY_STALL = _at_most(0.012, "many stall", "put's stall, 5,000 tensors of 1 KiB", "put")
FSDP2_BEYOND = _at_most(
    0.008, "fsdp2 beyond", "put's stall beyond a plain copy, 2,892 tensors of FSDP2 with AdamW", "put"
)
KIB_COMMIT = _at_most(0.006, "kib commit", "1 KiB put to committed, 1 rank", "put")
KIB_COMMIT_4 = _at_most(0.020, "kib commit 4", "1 KiB put to committed, 4 ranks on one host", "put")
GIL = _at_most(0.02, "gil", "a holder with the interpreter's lock, seconds per GB, each way", "put")
BUSY = _at_most(2.5, "busy", "put to committed beside a busy loop on each core / on idle cores", "put")
BUSY_LOSS = _at_most(1.1, "busy loss", "what those loops lose / CPU seconds of the put", "put")
IN_PLACE = _at_most(
    0.4, "in place", "a lost rank or host -> first new step, in place, new worker / Ray's restart", "inplace"
)
IN_PLACE_SPARE = _at_most(0.10, "in place spare", "the same with a spare / Ray's restart", "inplace")
IN_PLACE_SPARE_S = _at_most(2.5, "in place spare s", "the same with a spare, a lost rank, in seconds", "inplace")
IN_PLACE_FREEZE = _at_most(5, "in place freeze", "a frozen rank -> first new step, with a spare, in seconds", "inplace")
IN_PLACE_CUT = _at_most(6, "in place cut", "a host cut off -> first new step, with a spare, in seconds", "inplace")
IN_PLACE_COST = _at_most(1.01, "in place cost", "nothing is lost: in place / without, a rank's step", "inplace")
GPU_OVERLAP = _at_most(0.02, "gpu overlap", "GPU: stall / pinned copy, overlapped", "gpu")
GPU_STALL = _at_most(1.05, "gpu stall", "GPU: stall / pinned copy, not overlapped", "gpu")
GPU_D2H = _at_least(0.9, "gpu d2h", "GPU: copy out / the pinned peak", "gpu")
GPU_H2D = _at_least(0.9, "gpu h2d", "GPU: copy back / the pinned peak", "gpu")
