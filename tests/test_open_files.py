"""Opening files of the arena folder when the process or the machine has no descriptor left."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from memstore.errors import ConfigError
from memstore.shell.arena_folder import make_folder, open_file


def test_too_many_open_files_is_said_with_the_limit(tmp_path: Path) -> None:
    """A process without descriptors left is told the limit and `ulimit -n`, not that a file has a wrong mode."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = make_folder(tmp_path, store="s", host="h")
    lowest = os.dup(0)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        with pytest.raises(ConfigError, match=rf"its limit of {lowest} open files.*ulimit -n"):
            open_file(folder, "slots", os.O_RDWR | os.O_CREAT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
