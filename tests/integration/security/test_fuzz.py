"""Any bytes at all: every decoder gives a value or an error of ours, and takes no memory to speak of (I20).

The targets are those of `make fuzz`, which looks for new paths with them; here they meet mutated valid inputs, the same
ones in every run.
"""

from __future__ import annotations

import functools
import re
import tracemalloc

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repository import ROOT

from memstore.core.format.manifest import MANIFEST_BYTES_MAX, decode_manifest
from memstore.errors import ProtocolError
from memstore.testing.fuzz import targets
from memstore.testing.fuzz.targets import SEEDS, TARGETS

MEMORY_BYTES = 2 << 20
"""For inputs of a few hundred bytes: room for a stream of STREAM_BYTES_MAX, and not for what a length promises."""


seeds_of = functools.cache(lambda target: SEEDS[target]())


@st.composite
def mutated(draw: st.DrawFn, target: str) -> bytes:
    """A valid input with up to eight edits, or noise."""
    seeds = seeds_of(target)
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 8))):
        at, size = draw(st.integers(0, len(data))), draw(st.integers(0, 8))
        edit = draw(st.sampled_from(["set", "flip", "cut", "insert", "repeat", "splice"]))
        if edit == "cut":
            del data[at : at + size]
        elif edit == "insert":
            data[at:at] = draw(st.binary(max_size=8) | st.integers(0, 2**64 - 1).map(msgpack.packb))
        elif edit == "repeat":
            data[at:at] = data[at : at + size] * draw(st.integers(1, 20))
        elif edit == "splice":
            data[at:] = draw(st.sampled_from(seeds))[at:]
        elif at < len(data):
            data[at] = draw(st.integers(0, 255)) if edit == "set" else data[at] ^ 1 << size % 8
    return bytes(data) if draw(st.integers(0, 9)) else draw(st.binary(max_size=200))


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "plan"])
def test_any_bytes_are_a_value_or_an_error_of_ours(target: str) -> None:
    """Nothing but an error of the tree comes out, and the peak of memory stays small."""

    @settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(mutated(target))
    def try_one(data: bytes) -> None:
        tracemalloc.start()
        try:
            TARGETS[target](data)
            assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
        finally:
            tracemalloc.stop()

    for seed in seeds_of(target):
        TARGETS[target](seed)
    try_one()


def test_a_target_reports_an_error_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that lets a KeyError through is a finding."""

    def careless(data: bytes) -> None:
        raise KeyError("row")

    monkeypatch.setattr(targets, "decode_manifest", careless)
    with pytest.raises(KeyError):
        TARGETS["manifest"](b"")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xdd\x01\x00\x00\x00" + b"\x90" * (16 << 20), id="16 million empty arrays"),
        pytest.param(b"\x9a" + (b"\x9a" + b"\x90" * 10) * (1 << 20), id="arrays of arrays"),
        pytest.param(b"\xdd\x00\xff\xff\xf0" * 500 + b"\xc0" * (1 << 20), id="lengths in lengths"),
        pytest.param(b"\xdf\x00\xff\xff\xff" + b"\xc0" * (1 << 20), id="map"),
        pytest.param(b"\x9a" * 1_000_000, id="deep"),
        pytest.param(bytes(MANIFEST_BYTES_MAX + 1), id="over the limit"),
    ],
)
def test_a_manifest_that_unfolds_is_refused_while_it_is_small(data: bytes) -> None:
    """A holder decodes manifests of peers: a bomb costs it next to nothing (it cost 1.2 GB)."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_manifest(data)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


# -- test threat model --------------------------------------------------------------------------------
# Every promise of the threat model, docs/operate/security.md, names tests that exist.


def test_every_promise_names_its_tests() -> None:
    """Each row of the table of promises has a test, each test that is named is there, and the README leads here."""
    text = (ROOT / "docs/operate/security.md").read_text(encoding="utf-8")
    promises = text.partition("## What we promise")[2].partition("\n## ")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 8
    assert all("`test_" in row for row in rows)
    named = set(re.findall(r"`(test_\w+)`", text))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert named - written == set()
    assert "(docs/operate/security.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
