"""Declared messages: what is encoded comes back, and nothing else than a declared message is let in (R14, I20)."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from types import ModuleType
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from memstore import errors
from memstore.core.send_gate import BATCH_CHUNKS_MAX, batches
from memstore.core.wire import calls, codec, ids
from memstore.core.wire import frame as wire
from memstore.core.wire.error_message import ErrorMessage, decode_error
from memstore.core.wire.frame import BODY_BYTES_MAX, BODY_ITEMS_MAX, Kind
from memstore.errors import ProtocolError
from memstore.shell.peer.chunk_frames import RUN_BYTES, runs
from memstore.testing.fuzz import messages
from memstore.testing.fuzz.messages import sample
from recovery.inventory import Copy, ShardId, ShardSpec, StepId

calm = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


class Brought(codec.Message, frozen=True, tag="brought"):
    """Copies, with what was noted of some."""

    copies: tuple[ids.WireCopy, ...]
    notes: dict[str, str] = msgspec.field(default_factory=dict)
    took_s: float | None = None


class Dropped(codec.Message, frozen=True, tag="dropped"):
    """A step."""

    step: ids.WireStep


decode: codec.Decoder[Brought | Dropped] = codec.Decoder(Brought | Dropped)

unsigned = st.integers(0, ids.UNSIGNED_LIMIT - 1)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
shards = st.builds(ShardId, names, unsigned, unsigned, unsigned)
digests = st.binary(min_size=16, max_size=16).map(bytes.hex)
specs = st.builds(ShardSpec, digests, unsigned, unsigned, unsigned, unsigned, st.just(()), st.just(0))
copies = st.builds(Copy, shards, specs, st.just("h0"), st.frozensets(unsigned, max_size=4), decoding=st.just(0))
ROW = [["train", 1, 2, 3], ["ab" * 16, 10, 4, 3, 8], []]


@calm
@given(copies=st.lists(copies, max_size=3), took_s=st.none() | st.floats(allow_nan=False))
def test_a_message_comes_back_equal(copies: list[Copy], took_s: float | None) -> None:
    """Ids, specs and copies are the same values after their way as rows."""
    message = Brought(copies=tuple(map(ids.WireCopy.of, copies)), notes={"a": "b"}, took_s=took_s)
    again = decode(codec.encode(message))
    assert again == message
    assert isinstance(again, Brought)
    assert [row.on("h0") for row in again.copies] == copies


@calm
@given(attempt=unsigned, step=unsigned)
def test_a_step_comes_back_equal(attempt: int, step: int) -> None:
    """Also one alone."""
    again = decode(codec.encode(Dropped(step=ids.WireStep.of(StepId(attempt, step)))))
    assert again == Dropped(step=ids.WireStep(attempt, step))
    assert isinstance(again, Dropped)
    assert again.step.id == StepId(attempt, step)


def body(**fields: Any) -> dict[str, Any]:
    """What a peer may send in place of a Brought."""
    return {"k": "brought", "copies": [ROW], **fields}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param([], "Expected `object`, got `array`", id="no map"),
        pytest.param({}, "missing required field `k`", id="no kind"),
        pytest.param(body(k="bought"), "Invalid value 'bought'", id="unknown kind"),
        pytest.param(body(k=5), "Expected `str`, got `int`", id="kind of another type"),
        pytest.param({"k": "brought"}, "missing required field `copies`", id="no field"),
        pytest.param(body(more=1), "unknown field `more`", id="unknown field"),
        pytest.param({**body(), 5: 1}, "Expected `str`", id="key of another type"),
        pytest.param(body(copies={}), "got `object`", id="a map for a list"),
        pytest.param(body(copies=[ROW[:2]]), r"copies\[0\]", id="short row"),
        pytest.param(body(copies=[[*ROW, 1]]), r"copies\[0\]", id="long row"),
        pytest.param(body(notes={"a": 1}), "Expected `str`, got `int`", id="another value"),
        pytest.param(body(notes={1: "a"}), "Expected `str`, got `int`", id="another key"),
        pytest.param(body(took_s="1"), "got `str`", id="text for a number"),
        pytest.param(body(took_s=True), "got `bool`", id="truth for a number"),
        pytest.param(body(took_s=msgpack.Timestamp(1)), "ext", id="timestamp"),
        pytest.param(body(took_s=msgpack.ExtType(5, b"x")), "ext", id="extension"),
    ],
)
def test_what_is_not_declared_is_refused_by_its_place(content: Any, words: str) -> None:
    """The error names the types that may come, the place and what is wrong with it."""
    assert decode(msgpack.packb(body()))
    with pytest.raises(ProtocolError, match=rf"Brought \| Dropped: .*{words}"):
        decode(msgpack.packb(content))


@pytest.mark.parametrize(
    "shard",
    [
        *(["train", *numbers] for numbers in ((1, -1, 0), (1, 2**62, 0), (True, 7, 0), (1, 7, "0"), (1, 1.0, 0))),
        *([job, 1, 7, 0] for job in ("../../x", "", "x" * 65, "naïve", "a\0b", ".hidden", b"job", 5, "a\n")),
        *(None, "abcd", 5, {}, [], ["other", 1, 7], ["other", 1, 7, 0, 0]),
    ],
)
def test_what_no_rank_could_have_put_is_no_shard(shard: Any) -> None:
    """Names that are no folder's, numbers of another type or beyond their limit, rows of another length."""
    with pytest.raises(ProtocolError, match=r"copies\[0\]\[0\]"):
        decode(msgpack.packb(body(copies=[[shard, *ROW[1:]]])))


