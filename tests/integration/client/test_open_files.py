"""Opening files of the arena folder when the process or the machine has no descriptor left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore.core.wire.handshake import ProbeIdentity
from memstore.errors import ConfigError, PeerUnreachable
from memstore.shell.arena.folder import make_folder, open_file
from memstore.shell.net.listener import connect_tcp, connect_unix


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[int]:
    """Let this process open no further file; yields its limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        yield lowest
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_open_files_is_said_with_the_limit(tmp_path: Path) -> None:
    """A process without descriptors left gets the limit and `ulimit -n`, not that a file has a wrong mode."""
    folder = make_folder(tmp_path, store="s", host="h")
    with no_descriptor_left() as limit, pytest.raises(ConfigError, match=rf"limit of {limit} open files.*ulimit -n"):
        open_file(folder, "slots", os.O_RDWR | os.O_CREAT)


def test_a_connection_without_a_descriptor_is_one_that_failed(tmp_path: Path) -> None:
    """So a rank tries again: of another error the thread that brings its link back would end, and the link with it."""
    with no_descriptor_left():
        with pytest.raises(PeerUnreachable, match="Too many open files"):
            connect_unix(tmp_path / "holder.sock", timeout_s=1.0)
        with pytest.raises(PeerUnreachable, match="Too many open files"):
            connect_tcp("127.0.0.1", 9, secret=None, store="s", identity=ProbeIdentity(), timeout_s=1.0)
