"""Records of runs that are played in parts: JSON files with a list of parts, each with the commit of its source."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

SOURCE_ROOT = Path(__file__).resolve().parents[2]  # the repository, unless the package was installed from a wheel
GIT_S = 10.0


def parts_of(path: Path) -> list[dict[str, Any]]:
    """Return the parts of a record; none if there is no file."""
    return list(json.loads(path.read_text(encoding="utf-8"))["parts"]) if path.exists() else []


def write_parts(path: Path, parts: list[dict[str, Any]], **sums: Any) -> None:
    """Write a record with these parts, and sums over them; a process that is killed meanwhile leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({**sums, "parts": parts}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def source_commit(digits: int = 12) -> str | None:
    """Return the commit of the source tree, with "-dirty" if files were changed; None if there is no repository."""
    if not (SOURCE_ROOT / ".git").exists():
        return None
    words = ["git", "describe", "--always", "--dirty", f"--abbrev={digits}", "--exclude=*"]
    try:
        done = subprocess.run(words, cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
