"""A controller and holders in the process of a test, so that it can stop them anywhere, and what it puts there."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import memstore.client.connect
from memstore.client.put import Put
from memstore.client.steps import Steps
from memstore.client.store import Store
from memstore.config import Config
from memstore.core.arena.replica_index import StoredReplica
from memstore.core.arena.replica_store import ReplicaStore
from memstore.core.arena.slot_table import PeerShare
from memstore.core.holder.reads import bring
from memstore.core.wire.ids import WireShard, WireSpec
from memstore.core.wire.orders import Bring, StepLevel
from memstore.core.wire.rank_messages import HolderEvent, PutTerms
from memstore.shell.arena.folder import arena_folder
from memstore.shell.controller import Controller
from memstore.shell.holder.holder import Holder
from memstore.shell.identity import HostIdentity, read_boot_id
from memstore.shell.rank.admin_link import store_root
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.process_main import DirectoryMembership
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.scratch import scratch_store_name
from recovery.inventory import ShardId

ARENA_BYTES = 16 << 20
WAIT_S = 60.0


class Stop:
    """Holds up the first call of a function until `go`."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.at, self.go = real, threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.at.is_set():
            self.at.set()
            assert self.go.wait(WAIT_S)
        return self.real(*args, **kwargs)


class Site:
    """A controller and holders in this process, so that a test can stop them anywhere."""

    def __init__(self, folder: Path, hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.secret = secrets.token_bytes(32)
        self.config = Config(
            store=scratch_store_name(),
            arena_bytes=ARENA_BYTES,
            interface="127.0.0.1",
            chunk_bytes=64 << 10,
            detect=2.0,
            connect_timeout_s=WAIT_S,
            keep_steps=3,
        )
        self.members = members = DirectoryMembership(folder)
        self.controller = Controller(self.config, members, secret=self.secret, settle_s=3.0)
        self.holders: dict[str, Holder] = {}
        for host in hosts:
            identity = HostIdentity(host, read_boot_id(), True, {"memstore": "replica"})
            holder = Holder(identity, self.config, secret=self.secret, arena_limit_bytes=ARENA_BYTES)
            self.holders[host] = holder
            info, first = holder.state.info, holder.state.info.endpoints[0]
            record = {"address": first.address, "port": first.port, "incarnation": info.incarnation}
            members.announce(host, record)
        self.await_serving()
        self.stores: list[Store] = []
        self.place = threading.local()
        monkeypatch.setattr(
            memstore.client.connect, "holder_folder", lambda config, labels: self.folder(self.place.host)
        )

    def await_serving(self) -> None:
        count = len(self.holders)
        wait_for(lambda: self.controller.is_serving() and len(self.controller.connected()) == count, "the store")

    def restart_controller(self) -> None:
        """Close it; another one begins with what journals have."""
        self.controller.close()
        self.controller = Controller(self.config, self.members, secret=self.secret, settle_s=3.0)
        self.await_serving()

    def folder(self, host: str) -> Path:
        return arena_folder(self.config.arena_dir, store=self.config.store, host=host)

    @property
    def replicas(self) -> ReplicaStore:
        return self.holders["a"].replicas

    def connect(self, key: str = "", *, job: str = "job", ranks: int = 0, **options: Any) -> list[Store]:
        """One rank per host, or so many, of a new launch, or of the one that has this key."""
        key, hosts = key or secrets.token_hex(4), list(self.holders)
        world_size = ranks or len(hosts)

        def join(rank: int) -> Store:
            self.place.host = hosts[rank % len(hosts)]
            return memstore.client.connect.connect(
                job, rank=rank, world_size=world_size, attempt=key, config=self.config, **options
            )

        stores = together(*[lambda r=rank: join(r) for rank in range(world_size)])
        self.stores += stores
        return stores

    def close(self) -> None:
        for store in self.stores:
            store._link.close()
        self.controller.close()
        for holder in self.holders.values():
            holder.close()
        shutil.rmtree(store_root(self.config), ignore_errors=True)


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S * 2) for future in [pool.submit(call) for call in calls]]


