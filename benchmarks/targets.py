"""What is promised about speed, line by line, and where the answer to a missed line stands.

A benchmark hands the constant of its line to `Record.ratio` or `Record.figure` as the target; report.py
finds the figures by it and shows every line as met, MISSED or not measured.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.harness import AT_LEAST, AT_MOST, Target


class Line(NamedTuple):
    """One promise: what is promised, in words, and the note with profile and reason should it be missed."""

    what: str
    note: str


LINES: dict[str, Line] = {}


def _line(key: str, what: str, limit: float, side: str, note: str) -> Target:
    LINES[key] = Line(what, note)
    return Target(limit, side, key)


# On two cores, 1 GiB of a GPT's tensor list, warm, unless a line says otherwise.
STALL_COPY = _line("stall copy", "put's stall / plain copy of the same tensors", 1.10, AT_MOST, "transfer")
STALL_DCP = _line(
    "stall dcp", "put's stall / DCP async_save's (the quicker of thread and process)", 0.7, AT_MOST, "peers"
)
STALL_DLROVER = _line("stall dlrover", "put's stall / DLRover's shared-memory save", 1.0, AT_MOST, "peers")
OVERLAP = _line(
    "overlap", "overlapped put: added step time / plain copy, a step of 5 copies' time", 0.15, AT_MOST, "overlap"
)
WAITS = _line("waits", "waits on another process in a put's blocking part", 0, AT_MOST, "transfer")
SEALED_TCP = _line("sealed tcp", "put to sealed on the peer: speed / raw TCP, two streams", 0.80, AT_LEAST, "transfer")
SEALED_TORCHFT = _line(
    "sealed torchft", "put to sealed on the peer: speed / torchft's HTTP transport", 1.2, AT_LEAST, "peers"
)
SEALED_RAY = _line("sealed ray", "put to sealed on the peer: speed / Ray's object store", 4, AT_LEAST, "transfer")
TWO_WAYS = _line(
    "two ways",
    "two ranks, 1 GiB each way, put to both sealed / lm-resiliency's save + replicate",
    0.8,
    AT_MOST,
    "peers",
)
FIRST_PUT_PEER = _line(
    "first put peer", "first put once ready / lm-resiliency's first save + replicate", 0.15, AT_MOST, "peers"
)
FIRST_PUT = _line("first put", "first put once ready / warm put", 1.5, AT_MOST, "prepare")
COMMIT = _line("commit", "put to committed beyond the last seal, 4 hosts, in seconds", 0.020, AT_MOST, "scale")
GET_LOCAL = _line(
    "get local", "get from local RAM into existing tensors / plain copy, digests checked", 1.2, AT_MOST, "get"
)
GET_PEER = _line(
    "get peer", "get(step, rank=) from one peer into existing tensors: speed / raw TCP", 0.80, AT_LEAST, "get"
)
GET_TWO_PEERS = _line(
    "get two peers",
    "get from 2 peers over 1 Gbit links into a 10 Gbit one: speed / from one peer",
    1.8,
    AT_LEAST,
    "get",
)
WIRE_TENTH = _line(
    "wire tenth", "put again, 10 % of the bytes changed: bytes on the wire, percent", 12, AT_MOST, "wire"
)
WIRE_NONE = _line("wire none", "put again, nothing changed: bytes on the wire, percent", 1, AT_MOST, "wire")
WIRE_NATURAL = _line(
    "wire natural",
    "put by 4 data-parallel ranks with equal state on 4 hosts, with shard=: bytes on the wire, percent",
    2,
    AT_MOST,
    "wire",
)
MEMORY = _line("memory", "memory used / versions reserved (R10), peak", 1.05, AT_MOST, "scale")
LOADER = _line("loader", "step time of a data-loader-bound training, with / without memstore", 1.02, AT_MOST, "scale")
CATALOG = _line("catalog", "catalog: seals of 16,384 ranks per step, seconds of one core", 1.0, AT_MOST, "scale")
CATALOG_GROWTH = _line("catalog growth", "catalog: seconds per rank, 16,384 / 4,096 ranks", 1.25, AT_MOST, "scale")
PLANNER = _line("planner", "planner: 131,072 hosts, 128 lost, seconds", 2.0, AT_MOST, "scale")
PLANNER_MEMORY = _line(
    "planner memory", "planner: peak memory per host, 131,072 / 32,768 hosts", 1.25, AT_MOST, "scale"
)
SHARING = _line(
    "sharing",
    "training over a shaped link, a put every step: interleaved / without, time per iteration",
    1.03,
    AT_MOST,
    "sharing",
)
GPU_OVERLAP = _line("gpu overlap", "GPU: stall / pinned copy, overlapped", 0.02, AT_MOST, "gpu")
GPU_STALL = _line("gpu stall", "GPU: stall / pinned copy, not overlapped", 1.05, AT_MOST, "gpu")
GPU_D2H = _line("gpu d2h", "GPU: copy out / the pinned peak", 0.9, AT_LEAST, "gpu")
GPU_H2D = _line("gpu h2d", "GPU: copy back / the pinned peak", 0.9, AT_LEAST, "gpu")
