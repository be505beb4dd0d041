"""Fuzz targets: every decoder turns any bytes into a value or a MemstoreError, and allocates little.

Each target takes bytes and returns nothing; an exception that it raises is a finding. "plan" decodes nothing: its bytes
are changes of a state between puts. Hypothesis calls the others in `make test`, and `python -m memstore.testing.fuzz`
calls all coverage-guided. `SEEDS` gives each target a few valid inputs to start from.
"""

from __future__ import annotations

import collections
import contextlib
import struct
from collections.abc import Callable
from typing import Any, get_args

import msgpack
import numpy as np
import torch
from torch.testing._internal.two_tensor import TwoTensor

from memstore.core.cluster.facts import Fact, StepCommitted
from memstore.core.durable.markers import decode_marker, encode_marker
from memstore.core.durable.slice_format import SliceHeader, decode_header
from memstore.core.format.layout import decode_layout, encode_layout
from memstore.core.format.manifest import Chunk, Manifest, chunk_digest, chunk_sizes, decode_manifest, encode_manifest
from memstore.core.journal.records import Entry, entry_from_record
from memstore.core.wire import codec
from memstore.core.wire import frame as wire
from memstore.core.wire.error_message import ErrorMessage
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import ProbeIdentity
from memstore.core.wire.orders import Lineage
from memstore.errors import MemstoreError, ProtocolError
from memstore.shell.codec.decode import decode_state
from memstore.shell.codec.encode import plan_state
from memstore.shell.durable.codec import Codec
from memstore.testing.fuzz import dialects, known_plans
from memstore.testing.fuzz.message_samples import sample
from recovery.inventory import DurableMarker, ShardId, ShardSpec, StepId

STREAM_BYTES_MAX = 1 << 17  # a list of truths takes eight times its bytes
"""A layout that asks for a longer stream is only decoded: in the store its bytes would have to exist, too."""
CHUNK_BYTES = 4096
DECODERS = list(dialects.decoders().values())


def frame(data: bytes) -> None:
    """Decode a frame: the first byte chooses between peer and stranger, and the crc need not be right."""
    is_peer, data = bool(data[:1] > b"\x7f"), data[1:]
    try:
        header = wire.unpack_header(data[: wire.HEADER_BYTES], authenticated=is_peer)
        if header.body_bytes > wire.BODY_BYTES_MAX or header.bulk_bytes > wire.BULK_BYTES_MAX:
            raise AssertionError(f"lengths beyond their limits were let in: {header}")
        wire.check_crc(data[: wire.HEADER_BYTES], data[wire.HEADER_BYTES :])
    except MemstoreError:
        pass  # decode the body all the same
    body(data[wire.HEADER_BYTES :], is_peer=is_peer)


def body(data: bytes, *, is_peer: bool = True) -> None:
    """Walk a body within the limits of a peer, or of a stranger; a decoder sees only what has passed."""
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
    """A journal record."""
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
    for kind in (kind for module in dialects.MODULES for kind in dialects.declared(module)):
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
    made.append(StepCommitted("job", 1, 2, 300, ("ab" * 16,) * 300, (("a", "b"),) * 300, "rack", False, "", 1.5))
    return [Entry(1, seq, fact).record for seq, fact in enumerate(made)]


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
    "plan": known_plans.plan,
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
    "plan": known_plans.seeds,
}


def _empty_array(dtype: str, size: int) -> bytes:
    """Return the layout of an array whose elements have no bytes, which once made numpy ask for petabytes."""
    return encode_layout(0, [], [[None, 0, dtype, [size], None, 1, None]], [], [21, 0])