@pytest.mark.parametrize("digest", ["", "AB" * 16, "ab" * 15, "ab" * 16 + "\n", b"ab" * 16, 5])
def test_what_is_no_digest_is_no_spec(digest: Any) -> None:
    """A digest is 32 small hexadecimal digits."""
    with pytest.raises(ProtocolError, match=r"copies\[0\]\[1\]"):
        decode(msgpack.packb(body(copies=[[ROW[0], [digest, 10, 4, 3, 8], []]])))


def pairs(*entries: tuple[bytes, bytes]) -> bytes:
    """A map of these packed entries, with any keys."""
    return bytes([0x80 | len(entries)]) + b"".join(key + value for key, value in entries)


KIND = (msgpack.packb("k"), msgpack.packb("brought"))
COPIES = (msgpack.packb("copies"), msgpack.packb([]))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pairs(KIND, COPIES, COPIES), id="field"),
        pytest.param(pairs(KIND, KIND, COPIES), id="kind"),
        pytest.param(
            pairs(KIND, COPIES, (msgpack.packb("notes"), pairs(*[(b"\xa1a", b"\xa1b")] * 2))), id="in a field"
        ),
        pytest.param(pairs(KIND, COPIES, (b"\xd9\x06copies", b"\x90")), id="written in another way"),
    ],
)
def test_a_key_that_comes_twice_is_refused(data: bytes) -> None:
    """Two readers of such a map could see two messages."""
    assert decode(pairs(KIND, COPIES)) == Brought(copies=())
    with pytest.raises(ProtocolError, match="different keys"):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x81\xa1k", id="cut short"),
        pytest.param(pairs(KIND, COPIES) + b"\x00", id="bytes after the end"),
        pytest.param(b"\x81\xa1k\xa2\xff\xfe", id="text that is not utf-8"),
        pytest.param(b"\x81\xa1k\xdd\xff\xff\xff\xff", id="array of 2**32-1"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of 2**32-1"),
        pytest.param(b"\x81\xa1k\xdb\xff\xff\xff\xff", id="text of 2**32-1"),
        pytest.param(b"\x81\xa1k\xc6\xff\xff\xff\xff", id="bytes of 2**32-1"),
        pytest.param(b"\x81\xa1k\xc7\x00\x05", id="empty extension"),
        pytest.param(b"\x81\xa1k\x81\x90\x01", id="list as a key"),
        pytest.param(b"\x81\xa1k" + b"\x91" * 100 + b"\x90", id="deep"),
        pytest.param(b"\x81\xa1k" + b"\x91" * 100_000 + b"\x90", id="far too deep"),
        pytest.param(b"\x81\xa1k" + b"\xdd\x00\x00\x10\x00" * 900 + bytes(4096), id="lengths in lengths"),
        pytest.param(pairs(KIND, (COPIES[0], b"\xdd\x01\x00\x00\x00")), id="16 million elements in a short list"),
        pytest.param(b"\x81\xa1k\xdd\x00\xf0\x00\x00" + b"\x90" * 0xF00000, id="15 million empty arrays"),
        pytest.param(bytes(BODY_BYTES_MAX + 1), id="over the limit"),
    ],
)
def test_hostile_bytes_are_refused_while_they_are_small(data: bytes) -> None:
    """Each trick of the format is a ProtocolError that costs little memory (fault F33)."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(data)
        # What the pointers of all elements that a body may have take, a few times over: lengths may lie in lengths.
        assert tracemalloc.get_traced_memory()[1] < 32 * BODY_ITEMS_MAX
    finally:
        tracemalloc.stop()


def test_the_elements_of_all_containers_are_counted_together() -> None:
    """Many small rows count like one long one."""
    count = BODY_ITEMS_MAX // 17 + 1  # elements of a row, its own place among them
    content = body(copies=[ROW] * count)
    with pytest.raises(ProtocolError, match="1,048,576 elements"):
        decode(msgpack.packb(content))
    content = body(copies=[ROW] * (count - 2))
    assert len(decode(msgpack.packb(content)).copies) == count - 2  # type: ignore[union-attr]


def test_a_decoder_may_have_tighter_limits() -> None:
    """For strangers: fewer elements, fewer bytes."""
    data = codec.encode(Brought(copies=(), notes={str(i): "" for i in range(20)}))
    for limits in ({"items_max": 20}, {"bytes_max": 50}):
        tight: codec.Decoder[Brought] = codec.Decoder(Brought, **limits)
        assert tight(codec.encode(Brought(copies=())))
        with pytest.raises(ProtocolError, match=r"20 elements|50 bytes"):
            tight(data)


@pytest.mark.parametrize("notes", [{"a": "\ud800"}, {"a": "x" * BODY_BYTES_MAX}])
def test_what_no_peer_could_read_is_refused_by_the_sender(notes: dict[str, str]) -> None:
    """A message of ours that is no UTF-8, or too long, is an error here, not there."""
    with pytest.raises(ProtocolError, match="Brought"):
        codec.encode(Brought(copies=(), notes=notes))


@calm
@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_protocol_error(data: bytes) -> None:
    """No bytes at all make a decoder do anything else."""
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert isinstance(message, codec.Message)


def test_messages_cannot_be_changed() -> None:
    """What is decoded may be handed to any part."""
    message = Brought(copies=())
    with pytest.raises(AttributeError):
        message.copies = ()  # type: ignore[misc]
    assert msgspec.structs.replace(message, took_s=1.0).took_s == 1.0


def test_replies_are_decoded_without_making_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads decode them at once; a decoder that one of them made would end the process of the other."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a decoder is made")

    monkeypatch.setattr(msgspec.msgpack, "Decoder", refuse)
    assert len(get_args(calls.RankCall)) > 20
    for kind in get_args(calls.RankCall):
        assert codec.reply_decoder(kind) is codec.reply_decoder(kind)


# -- test chunk run -----------------------------------------------------------------------------------
# How a shard's chunks are cut into requests and frames.


@given(chunks=st.lists(st.integers(0, 10_000), unique=True, max_size=400), streams=st.integers(1, 8))
def test_every_chunk_is_asked_for_once_in_order(chunks: list[int], streams: int) -> None:
    """Nothing is left out or doubled, and no request is longer than it may be."""
    cut = list(batches(chunks, streams))
    assert list(itertools.chain.from_iterable(cut)) == chunks
    assert all(0 < len(batch) <= BATCH_CHUNKS_MAX for batch in cut)


@given(count=st.integers(1, 400), streams=st.integers(1, 8))
def test_all_streams_have_work_from_the_start(count: int, streams: int) -> None:
    """A small shard is cut so that no stream is idle if there are chunks for it, or nearly."""
    cut = list(batches(range(count), streams))
    assert len(cut) >= min(streams, -(-count // -(-count // streams)))


@given(sizes=st.lists(st.integers(1, 1 << 26), max_size=60))
def test_frames_hold_as_many_chunks_as_fit(sizes: list[int]) -> None:
    """In order, at least one each, and never two where the next would have fitted."""
    cut = [sizes[part] for part in runs(sizes)]
    assert list(itertools.chain.from_iterable(cut)) == sizes
    assert all(sum(run) <= RUN_BYTES or len(run) == 1 for run in cut)
    assert all(sum(run) + after[0] > RUN_BYTES for run, after in itertools.pairwise(cut))


# -- test error message -------------------------------------------------------------------------------
# Errors of the other side: their class, message and plain context cross, and nothing that a peer could abuse (I20).


ERROR_CLASSES = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
values: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20)


def sent(error: BaseException) -> errors.MemstoreError:
    """What the other side raises for an error."""
    return decode_error(codec.encode(ErrorMessage.of(error))).rebuilt()


@pytest.mark.parametrize("kind", ERROR_CLASSES)
def test_every_error_crosses_the_wire_as_its_class(kind: type[errors.MemstoreError]) -> None:
    """Class, message and simple context survive; objects in the context do not."""
    back = sent(kind("three words here", operation="call", waited_s=1.5, ranks=(1, 2), secret=object()))
    assert type(back) is kind
    assert str(back) == "three words here"
    assert vars(back) == {"operation": "call", "waited_s": 1.5, "ranks": [1, 2]}


def test_an_error_that_is_not_ours_crosses_as_internal_error() -> None:
    """A bug at the peer names its type and text, and text that is not valid Unicode (a path) does not stop it."""
    back = sent(OSError("no file \udcff"))
    assert type(back) is errors.InternalError
    assert str(back) == "OSError: no file ?"


@given(st.text(max_size=20), st.text(max_size=20), st.dictionaries(st.text(max_size=8), values | st.lists(values)))
def test_any_error_message_gives_a_memstore_error(error: str, message: str, context: dict[str, Any]) -> None:
    """A peer cannot choose a class outside the tree or set private attributes."""
    body = {"k": "error", "error": error, "message": message, "context": context}
    rebuilt = decode_error(msgpack.packb(body)).rebuilt()
    assert isinstance(rebuilt, errors.MemstoreError)
    assert not any(name.startswith("_") for name in vars(rebuilt))


def test_an_unknown_error_name_and_private_context_are_harmless() -> None:
    """`SystemExit` or `__class__` from a peer are just words."""
    context: Any = {"__class__": "x", "__notes__": "y", "host": "a"}
    rebuilt = ErrorMessage(error="SystemExit", message="m", context=context).rebuilt()
    assert type(rebuilt) is errors.MemstoreError
    assert vars(rebuilt) == {"host": "a"}


@pytest.mark.parametrize("context", [5, {"a": {"b": 1}}, {"a": [[1]]}, {1: 2}, {"a": b""}])
def test_a_context_that_is_not_plain_is_no_error_message(context: Any) -> None:
    """Values and flat lists by name, and nothing deeper."""
    with pytest.raises(errors.ProtocolError, match="context"):
        decode_error(msgpack.packb({"k": "error", "error": "MemstoreError", "message": "", "context": context}))


# -- test wire ----------------------------------------------------------------------------------------
# Frames: what is packed comes back, and nothing a stranger sends gets past the limits (R14, I20).


@calm
@given(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=100), st.integers(0, wire.BULK_BYTES_MAX))
def test_headers_round_trip(kind: Kind, request_id: int, body: bytes, bulk_bytes: int) -> None:
    """A packed header has 32 bytes, unpacks to the same values, and its crc fits its body."""
    data = wire.pack_header(kind, request_id, body, bulk_bytes)
    header = wire.unpack_header(data)
    assert len(data) == wire.HEADER_BYTES == 32
    assert header[:4] == (kind, request_id, len(body), bulk_bytes)
    wire.check_crc(data, body)


def forged(**fields: int | bytes) -> bytes:
    """A header with chosen fields that pack_header would refuse."""
    default = {"magic": wire.MAGIC, "version": wire.VERSION, "kind": 10, "flags": 0, "id": 1, "body": 0, "bulk": 0}
    return struct.pack("<4sBBHQIQI", *{**default, **fields}.values(), 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"magic": b"GET "}, "not memstore"),
        ({"version": 1}, f"wire version 1, this process {wire.VERSION}"),
        ({"kind": 99}, "kind 99"),
        ({"flags": 1}, "flags 0x1"),
        ({"body": wire.BODY_BYTES_MAX + 1}, "16,777,217 bytes, the limit is 16,777,216"),
        ({"body": 2**32 - 1}, "the limit"),
        ({"bulk": wire.BULK_BYTES_MAX + 1}, "the limit is 67,108,864"),
        ({"bulk": 2**63}, "the limit"),
    ],
)
def test_bad_headers_are_refused_by_field_and_limit(fields: dict[str, int], words: str) -> None:
    """Each wrong field is named with its limit."""
    wire.unpack_header(forged())
    with pytest.raises(errors.ProtocolError, match=words):
        wire.unpack_header(forged(**fields))


def test_a_stranger_gets_handshake_kinds_small_bodies_and_no_bulk() -> None:
    """Before authentication the caps are 4 KiB and zero, and a CALL is out of order (I19)."""
    assert wire.unpack_header(forged(kind=1, body=4096), authenticated=False).kind is Kind.HELLO
    for fields in ({"kind": 10}, {"kind": 1, "body": 4097}, {"kind": 1, "bulk": 1}):
        with pytest.raises(errors.ProtocolError):
            wire.unpack_header(forged(**fields), authenticated=False)


@calm
@given(st.binary(max_size=64) | st.binary(min_size=27, max_size=27).map(lambda tail: b"MSTO\x02" + tail))
def test_any_header_bytes_give_a_header_within_limits_or_a_protocol_error(data: bytes) -> None:
    """No bytes at all make unpack_header do anything else."""
    try:
        header = wire.unpack_header(data)
    except errors.ProtocolError:
        return
    assert header.body_bytes <= wire.BODY_BYTES_MAX
    assert header.bulk_bytes <= wire.BULK_BYTES_MAX


@calm
@given(st.integers(0, 35 * 8 - 1))
def test_every_flipped_bit_of_header_or_body_is_noticed(bit: int) -> None:
    """One flipped bit anywhere is a ProtocolError from the fields or from the crc (fault F21)."""
    body = b"\x81\xa1a"
    frame = bytearray(wire.pack_header(Kind.EVENT, 5, body, 7) + body)
    frame[bit // 8] ^= 1 << bit % 8

    def receive() -> None:
        wire.unpack_header(frame[:32])
        wire.check_crc(frame[:32], frame[32:])

    with pytest.raises(errors.ProtocolError):
        receive()


# -- dialects -----------------------------------------------------------------------------------------
# The declared messages of all dialects: each comes back as it was sent, is bounded, and says what it is.


KINDS = [kind for module in messages.MODULES for kind in messages.declared(module)]
MESSAGES: list[type[codec.Message]] = [kind for kind in KINDS if issubclass(kind, codec.Message)]
DECODERS = messages.decoders()


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_full", [True, False])
def test_every_message_is_read_by_a_process_and_comes_back_equal(kind: type[codec.Message], is_full: bool) -> None:
    """With all fields set, and with as few as it may have."""
    message = sample(kind, is_full=is_full)
    assert isinstance(message, kind)
    readers = 0
    for decode in DECODERS.values():
        try:
            found = decode(codec.encode(message))
        except ProtocolError:
            continue
        assert found == message
        assert type(found) is kind
        readers += 1
    assert readers


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_says_what_it_is(kind: type[msgspec.Struct]) -> None:
    """In one sentence."""
    first = (kind.__doc__ or "").splitlines()[0]
    assert first.endswith((".", ":"))
    assert not kind.__struct_config__.weakref
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.forbid_unknown_fields


def depth(node: Any) -> int:
    """Return how many containers a value of a type may have inside each other; TypeError if that is unknown."""
    match node:
        case inspect.StructType():
            return 1 + max((depth(field.type) for field in node.fields), default=0)
        case inspect.Metadata():
            return depth(node.type)
        case inspect.UnionType():
            return max(map(depth, node.types))
        case inspect.VarTupleType() | inspect.ListType():
            return 1 + depth(node.item_type)
        case inspect.TupleType():
            return 1 + max(map(depth, node.item_types))
        case inspect.DictType():
            return 1 + max(depth(node.key_type), depth(node.value_type))
        case inspect.IntType() | inspect.StrType() | inspect.BytesType() | inspect.FloatType():
            return 0
        case inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            return 0
    raise TypeError(f"{node} may hold anything")


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_no_field_may_hold_anything(kind: type[codec.Message]) -> None:
    """Every type is known to its depth: that is what bounds a body's."""
    assert depth(inspect.type_info(kind)) <= 16


@pytest.mark.parametrize("module", messages.MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_two_messages_of_a_module_have_one_tag(module: ModuleType) -> None:
    """A tag names one message, in any direction it goes."""
    tags = [kind.__struct_config__.tag for kind in messages.declared(module) if issubclass(kind, codec.Message)]
    assert len(set(tags)) == len(tags)
    assert all(isinstance(tag, str) and tag == tag.lower() for tag in tags)


def test_no_two_types_have_one_name() -> None:
    """One word, one meaning: also where the modules differ."""
    names = [kind.__name__ for kind in KINDS]
    assert sorted(set(names)) == sorted(names)
    assert len(DECODERS) >= len({kind for kind in MESSAGES if issubclass(kind, codec.Request)})