def bring_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have holders bring whole shards into slots, as where several ranks of a host read one (R34)."""
    monkeypatch.setattr(bring, "comes_here", lambda state, order: True)


def make_ready(holder: Holder, stored: StoredReplica) -> None:
    """Bring a shard that is here for a reader, as number 1."""
    order = Bring(
        read=1,
        job=stored.shard.job,
        shard=WireShard.of(stored.shard),
        spec=WireSpec.of(stored.spec),
        chunks=None,
        attempt=1,
        holders=(),
        durable=None,
        runs=(),
        reader="",
        use="read",
    )
    assert holder.io.run(bring._bring, holder.state, order) == {}


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100_000,), value)}


def break_link(store: Store) -> None:
    """End the channel and wait until the store is connected on another one."""
    channel = store._link.channel
    channel.abort()
    wait_for(lambda: store._link.channel is not channel, "a new link")


# -- rank site ----------------------------------------------------------------------------------------
# A holder with one rank's link, whose slots are filled and submitted.


CHUNK_BYTES = 64 << 10
SHARE_SLOTS = 6
STEP = 5
SHARD = ShardId("job", 1, STEP, 0)


class RankSite:
    """A holder without a controller, and a rank of this process with all of its share leased."""

    def __init__(self) -> None:
        self.config = Config(
            store=scratch_store_name(),
            arena_bytes=4 << 20,
            chunk_bytes=CHUNK_BYTES,
            interface="127.0.0.1",
            scrub_bytes_per_s=0,
        )
        self.begin()
        self.levels: list[tuple[int, str]] = []
        self.link = HolderLink(self.holder.folder, nonce="n", job="job", rank=0, attempt=1)
        self.link.on_event = self._note
        wait_for(lambda: len(self.link.leases.free) == SHARE_SLOTS, "the lease")

    def _note(self, event: HolderEvent) -> None:
        if isinstance(event, StepLevel):
            self.levels.append((event.step, event.level))

    def begin(self) -> None:
        """A holder starts and adopts what is there; the job has claimed its room."""
        identity = HostIdentity("a", read_boot_id(), True, {})
        self.holder = Holder(identity, self.config, secret=b"s" * 32, arena_limit_bytes=4 << 20)
        self.holder.replicas.claim("job", PeerShare(1, {0: SHARE_SLOTS}, 0))

    def begin_put(self, step: int = STEP) -> Put:
        """Begin a put, which has no slots yet."""
        steps = Steps(self.link)
        return Put(self.link, steps, steps.new(step, 0, 0.0), PutTerms(attempt=1, step=step, world_size=1))

    def stage(self, count: int = 3, step: int = STEP) -> Put:
        """Fill slots, as the training process does."""
        put = self.begin_put(step)
        assert put.extend(count, WAIT_S)
        for number, view in enumerate(put.views()):
            view[:] = bytes([number + 1]) * CHUNK_BYTES
        return put

    def is_whole(self, stored: int = 0) -> bool:
        """Every slot of the share is free to fill by the rank, but those of what is stored."""
        leases = self.link.leases
        with leases.changed:
            ours = sorted(leases.free)
            is_quiet = not leases.unsealed and leases.held() == ours
        with self.holder.replicas.lock:
            leased = {o.pid: sorted(n) for o, n in self.holder.replicas.table.leases.items() if n}
        return is_quiet and len(set(ours)) == SHARE_SLOTS - stored and leased == {os.getpid(): ours}

    def close(self) -> None:
        self.link.close()
        self.holder.close()
        shutil.rmtree(store_root(self.config), ignore_errors=True)


def send_level(site: RankSite, level: str) -> None:
    """Wait until the holder has said that the step has reached a level."""
    wait_for(lambda: (STEP, level) in site.levels, f"level {level}")
