"""What a holder says of its host for as long as it lives: in its log, and in each heartbeat, which status shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_store import host_causes

from memstore.config import Config
from memstore.shell.arena.slot_headers import SLOTS_NAME
from memstore.shell.holder.holder import Holder
from memstore.shell.host.identity import HostIdentity, read_boot_id
from memstore.shell.native import extension


def started(folder: Path) -> Holder:
    """A holder of host h1, whose limit has a warning of its own."""
    config = Config(store="t-warnings", arena_dir=str(folder), chunk_bytes=64 << 10, interface="127.0.0.1")
    return Holder(
        HostIdentity("h1", read_boot_id(), True, {}),
        config,
        secret=b"s" * 32,
        arena_limit_bytes=1 << 20,
        limit_words=("arena_bytes", "it is small"),
    )


def test_a_helper_that_was_not_built_and_a_damaged_table_are_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """pip hides what setup.py prints, so the holder says it; what was chosen by MEMSTORE_NATIVE=0 needs no word."""
    monkeypatch.setattr(extension, "built", None)
    monkeypatch.setenv("MEMSTORE_NATIVE", "0")
    holder = started(tmp_path)
    holder.close()
    assert holder.heartbeat().stats.limit_warning == "it is small"
    monkeypatch.delenv("MEMSTORE_NATIVE")
    (holder.folder / SLOTS_NAME).write_bytes(b"")
    holder = started(tmp_path)
    [words] = host_causes("host_warning", holder.heartbeat().stats)
    holder.close()
    assert words.startswith("it is small; ")
    for part in ("put aside as slots.damaged", "without its native helper", "libxxhash-dev"):
        assert part in words
        assert part in caplog.text
    monkeypatch.setattr(extension, "built", object())  # the remedy: it was installed again
    holder = started(tmp_path)
    holder.close()
    assert host_causes("host_warning", holder.heartbeat().stats) == ["it is small"]
