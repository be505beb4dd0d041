"""What travels is a declared type: the product decodes nothing to maps, and reads no field of a message by a key.

mypy checks every field of a type. A key in a string it cannot check, so such a reader is found here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest
from repository import ROOT

MESSAGES = frozenset(
    {
        "answer", "body", "call", "event", "frame", "hello", "heartbeat", "identity", "inventory", "message", "order",
        "page", "reply", "report", "request", "status", "welcome",
    }
)  # fmt: skip
"""Names that the product gives to what travels."""
UNTYPED = {
    "core/wire/codec.py": "the walk that looks at every container of a body and keeps none of them",
    "core/journal/records.py": "the values of a fact in a journal, which become that fact's fields at once",
}
"""Files that decode msgpack without a type, and why."""
MAKES_DECODERS = "core/wire/codec.py"
"""Its Decoder makes msgspec's, and a class of requests that of its reply as the class is made."""


@cache
def sources() -> dict[str, ast.Module]:
    """Return the product's files: all of memstore/ but the kit."""
    root = ROOT / "memstore"
    paths = [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] != "testing"]
    return {str(path.relative_to(root)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def keys_read(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each read of a message by a key, as its line and text: `body["step"]`, `self.reply.get("step")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            base, keys = node.value, [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base, keys = node.func.value, node.args[:1] if node.func.attr in ("get", "pop", "setdefault") else []
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            base, keys = node.comparators[0], [node.left]
        else:
            continue
        name = getattr(base, "attr", getattr(base, "id", ""))
        if name in MESSAGES and any(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
            yield node.lineno, ast.unparse(node)


def untyped_decodes(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that decode msgpack without a type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            is_typed = len(node.args) > 1 or any(word.arg == "type" for word in node.keywords)
            if (
                (node.func.attr in ("unpackb", "unpack", "Unpacker") and name.startswith("msgpack."))
                or (name in ("msgspec.msgpack.decode", "msgpack.decode") and not is_typed)
                or (name in ("msgspec.msgpack.Decoder", "msgpack.Decoder") and not node.args)
            ):
                yield node.lineno


def late_decoders(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of functions in which a decoder is made, or bytes are decoded as a type for which none is."""
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    )
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("Decoder", "msgspec.")):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name == "Decoder" or (name == "decode" and any(word.arg == "type" for word in node.keywords)):
                yield node.lineno


def test_no_message_is_read_by_a_key() -> None:
    """A field of a type is named by its reader, so that mypy sees each reader."""
    found = [
        f"memstore/{name}:{line}: {text}: read the field of its type"
        for name, tree in sources().items()
        for line, text in keys_read(tree)
    ]
    assert not found, "\n".join(found)


def test_nothing_is_decoded_to_maps() -> None:
    """Bytes become a declared type (`core/wire/codec.py`: Decoder), or are refused."""
    found = [
        f"memstore/{name}:{line}: decode it as a type"
        for name, tree in sources().items()
        if name not in UNTYPED
        for line in untyped_decodes(tree)
    ]
    assert not found, "\n".join(found)


def test_decoders_are_made_at_import() -> None:
    """Two threads of which one makes the decoder of a type that the other decodes end their process with SIGSEGV."""
    found = [
        f"memstore/{name}:{line}: make the decoder once, in the module"
        for name, tree in sources().items()
        if name != MAKES_DECODERS
        for line in late_decoders(tree)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["Decoder(T)", "msgspec.json.Decoder(T)", "msgspec.json.decode(data, type=T)"])
def test_each_late_decoder_is_found(text: str) -> None:
    """And none that a module makes."""
    assert list(late_decoders(ast.parse(f"def f():\n    return {text}"))) == [2]
    assert not list(late_decoders(ast.parse(f"d = {text}\ndef f():\n    return d.decode(data)")))


def test_each_exception_is_needed() -> None:
    """A file that needs none any more is not excepted."""
    assert all(list(untyped_decodes(sources()[name])) for name in UNTYPED)


@pytest.mark.parametrize(
    "text", ['body["step"]', 'reply.get("step")', 'self.status["jobs"]', '"error" in answer', 'request.pop("k", None)']
)
def test_each_way_to_read_a_key_is_found(text: str) -> None:
    """And no index, no attribute, and no other name."""
    assert [found for _, found in keys_read(ast.parse(text))] == [ast.unparse(ast.parse(text))]
    assert not list(keys_read(ast.parse('body[0]; reply.step; self.jobs["train"]; reply.get(step)')))


@pytest.mark.parametrize("text", ["msgpack.unpackb(data)", "msgspec.msgpack.decode(data)", "msgspec.msgpack.Decoder()"])
def test_each_untyped_decode_is_found(text: str) -> None:
    """And no typed one."""
    assert list(untyped_decodes(ast.parse(text))) == [1]
    assert not list(untyped_decodes(ast.parse("msgspec.msgpack.decode(data, type=T); msgspec.msgpack.Decoder(T)")))
