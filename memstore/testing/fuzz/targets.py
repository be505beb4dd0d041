"""Fuzz targets: every decoder turns any bytes into a value or a MemstoreError, and allocates little.

Each target takes bytes and returns nothing; an exception that it raises is a finding. "plan" decodes nothing: its bytes
are changes of a state between puts. Hypothesis calls the others in `make test`, and `python -m memstore.testing.fuzz`
calls all coverage-guided. `SEEDS` gives each target a few valid inputs to start from.
"""

from __future__ import annotations

import collections
import contextlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgpack
import numpy as np
import torch
from torch.testing._internal.two_tensor import TwoTensor

from memstore.core.cluster.facts import ByRank, Fact, StepCommitted
from memstore.core.durable.markers import decode_marker, encode_marker
from memstore.core.durable.slice_format import SliceHeader, decode_header
from memstore.core.format.layout import decode_layout, encode_layout
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, chunk_sizes, decode_manifest, encode_manifest
from memstore.core.journal.records import Entry, entry_from_record, is_part, part_from_record
from memstore.core.wire import codec
from memstore.core.wire import frame as wire
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import ProbeIdentity
from memstore.core.wire.orders import Lineage
from memstore.errors import MemstoreError, ProtocolError
from memstore.shell.codec.decode import decode_state
from memstore.shell.codec.encode import PlanMemory, StatePlan, copy_into, plan_state
from memstore.shell.durable.codec import Codec
from memstore.testing.fuzz import messages
from memstore.testing.fuzz.messages import sample
from recovery.inventory import DurableMarker, ShardId, ShardSpec, StepId

# -- known plans --------------------------------------------------------------------------------------
# A target whose bytes are changes of a state between puts: what a `PlanMemory` plans is what a fresh walk plans.
#
# Tensors lie at places of one pool, each with a storage of its own, so that the order of addresses is the input's.


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


def known_plan(data: bytes) -> None:
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


def _stored(known_plan: StatePlan) -> tuple[bytes, bytes]:
    """Return the layout and the stream that a put of this plan stores."""
    slots = [bytearray(_CHUNK_BYTES) for _ in range(0, known_plan.nbytes, _CHUNK_BYTES)]
    copy_into(known_plan, [memoryview(slot) for slot in slots], _CHUNK_BYTES)
    return known_plan.layout, b"".join(slots)[: known_plan.nbytes]


def plan_seeds() -> list[bytes]:
    """Return changes to begin with: buffers that swap roles and become one; ties made and broken; moves onto others."""
    codes = {change.__name__: code for code, change in enumerate(_CHANGES)}
    a_b, a, b = 4, 0, 1  # which leaves: a with b, a alone, b alone
    chains: list[list[tuple[str, int]]] = [
        [("swap", a_b), ("tie", a_b), ("swap", a_b), ("allocate", a), ("write", 0)],
        [("alias", a_b), ("write", 0), ("allocate", a), ("move", 5 << 2 | a), ("move", 9 << 2 | b), ("swap", a_b)],
        [("gather", 3 << 2), ("parameter", 2), ("empty", a), ("inner", b), ("plain", 7), ("allocate", b), ("tie", a_b)],
    ]
    return [bytes(byte for name, where in chain for byte in (codes[name], where)) for chain in chains]


# -- targets ------------------------------------------------------------------------------------------


STREAM_BYTES_MAX = 1 << 17  # a list of truths takes eight times its bytes
"""A layout that asks for a longer stream is only decoded: in the store its bytes would have to exist, too."""
CHUNK_BYTES = 4096
DECODERS = list(messages.decoders().values())


def frame(data: bytes) -> None:
    """Decode a frame: the first byte chooses between peer and stranger, and the crc need not be right."""
    is_peer, data = bool(data[:1] > b"\x7f"), data[1:]
    with contextlib.suppress(MemstoreError):  # the body of a header that is refused is decoded all the same
        header = wire.unpack_header(data[: wire.HEADER_BYTES], authenticated=is_peer)
        if header.body_bytes > wire.BODY_BYTES_MAX or header.bulk_bytes > wire.BULK_BYTES_MAX:
            raise AssertionError(f"lengths beyond their limits were let in: {header}")
        wire.check_crc(data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :])
    body(data[wire.HEADER_BYTES :], is_peer=is_peer)


