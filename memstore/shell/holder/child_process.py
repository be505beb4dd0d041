"""Says whether a process is a child of another one, by the kernel's word (R8)."""

from __future__ import annotations

from pathlib import Path

from memstore.errors import ConfigError

ANCESTORS_MAX = 16


def check_child(pid: int, parent_pid: int, nonce: str) -> None:
    """Raise ConfigError unless process `pid` descends from `parent_pid`, which joined as `nonce`."""
    ancestor = pid
    for _ in range(ANCESTORS_MAX):
        ancestor = _parent_pid(ancestor)
        if ancestor == parent_pid:
            return
        if ancestor <= 1:
            break
    raise ConfigError(f"process {pid} is no child of process {parent_pid}, which joined as {nonce!r}")


def _parent_pid(pid: int) -> int:
    """Return the parent of a process; 0 if there is none (proc(5), field 4)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])
