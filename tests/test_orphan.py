"""Arenas of jobs that are over expire at the next start, never before (R5)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from memstore.shell.orphan import USED_NAME, drop_orphan, touch

DAY_S = 86_400.0


def arena_in(folder: Path) -> Path:
    """Make the files of an arena."""
    (folder / "manifests").mkdir()
    for name in ("arena", "slots", "journal", "manifests/one", "secret"):
        (folder / name).write_bytes(b"x")
    return folder


def test_an_arena_nobody_connected_to_for_the_ttl_is_emptied(tmp_path: Path) -> None:
    """Bytes, slots, manifests and journal go; the folder and the secret stay."""
    folder = arena_in(tmp_path)
    touch(folder)
    old_s = time.time() - 2 * DAY_S
    os.utime(folder / USED_NAME, (old_s, old_s))

    drop_orphan(folder, DAY_S)

    assert sorted(p.name for p in folder.iterdir()) == ["secret", USED_NAME]


def test_an_arena_in_use_survives_every_start(tmp_path: Path) -> None:
    """A start alone neither empties a young arena nor makes an old one young."""
    folder = arena_in(tmp_path)
    used_s = time.time() - DAY_S / 2
    touch(folder)
    os.utime(folder / USED_NAME, (used_s, used_s))

    drop_orphan(folder, DAY_S)

    assert (folder / "arena").exists()
    assert (folder / "manifests" / "one").exists()
    assert abs((folder / USED_NAME).stat().st_mtime - used_s) < 1