def body(data: bytes, *, is_peer: bool = True) -> None:
    """Walk a body within the limits of a peer, or of a stranger."""
    items_max = wire.BODY_ITEMS_MAX if is_peer else wire.BODY_ITEMS_MAX_UNAUTHENTICATED
    bytes_max = wire.BODY_BYTES_MAX if is_peer else wire.BODY_BYTES_MAX_UNAUTHENTICATED
    with contextlib.suppress(ValueError, TypeError, RecursionError, msgpack.UnpackException):
        codec.check_body(data, items_max=items_max, bytes_max=bytes_max)


def _round_trip(decode: Callable[[bytes], Any], encode: Callable[[Any], bytes], data: bytes) -> Any:
    """Decode; require that what was decoded encodes to an equal one, and return it; None if it is refused."""
    try:
        found = decode(data)
    except MemstoreError:
        return None
    encoded = encode(found)
    if encode(decode(encoded)) != encoded:
        raise AssertionError(f"a {type(found).__name__} changed on its way")
    return found


def message(data: bytes) -> None:
    """The first byte chooses which reader takes the rest as a message."""
    decode = DECODERS[data[0] % len(DECODERS)] if data else DECODERS[0]
    found = _round_trip(decode, codec.encode, data[1:])
    if isinstance(found, ErrorMessage) and not isinstance(found.rebuilt(), MemstoreError):
        raise AssertionError(f"a peer made an error of class {type(found.rebuilt())}")


def record(data: bytes) -> None:
    """A journal record, or a host's part of one."""
    if is_part(data):
        with contextlib.suppress(ProtocolError):
            part_from_record(data)
        return
    _round_trip(entry_from_record, lambda entry: Entry(entry.term, entry.seq, entry.fact).record, data)


def manifest(data: bytes) -> None:
    """A manifest."""
    _round_trip(decode_manifest, encode_manifest, data)


def layout(data: bytes) -> None:
    """Decode a layout."""
    try:
        decode_layout(data)
    except MemstoreError:
        return


def state(data: bytes) -> None:
    """Rebuild objects from a layout and a stream of zeros."""
    try:
        nbytes = decode_layout(data).nbytes
        if nbytes <= STREAM_BYTES_MAX:
            views = [memoryview(bytearray(size)) for size in chunk_sizes(nbytes, CHUNK_BYTES)]
            decode_state(data, views, CHUNK_BYTES)
    except MemstoreError:
        return


def durable(data: bytes) -> None:
    """Decode what durable storage holds: a compressed chunk, a slice's header, a marker."""
    packed = SliceHeader(0, DURABLE_SPEC, 10, (1024, 1000), (False, True))
    for decode in (
        lambda: Codec().open_chunk(packed, 1, data, memoryview(bytearray(1024))),
        lambda: decode_header(data[4:], DURABLE_SPEC, 0, file_nbytes=int.from_bytes(data[:4], "little")),
        lambda: decode_marker(data),
    ):
        try:
            decode()
        except MemstoreError:
            continue


def _sample_states() -> list[Any]:
    tied = torch.arange(24.0).view(2, 3, 4)
    return [
        {"model": {"w": tied, "again": tied, "t": tied.transpose(0, 2)}, "step": 3},
        [None, True, 1 << 90, -1.5, 1j, "text", b"bytes", bytearray(b"x"), {1, 2}, frozenset({"a"}), ()],
        collections.OrderedDict(a=torch.float32, b=torch.device("cpu"), c=torch.Size([1, 2]), d=torch.strided),
        {
            "np": np.zeros((2, 3), [("x", "<f8"), ("y", "<U3")]),
            "s": np.float32(1),
            "d": np.dtype("<i4"),
            "e": np.zeros(0),
        },
        {
            "half": torch.zeros(3, dtype=torch.bfloat16),
            "c": torch.zeros(2, dtype=torch.complex64).conj(),
            "0": torch.tensor(1),
        },
        collections.defaultdict(list, a=[1, [2, [3]]]),
        {"losses": [0.5] * 70, "order": tuple(range(70)), "seen": [True] * 70, "last": collections.deque([1], 3)},
        {"two": TwoTensor(tied, tied + 1), "count": collections.Counter(a=1)},  # type: ignore[no-untyped-call]
        {"long": "x" * 5000, "p": torch.nn.Parameter(torch.zeros(2))},
    ]


