"""Mooncake Store over TCP: tensors put into another process's memory and got back. One copy, no digest.

A master, and a client that lends its memory, stand for the other host; the rank lends none, so all it puts goes there.
"""

from __future__ import annotations

import socket
import subprocess
import sysconfig
import time
from pathlib import Path

import torch
from mooncake.store import MooncakeDistributedStore

from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors

START_S = 60.0
ROOM = 2.5  # states that the other host has room for: the last step, and the next one
BUFFER_BYTES = 64 << 20


class MooncakeStore(Contestant):
    """Ways: "put"; "get", which puts first, untimed."""

    def __init__(self, task: Task) -> None:
        """Start master and other host, connect, and register the memory of the state and of what is got."""
        self._task = task
        self._got = gpt_tensors.empty_like(task.state)
        self._step = -1
        master, other = _free_ports(2)
        programs = Path(sysconfig.get_paths()["scripts"])
        nbytes = int(ROOM * gpt_tensors.total_nbytes(task.state)) + BUFFER_BYTES
        self._processes = [
            _started(programs / "mooncake_master", f"-rpc_port={master}", f"-metrics_port={_free_ports(1)[0]}"),
            _started(
                programs / "mooncake_client",
                "-host=127.0.0.1",
                f"-port={other}",
                "-metadata_server=P2PHANDSHAKE",
                f"-master_server_address=127.0.0.1:{master}",
                f"-global_segment_size={nbytes}",
            ),
        ]
        self._store = MooncakeDistributedStore()
        deadline_s = time.monotonic() + START_S
        while status := self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", f"127.0.0.1:{master}"
        ):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the master did not answer within {START_S:g} s: status {status}")
            time.sleep(0.5)
        for tensor in (*gpt_tensors.tensors(task.state), *gpt_tensors.tensors(self._got)):
            _require([self._store.register_buffer(tensor.data_ptr(), tensor.nbytes)], "register_buffer")

    def run(self, way: str, step: int) -> Stamps:
        """Put every tensor, or get every tensor into memory that is there."""
        started = now()
        self._put(step)
        if way == "get":
            started = now()
            sizes = self._where(gpt_tensors.tensors(self._got))
            got = self._store.batch_get_into(self._keys(step), *sizes)
            _require([count - wanted for count, wanted in zip(got, sizes[1], strict=True)], "get")
        ended = now()
        if self._step >= 0:
            _require([self._store.remove(key, True) for key in self._keys(self._step)], "remove")
        self._step = step
        return Stamps(started, ended, ended)

    def _put(self, step: int) -> None:
        _require(
            self._store.batch_put_from(self._keys(step), *self._where(gpt_tensors.tensors(self._task.state))), "put"
        )

    def _keys(self, step: int) -> list[str]:
        return [f"{step}/{number}" for number in range(len(gpt_tensors.tensors(self._task.state)))]

    @staticmethod
    def _where(tensors: list[torch.Tensor]) -> tuple[list[int], list[int]]:
        return [t.data_ptr() for t in tensors], [t.nbytes for t in tensors]

    def is_same(self, way: str) -> bool:
        """Compare what was got; after a put, get it now."""
        if way == "put":
            self._store.batch_get_into(self._keys(self._step), *self._where(gpt_tensors.tensors(self._got)))
        is_same = gpt_tensors.is_same(self._got, self._task.state)
        gpt_tensors.wipe(self._got)
        return is_same

    def close(self) -> None:
        """Leave, and end the other processes."""
        self._store.close()
        for process in self._processes:
            process.kill()
            process.wait()


def _started(program: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([str(program), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _require(statuses: list[int], what: str) -> None:
    failed = [status for status in statuses if status]
    if failed:
        raise RuntimeError(f"{what}: {len(failed)} of {len(statuses)} failed, the first with status {failed[0]}")


def _free_ports(count: int) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as first:
        found = [first.getsockname()[1]]
        return found + (_free_ports(count - 1) if count > 1 else [])
