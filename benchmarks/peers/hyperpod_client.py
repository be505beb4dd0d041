"""The client of HyperPod's managed tiered checkpointing, before a stand-in for the daemon that AWS runs on each host.

What the daemon does beside keeping the bytes is not here, so only the client is measured.
"""

from __future__ import annotations

import http.server
import multiprocessing
import shutil
import socketserver
import uuid
from collections import OrderedDict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    SageMakerTieredStorageReader,
    SageMakerTieredStorageWriter,
)
from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks.peers.contestant import Contestant, Stamps, Task, now
from benchmarks.rigs import gpt_tensors

# -- hyperpod stand in --------------------------------------------------------------------------------
# A stand-in for the daemon of HyperPod's tiered checkpointing: keeps what is posted to it in this process's memory.
#
# What the real one does beside that is not here, above all copies on other hosts.


KEPT = 4  # bodies: two steps, each a rank's shard and the metadata


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """The bodies that were posted last, each with its header Shard-Meta, by path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.namespaces: set[str] = set()
        self.shards: OrderedDict[str, tuple[bytearray, str]] = OrderedDict()


class Handler(http.server.BaseHTTPRequestHandler):
    """A POST makes a namespace or keeps a shard, a GET gives it back."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        """Make a namespace if nothing comes with it, else keep a shard."""
        body, end = bytearray(int(self.headers.get("Content-Length", 0))), 0
        while end < len(body):
            got = self.rfile.readinto(memoryview(body)[end:])
            if not got:
                return
            end += got
        if "/namespaces/" in self.path:
            self.server.namespaces.add(self._name())
        else:
            self.server.shards[self._name()] = (body, self.headers.get("Shard-Meta", ""))
            while len(self.server.shards) > KEPT:
                self.server.shards.popitem(last=False)
        self._answer(200, b"{}")

    def do_GET(self) -> None:
        """Describe a namespace, or give a shard back."""
        if self._name() in self.server.namespaces:
            self._answer(200, b"{}")
        elif self._name() in self.server.shards:
            self._answer(200, *self.server.shards[self._name()])
        else:
            self._answer(404, b"")

    def _name(self) -> str:
        return self.path.partition("?")[0]

    def _answer(self, status: int, body: bytes | bytearray, meta: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if meta:
            self.send_header("Shard-Meta", meta)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def serve(control: Connection) -> None:
    """Tell the port, and serve until the process is ended."""
    with Server() as server:
        control.send(server.server_port)
        server.serve_forever()


# -- hyperpod client ----------------------------------------------------------------------------------


LOGS = Path("/var/log/sagemaker_checkpointing")  # the client writes one file a namespace there


class HyperpodClient(Contestant):
    """One way: DCP's async_save with its storage writer, as its documentation shows."""

    def __init__(self, task: Task) -> None:
        """Start the stand-in."""
        self._task = task
        ours, theirs = multiprocessing.Pipe()
        self._stand_in = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
        self._stand_in.start()
        self._url = f"http://127.0.0.1:{ours.recv()}"
        self._config = SageMakerCheckpointConfig(namespace=f"bench-{uuid.uuid4().hex[:8]}", world_size=task.world_size)
        self._step = -1

    def run(self, way: str, step: int) -> Stamps:
        """Save, and wait until the stand-in has everything."""
        started = now()
        writer = SageMakerTieredStorageWriter(checkpoint_config=self._config, step=step)
        writer.client.config.base_url = self._url
        saved: Any = async_save(self._task.state, storage_writer=writer)
        released = now()
        saved.result(timeout=120)
        self._step = step
        return Stamps(started, released, now())

    def is_same(self, way: str) -> bool:
        """Load from the stand-in; the client compares its digest before it hands the bytes out."""
        got = gpt_tensors.empty_like(self._task.state)
        reader = SageMakerTieredStorageReader(checkpoint_config=self._config, step=self._step)
        reader.client.config.base_url = self._url
        load(got, storage_reader=reader)
        return gpt_tensors.is_same(got, self._task.state)

    def close(self) -> None:
        """End the stand-in, and remove the client's log."""
        self._stand_in.kill()
        for path in LOGS.glob(f"{self._config.namespace}*"):
            path.unlink()
        if LOGS.exists() and not any(LOGS.iterdir()):
            shutil.rmtree(LOGS)
