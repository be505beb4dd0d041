"""The program of the processes that `processes.py` starts: one holder or one controller. It runs until it is killed."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memstore.config import Config
from memstore.core.wire.ids import Endpoint
from memstore.errors import TransportError
from memstore.shell.arena.folder import arena_folder
from memstore.shell.arena.memory_limits import arena_limit
from memstore.shell.controller import Controller, collect_rarely
from memstore.shell.durable.tier import PartsTier
from memstore.shell.holder.holder import Holder, collect_only_new
from memstore.shell.identity import HostIdentity, read_boot_id
from memstore.testing.clusters.nursery import PR_SET_PDEATHSIG, fork_children
from recovery.inventory import ShardId

# -- membership ---------------------------------------------------------------------------------------
# Records of holders and controllers as small files in one folder: processes on one machine without Ray.


class DirectoryMembership:
    """Records as files; a term is claimed by creating its file exclusively."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        for name in ("hosts", "terms"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def announce(self, host_id: str, record: dict[str, Any]) -> None:
        path = self.folder / "hosts" / host_id
        temporary = self.folder / f".{host_id}.{os.getpid()}"
        with self._reachable():
            temporary.write_text(json.dumps(record))
            temporary.replace(path)

    def hosts(self) -> dict[str, dict[str, Any]]:
        found = {}
        with self._reachable():
            paths = sorted((self.folder / "hosts").iterdir())
        for path in paths:
            try:
                found[path.name] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # withdrawn while we looked
        return found

    def withdraw(self, host_id: str) -> None:
        with self._reachable():
            (self.folder / "hosts" / host_id).unlink(missing_ok=True)

    def claim_term(self, above: int) -> int:
        term = max(above, self.newest_term()) + 1
        while True:
            try:
                with self._reachable():
                    os.close(os.open(self.folder / "terms" / str(term), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                return term
            except FileExistsError:
                term += 1

    def newest_term(self) -> int:
        with self._reachable():
            return max((int(p.name) for p in (self.folder / "terms").iterdir()), default=0)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        """Say as TransportError that the folder is out of reach: its file system is gone, or full."""
        try:
            yield
        except FileExistsError:
            raise
        except OSError as exc:
            raise TransportError(f"the membership in {self.folder} does not answer: {exc}") from exc


# -- processes ----------------------------------------------------------------------------------------
# What the processes of a cluster run.


GATE_S = 60.0


def hold_durable_writes(gate: Path) -> None:
    """Let every durable write of this process wait for a file, as if the file system hung."""
    real = PartsTier.write_slice

    def held(self: PartsTier, shard: ShardId, *args: Any, **kwargs: Any) -> int | None:
        gate.with_name(f"{gate.name}.waits-{shard.step}-{os.getpid()}").touch()
        deadline_s = time.monotonic() + GATE_S
        while not gate.exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return real(self, shard, *args, **kwargs)

    PartsTier.write_slice = held  # type: ignore[method-assign]


def main() -> None:
    """Run the role that the JSON specification on stdin names."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # this process dies with the test
    spec = json.load(sys.stdin)
    if os.getppid() != spec["parent"]:
        sys.exit(1)  # the test died before the line above took effect
    run(spec)


def serve_cluster(channel: socket.socket) -> None:
    """Run, in a nursery's child, the role that the JSON specification on the channel names; print into its log."""
    with channel, channel.makefile("rb") as lines:
        spec = json.load(lines)
    os.setsid()
    if spec["folder"]:
        os.chdir(spec["folder"])
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    run(spec)


def run(spec: dict[str, Any]) -> None:
    """Run a role until it is over."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    config = Config().with_fields(spec["config"])
    membership = DirectoryMembership(spec["membership"])
    secret = bytes.fromhex(spec["secret"])
    over = threading.Event()
    if spec["role"] == "controller":
        collect_rarely()
        Controller(
            config, membership, secret=secret, settle_s=spec["settle_s"], on_exit=lambda why: over.set()
        )  # its threads are daemons
    else:
        if spec["durable_gate"]:
            hold_durable_writes(Path(spec["durable_gate"]))
        identity = HostIdentity(spec["host"], read_boot_id(), True, spec["labels"])
        folder = arena_folder(config.arena_dir, store=config.store, host=spec["host"])
        limit = arena_limit(config, folder, hosts_on_machine=spec["hosts_on_machine"])
        holder = Holder(
            identity,
            config,
            secret=secret,
            arena_limit_bytes=limit.nbytes,
            limit_words=(limit.why, limit.warning),
            on_fatal=lambda why: os._exit(1),
        )
        info = holder.state.info
        if spec["peer_address"] is not None:  # of a proxy; peers learn it with the first session
            holder.state.info = dataclasses.replace(info, endpoints=(Endpoint(*spec["peer_address"]),))
        address, port = info.endpoints[0].address, info.endpoints[0].port
        membership.announce(info.host_id, {"address": address, "port": port, "incarnation": info.incarnation})
        collect_only_new()
    over.wait()


if __name__ == "__main__":
    fork_children(int(sys.argv[1]), serve_cluster, keeps_codes=True) if sys.argv[1:] else main()
