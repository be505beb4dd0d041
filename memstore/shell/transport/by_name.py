"""Opens the transport that the configuration names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from memstore.errors import ConfigError
from memstore.shell.transport.nixl import NixlTransport
from memstore.shell.transport.nixl_agent import BINDINGS
from memstore.shell.transport.transport import Transport


def open_transport(name: str, arena_file: Path, lock_fd: int) -> Transport | None:
    """Return the transport of a holder's arena; None for TCP, whose frames carry the chunks. ConfigError."""
    if name != "nixl":
        return None
    packages = [module.partition(".")[0] for module in BINDINGS]
    if not any(find_spec(package) for package in packages):
        raise ConfigError(
            f"transport='nixl' needs NVIDIA NIXL, and none of {', '.join(packages)} is here: install it with "
            "`pip install nixl`, or set transport='tcp'", field="transport",
        )  # fmt: skip
    return NixlTransport(arena_file, lock_fd)