def _manifest_seeds() -> list[bytes]:
    made = []
    for nbytes in (0, 10, 4096):
        chunks = tuple(Chunk(chunk_digest(bytes([i % 256])), n) for i, n in enumerate(chunk_sizes(nbytes, 1024)))
        made.append(encode_manifest(Manifest(ShardId("job", 1, 2, 0), 3, b"layout", nbytes, 1024, chunks)))
    return made


def _frame_seeds() -> list[bytes]:
    calls: list[tuple[Kind, dict[str, Any]]] = [
        (Kind.HELLO, {"nonce": bytes(32)}),
        (Kind.AUTH2, {"k": "client_proof", "identity": codec.encode(ProbeIdentity()), "proof": bytes(32)}),
        (Kind.EVENT, {"k": "push", "shard": ["job", 1, 2, 0], "digest": "", "target": "h", "is_repair": True}),
    ]
    packed = [(kind, msgpack.packb(content)) for kind, content in calls]
    return [b"\xff" + wire.pack_header(kind, 1, content) + content for kind, content in packed]


def _message_seeds() -> list[bytes]:
    """A small and a full message of every type, each for the first that can read it."""
    made = []
    for kind in (kind for module in messages.MODULES for kind in messages.declared(module)):
        if issubclass(kind, codec.Message):
            for is_full in (True, False):
                encoded = codec.encode(sample(kind, is_full=is_full))  # type: ignore[arg-type]
                made.append(bytes([_first_reader(encoded)]) + encoded)
    return made


def _first_reader(encoded: bytes) -> int:
    for number, decode in enumerate(DECODERS):
        try:
            decode(encoded)
        except ProtocolError:
            continue
        return number
    raise AssertionError(f"a message that nothing reads: {encoded[:200]!r}")


def _record_seeds() -> list[bytes]:
    made: list[Any] = [sample(kind, is_full=is_full) for kind in get_args(Fact) for is_full in (True, False)]
    digests = ByRank.of(("ab" * 16,) * 300, (("a", "b"),) * 300)
    made.append(StepCommitted("job", 1, 2, 300, digests, "rack", False, "", 1.5))
    parts = [Entry(1, len(made), made[-1]).part("a") or b""]
    return [Entry(1, seq, fact).record for seq, fact in enumerate(made)] + parts


def _durable_seeds() -> list[bytes]:
    part = SliceHeader(0, DURABLE_SPEC, 10, (1024, 1000), (False, True)).encode()
    size = struct.pack("<I", len(part) + 10 + 2024)
    specs = {rank: ShardSpec("cd" * 16, 10, 4, 3, 2) for rank in range(2)}
    lineage = Lineage(attempt=1, parent_attempt=None, parent_step=None)
    chunk = Codec(is_compressing=True).seal(DURABLE_SPEC, 1, b"", [bytes(952)])[2]
    return [size + part, chunk, encode_marker("job", DurableMarker(StepId(1, 2), 2, specs), lineage)]


DURABLE_SPEC = ShardSpec("ab" * 16, 3000, 1024, 3, 1)
TARGETS: dict[str, Callable[[bytes], None]] = {
    "frame": frame,
    "body": body,
    "message": message,
    "record": record,
    "manifest": manifest,
    "layout": layout,
    "state": state,
    "durable": durable,
    "plan": known_plan,
}
SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "frame": _frame_seeds,
    "body": lambda: [seed[1 + wire.HEADER_BYTES :] for seed in _frame_seeds()],
    "message": _message_seeds,
    "record": _record_seeds,
    "manifest": _manifest_seeds,
    "layout": lambda: [plan_state(sample).layout for sample in _sample_states()],
    "state": lambda: [plan_state(sample).layout for sample in _sample_states()] + [_empty_array("<U0", 1 << 50)],
    "durable": _durable_seeds,
    "plan": plan_seeds,
}


def _empty_array(dtype: str, size: int) -> bytes:
    """Return the layout of an array whose elements have no bytes, which once made numpy ask for petabytes."""
    return encode_layout(0, [], [[None, 0, dtype, [size], None, 1, None]], [], [21, 0])
