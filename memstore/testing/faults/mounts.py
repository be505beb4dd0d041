"""File systems that a drill mounts over a folder of its own, and unmounts again. Needs root."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from memstore.errors import DrillError

MOUNT_S = 20.0
BUSY_S = 5.0  # limit for a write that is under way; after it, the file system is detached while in use
POLL_S = 0.05


def mount(options: Sequence[str], source: str, at: Path) -> None:
    """Mount a file system over a folder; on failure raise DrillError with the message of `mount`."""
    _run(["mount", *options, source, str(at)], f"cannot mount a file system over {at}")


def mount_tmpfs(at: Path, size: int | str) -> None:
    """Mount an empty memory file system over a folder, for this user alone."""
    mount(["-t", "tmpfs", "-o", f"size={size},mode=0700"], "memstore-drill", at)


def make_ext4(image: Path, nbytes: int) -> None:
    """Make a sparse file of `nbytes` with an ext4 file system, for a mount with `-o loop`."""
    with image.open("wb") as file:
        file.truncate(nbytes)
    _run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], f"cannot make a file system in {image}")


def unmount(at: Path) -> None:
    """Unmount a file system, also if a process still has a file of it open."""
    deadline_s = time.monotonic() + BUSY_S
    while time.monotonic() < deadline_s:
        if subprocess.run(["umount", str(at)], capture_output=True, timeout=MOUNT_S, check=False).returncode == 0:
            return
        time.sleep(POLL_S)
    _run(["umount", "-l", str(at)], f"cannot unmount {at}")


def check_full(folder: Path, nbytes: int) -> str:
    """Return, as text, that a file of `nbytes` does not fit into a folder; raise DrillError if it does."""
    probe = folder / ".drill-probe"
    try:
        probe.write_bytes(bytes(nbytes))
    except OSError as exc:
        if exc.errno == errno.ENOSPC:
            return f"a write of {nbytes >> 10} KiB there ends in ENOSPC (checked)"
        raise DrillError(f"a write of {nbytes >> 10} KiB there ended in {exc}, not in ENOSPC") from exc
    finally:
        probe.unlink(missing_ok=True)
    raise DrillError(f"{nbytes >> 10} KiB could be written to {folder}: the fault did not take effect")


@functools.cache
def mount_problem() -> str | None:
    """Return why this process cannot mount a file system, or None if it can."""
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    if missing := [tool for tool in ("mount", "umount") if shutil.which(tool) is None]:
        return f"mounting a file system needs the tools {', '.join(missing)}"
    with tempfile.TemporaryDirectory(prefix="memstore-drill-") as folder:
        try:
            mount_tmpfs(Path(folder), "64k")
        except DrillError as exc:
            return str(exc)
        unmount(Path(folder))
    return None


def _run(argv: list[str], what: str) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=MOUNT_S, check=False)
    except (OSError, subprocess.SubprocessError) as exc:
        raise DrillError(f"{what}: {exc}") from exc
    if done.returncode:
        raise DrillError(f"{what}: {done.stderr.strip() or f'{argv[0]} ended with {done.returncode}'}")
