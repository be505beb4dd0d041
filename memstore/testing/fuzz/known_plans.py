"""A target whose bytes are changes of a state between puts: what a `PlanMemory` plans is what a fresh walk plans.

Tensors lie at places of one pool, each with a storage of its own, so that the order of addresses is the input's.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from memstore.shell.codec.encode import PlanMemory, StatePlan, copy_into, plan_state

PLACES = 12
STRIDE_BYTES, NBYTES = 96, 64  # a place and a half: a tensor between two places overlaps both
LEAVES = ("a", "b", "c", "d")
CHANGES_MAX = 40
_CHUNK_BYTES = 4096
_FLOATS = (0.0, -0.0, float("nan"), struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000123))[0])
_PLAIN = (
    1, True, 1.0, "1", None, 1 << 63, 1 << 70, "x" * 5000, *_FLOATS, [0.5] * 70, [0.5] * 80, (0.5,) * 70, [1] * 70,
    [1.0] * 63, [1 << 63] * 70, [1, 0.5] * 40,
)  # fmt: skip


def plan(data: bytes) -> None:
    """Change a state, two bytes a change, and put it after each; what is remembered must not show."""
    _Puts(iter(data[: 2 * CHANGES_MAX])).run()


class _Puts:
    def __init__(self, data: Iterator[int]) -> None:
        self._data = data
        self._pool = np.arange(PLACES * STRIDE_BYTES + NBYTES, dtype=np.uint8)
        self._memory = PlanMemory()
        self._state: dict[str, Any] = {name: self._at(2 * number) for number, name in enumerate(LEAVES)}
        self._state |= {"inner": OrderedDict(w=self._at(2 * len(LEAVES))), "pair": [0.5, 1], "step": 0}

    def run(self) -> None:
        """Put, then change and put, until the bytes are over."""
        self._put("nothing")
        for code in self._data:
            self._change(code, next(self._data, 0))

    def _at(self, half_place: int) -> torch.Tensor:
        """Return a tensor between the places: even numbers are places, odd ones lie half in each of two."""
        start = half_place % (2 * PLACES) * STRIDE_BYTES // 2
        return torch.from_numpy(self._pool[start : start + NBYTES]).view(torch.float32)

    def _change(self, code: int, where: int) -> None:
        change = _CHANGES[code % len(_CHANGES)]
        name, other = LEAVES[where % len(LEAVES)], LEAVES[where // len(LEAVES) % len(LEAVES)]
        change(self, name, other, where)
        self._state["step"] += 1
        self._put(f"{change.__name__} of {name} with {other}")

    def _put(self, what: str) -> None:
        found, wanted = _stored(self._memory.plan(self._state)), _stored(plan_state(self._state))
        if found != wanted:
            raise AssertionError(f"after {what} a remembered plan is not that of a fresh walk")
        for _ in range(2):  # a state that was walked is remembered the second time
            self._memory.plan(self._state)

    def swap(self, name: str, other: str, _: int) -> None:
        """Let two change places."""
        self._state[name], self._state[other] = self._state[other], self._state[name]

    def tie(self, name: str, other: str, _: int) -> None:
        """Make one the other's object."""
        self._state[name] = self._state[other]

    def alias(self, name: str, other: str, _: int) -> None:
        """Give one the memory of the other."""
        self._state[name] = self._state[other].detach()

    def move(self, name: str, _: str, where: int) -> None:
        """Move one to a place, between two places, or onto another."""
        self._state[name] = self._at(where >> 2)

    def allocate(self, name: str, *_: Any) -> None:
        """Copy one to memory of its own."""
        self._state[name] = self._state[name].clone()

    def gather(self, name: str, _: str, where: int) -> None:
        """Make one a view with gaps."""
        self._state[name] = self._at(where >> 2)[::2]

    def parameter(self, name: str, _: str, where: int) -> None:
        """Change what is stored beside the bytes: class, gradient, dtype, shape."""
        dense = self._at(where >> 2)
        made = (torch.nn.Parameter(dense), torch.nn.Parameter(dense, False), dense.view(torch.int32), dense.view(4, 4))
        self._state[name] = made[where % 4]

    def empty(self, name: str, *_: Any) -> None:
        """Leave one without elements."""
        self._state[name] = torch.empty(0)

    def inner(self, name: str, *_: Any) -> None:
        """Put one inside, too."""
        self._state["inner"]["w"] = self._state[name]

    def write(self, *_: Any) -> None:
        """Write other numbers."""
        self._pool += 1

    def plain(self, _: str, __: str, where: int) -> None:
        """Put another plain value."""
        self._state["pair"][where % 2] = _PLAIN[(where >> 1) % len(_PLAIN)]


_CHANGES: tuple[Callable[[_Puts, str, str, int], None], ...] = (
    _Puts.swap,
    _Puts.tie,
    _Puts.alias,
    _Puts.move,
    _Puts.allocate,
    _Puts.gather,
    _Puts.parameter,
    _Puts.empty,
    _Puts.inner,
    _Puts.write,
    _Puts.plain,
)


def _stored(plan: StatePlan) -> tuple[bytes, bytes]:
    """Return the layout and the stream that a put of this plan stores."""
    slots = [bytearray(_CHUNK_BYTES) for _ in range(0, plan.nbytes, _CHUNK_BYTES)]
    copy_into(plan, [memoryview(slot) for slot in slots], _CHUNK_BYTES)
    return plan.layout, b"".join(slots)[: plan.nbytes]


def seeds() -> list[bytes]:
    """Return changes to begin with: buffers that swap roles and become one; ties made and broken; moves onto others."""
    codes = {change.__name__: code for code, change in enumerate(_CHANGES)}
    a_b, a, b = 4, 0, 1  # which leaves: a with b, a alone, b alone
    chains: list[list[tuple[str, int]]] = [
        [("swap", a_b), ("tie", a_b), ("swap", a_b), ("allocate", a), ("write", 0)],
        [("alias", a_b), ("write", 0), ("allocate", a), ("move", 5 << 2 | a), ("move", 9 << 2 | b), ("swap", a_b)],
        [("gather", 3 << 2), ("parameter", 2), ("empty", a), ("inner", b), ("plain", 7), ("allocate", b), ("tie", a_b)],
    ]
    return [bytes(byte for name, where in chain for byte in (codes[name], where)) for chain in chains]
