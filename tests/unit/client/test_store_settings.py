"""Each setting of a store reaches the part that works by it: holders and a controller made of values no default has."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from memstore.cli import main
from memstore.client.connect import check_store_fields
from memstore.config import Config, check_config
from memstore.core.arena.slot_table import SlotState
from memstore.core.cluster.state import Rules
from memstore.core.format.manifest import chunk_sizes
from memstore.core.holder.puts import push
from memstore.core.wire.handshake import ControllerIdentity
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.orders import PushTargets
from memstore.core.wire.reports import Heartbeat, HolderMessage, HostInventory, decode_holder_message
from memstore.errors import ConfigError, PeerTimeout
from memstore.shell import identity
from memstore.shell.arena.folder import make_folder
from memstore.shell.controller import Controller
from memstore.shell.holder.holder import Holder
from memstore.shell.holder.scrub import IDLE_S, Scrubber
from memstore.shell.identity import HostIdentity, read_boot_id
from memstore.shell.net.channel import CHUNK_S, SO_MAX_PACING_RATE, Channel
from memstore.shell.net.listener import connect_tcp
from memstore.shell.peer.outgoing_shard import StreamingReplica
from memstore.shell.rank.admin_link import store_root
from memstore.testing.clusters.process_main import DirectoryMembership
from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.scratch import scratch_store_name
from memstore.testing.clusters.two_holders import two_holders
from recovery.inventory import ShardId

CHUNK_BYTES = 64 << 10
SECRET = b"s" * 32
SHARD = ShardId("train", 1, 2, 0)
WAIT_S = 60.0


@contextmanager
def a_holder(**config: Any) -> Iterator[Holder]:
    """Yield one holder; nothing of it is left afterwards."""
    given = {"interface": "127.0.0.1", "scrub_bytes_per_s": 0, **config}
    made = Config(store=scratch_store_name(), arena_bytes=1 << 20, chunk_bytes=CHUNK_BYTES, **given)
    holder = Holder(HostIdentity("a", read_boot_id(), True, {}), made, secret=SECRET, arena_limit_bytes=1 << 20)
    try:
        yield holder
    finally:
        holder.close()
        shutil.rmtree(store_root(made), ignore_errors=True)


def as_controller(holder: Holder, address: str, port: int) -> Channel:
    """Connect as the controller does."""
    return connect_tcp(
        address, port, secret=SECRET, store=holder.config.store, identity=ControllerIdentity(term=1), timeout_s=WAIT_S
    )


def test_a_holder_listens_on_its_interface_and_port_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has two addresses; the holder announces the one that `interface` names.

    The other answers no process.
    """
    monkeypatch.setattr(
        identity, "interface_addresses", lambda: [("lo", "127.0.0.1"), ("train", "127.0.0.2"), ("train6", "::1")]
    )
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = int(probe.getsockname()[1])
    with a_holder(interface="train", port=port) as holder:
        assert (holder.state.info.endpoints[0].address, holder.state.info.endpoints[0].port) == ("127.0.0.2", port)
        with as_controller(holder, "127.0.0.2", port) as channel:
            inventory = decode_holder_message(channel.recv(timeout_s=WAIT_S).data)
            assert isinstance(inventory, HostInventory)
            assert inventory.endpoints == (Endpoint("127.0.0.2", port),)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def test_a_holder_listens_on_all_its_networks_and_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the config, on one port; the same address twice would be one card for two (R13)."""
    cards = [("ib0", "127.0.0.2"), ("ib1", "127.0.0.3")]
    monkeypatch.setattr(identity, "interface_addresses", lambda: cards)
    with socket.create_server(("127.0.0.2", 0)) as probe:
        port = int(probe.getsockname()[1])
    with a_holder(interface=["ib1", "ib0"], port=port) as holder:
        for address in ("127.0.0.2", "127.0.0.3"):
            with as_controller(holder, address, port) as channel:
                inventory = decode_holder_message(channel.recv(timeout_s=WAIT_S).data)
                assert isinstance(inventory, HostInventory)
                assert inventory.endpoints == (Endpoint("127.0.0.3", port), Endpoint("127.0.0.2", port))
    with pytest.raises(ConfigError, match=r"'ib0' and '127\.0\.0\.2', which are the same address"):
        identity.resolve_interfaces(("ib0", "127.0.0.2"))


@pytest.mark.parametrize("value", [[], ["ib0", "ib0"], ["ib0", 7], 7, "", [""]])
def test_nonsense_for_a_network_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="interface="):
        Config(interface=value)


@pytest.mark.parametrize(
    "value", [[], "plenty", ["1GiB", "2GiB"], ["a=1GiB", "a=2GiB"], True, {"a": 1}, "no name=1GiB", "=1GiB", "a=", -1]
)
def test_nonsense_for_a_quota_is_refused(value: Any) -> None:
    """One size for every job at most, and one for each job; the word that is wrong is named."""
    with pytest.raises(ConfigError, match=r"quota=|job name"):
        Config(quota=value)


def test_quotas_are_sizes_for_jobs_by_name_and_for_all_others() -> None:
    """The list travels as it was given."""
    config = Config(quota=["64GiB", "eval=8MiB"])
    assert config.quotas == {"": 64 << 30, "eval": 8 << 20}
    assert Config().with_fields(config.store_fields()) == config.with_fields(config.store_fields())
    assert (Config().quotas, Config(quota=4096).quotas) == ({}, {"": 4096})


@pytest.mark.parametrize(
    "given", [{"interface": ["ib0", "ib1"]}, {"quota": ("1GiB", "a=2GiB")}, {"failure_domains": ("row", "rack")}]
)
def test_several_values_of_a_store_field_are_the_running_ones_in_any_container(given: dict[str, Any]) -> None:
    """A message brings a tuple where the config had a list."""
    config = Config(**given)
    running = {**config.store_fields(), **{name: tuple(value) for name, value in given.items()}}
    check_store_fields(config, running)
    other = {**running, **{name: tuple(reversed(value)) for name, value in given.items()}}
    with pytest.raises(ConfigError, match="runs with other settings"):
        check_store_fields(config, other)


def kinds_until_silent(channel: Channel, *, silent_s: float) -> list[type[HolderMessage]]:
    """Return the kinds of what comes, until nothing has come for so long."""
    kinds: list[type[HolderMessage]] = []
    with contextlib.suppress(PeerTimeout):
        while True:
            kinds.append(type(decode_holder_message(channel.recv(timeout_s=silent_s).data)))
    return kinds


def test_a_holder_beats_as_often_as_its_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Often if ordered so; with 60 s between two beats no second one comes meanwhile.

    Something else may: a tool of another test asks every store of this user on the machine, and its holder relays that.
    """
    with (
        a_holder(detect=0.2) as holder,
        as_controller(holder, holder.state.info.endpoints[0].address, holder.state.info.endpoints[0].port) as channel,
    ):
        beats = 0
        while beats < 3:
            beats += isinstance(decode_holder_message(channel.recv(timeout_s=WAIT_S).data), Heartbeat)
    monkeypatch.setattr(Config, "heartbeat_s", 60.0)
    with (
        a_holder() as holder,
        as_controller(holder, holder.state.info.endpoints[0].address, holder.state.info.endpoints[0].port) as channel,
    ):
        assert isinstance(decode_holder_message(channel.recv(timeout_s=WAIT_S).data), HostInventory)
        assert kinds_until_silent(channel, silent_s=1.5).count(Heartbeat) == 1  # it comes with the inventory


@pytest.mark.parametrize(("cores", "streams"), [(3, 3), (16, 4)])
def test_a_holder_opens_four_streams_to_a_peer(monkeypatch: pytest.MonkeyPatch, cores: int, streams: int) -> None:
    """And no more than it has cores for; as many as there are networks, at least."""
    assert Config(interface=[f"ib{n}" for n in range(6)]).streams == 6
    assert Config(interface=["ib0", "ib1"]).streams == Config().streams == 4
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    with two_holders(CHUNK_BYTES) as (near, far):
        near.state.shared_shards.declare(PushTargets(job="train", attempt=1, targets=("b",), ranks=()))
        near.io._connect("train", ["b"])
        assert far.listeners[0].connections == streams


def kernel_settings(channel: Channel) -> tuple[int, int]:
    """Return the class and the pace that the kernel has for a connection."""
    sock = channel._sock
    pace = sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8)
    return int.from_bytes(sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS, 1), "little"), struct.unpack("@L", pace)[0]


def test_what_a_holder_pushes_has_the_class_and_the_pace_of_its_config() -> None:
    """As the kernel has them for the connection that carried the bytes."""
    with two_holders(CHUNK_BYTES, dscp=10, replicate_bytes_per_s=3 << 20) as (near, far):
        for holder in (near, far):
            holder.replicas.ensure_free(4)
        slots = near.replicas.take_slots(1)
        fresh = StreamingReplica(near.replicas, SHARD, slots, chunk_sizes(CHUNK_BYTES, CHUNK_BYTES))
        near.state.shared_shards.declare(PushTargets(job=SHARD.job, attempt=1, targets=("b",), ranks=()))
        near.io.run(push.replicate, near.state, SHARD, "", fresh)
        near.replicas.seal_local(
            SHARD, world_size=1, layout=b"", nbytes=CHUNK_BYTES, slots=slots, attempt=1, follower=fresh
        )
        wait_for(lambda: far.replicas.index.find(SHARD), "the push")
        wait_for(lambda: not near.state.pushes.under_way, "its end: until then its connection is in use")
        with near.peers.peer("b").channel() as channel:
            assert kernel_settings(channel) == (10 << 2, 3 << 20)


def test_no_pace_is_so_slow_that_a_chunk_misses_its_deadline() -> None:
    """A byte a second is not obeyed: the least follows from the store's own `chunk_bytes`."""
    with (
        two_holders(CHUNK_BYTES, replicate_bytes_per_s=1) as (near, _),
        near.peers.peer("b").channel() as channel,
        near.pacing.sending(channel),
    ):
        assert kernel_settings(channel) == (1 << 2, int(CHUNK_BYTES / CHUNK_S))


def test_repair_is_bound_by_the_rate_of_the_config() -> None:
    """The pushes of repairs wait for it."""
    with two_holders(CHUNK_BYTES, repair_bytes_per_s=9 << 20) as (near, _):
        assert near.io._repair_limit.bytes_per_s == 9 << 20


class Pauses:
    """In the place of a holder's end: never waits, keeps for how long the scrubber would, ends after one round."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def wait(self, seconds: float) -> bool:
        is_over = seconds == IDLE_S and IDLE_S in self.waited_s
        self.waited_s.append(seconds)
        return is_over


@pytest.mark.parametrize(("rate", "checked"), [(CHUNK_BYTES // 4, [0, 2]), (0, [])])
def test_the_scrub_takes_as_long_as_its_rate_asks(rate: int, checked: list[int]) -> None:
    """4 s for each sealed chunk at a quarter of a chunk a second; at 0 it reads nothing."""
    found: list[int] = []
    slots = [SimpleNamespace(state=state) for state in (SlotState.SEALED, SlotState.FREE, SlotState.SEALED)]
    replicas = SimpleNamespace(
        table=SimpleNamespace(slots=slots),
        index=SimpleNamespace(shards={}),
        lock=contextlib.nullcontext(),
        verify_slot=lambda n: found.append(n) or [],
    )
    pauses = Pauses()
    holder: Any = SimpleNamespace(
        config=SimpleNamespace(scrub_bytes_per_s=rate, chunk_bytes=CHUNK_BYTES), stopping=pauses, replicas=replicas
    )
    Scrubber(holder).run()
    assert found == checked
    assert pauses.waited_s[1:-1] == [4.0] * len(checked)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("heartbeat_s", "detect"),
        ("suspect_after_s", "detect"),
        ("dead_after_s", "detect"),
        ("tls_cert", "tls_dir"),
        ("tls_key", "tls_dir"),
        ("tls_ca", "tls_dir"),
        ("streams", "interface"),
        ("max_restores", "keep_steps"),
        ("abandoned_arena_ttl_s", "job_ttl_s"),
    ],
)
def test_a_setting_of_before_is_refused_and_the_error_lists_its_successor(old: str, new: str) -> None:
    """Wherever fields are given: to Config, and to a copy of one."""
    for give in (lambda: Config(**{old: 1}), lambda: Config().with_fields({old: 1})):
        with pytest.raises(ConfigError, match=f"unknown config field '{old}': it is one of .*{new}"):
            give()


def test_one_word_says_how_soon_a_silent_host_is_dead() -> None:
    """The other two times follow; suspicion and beats do not become slow with it."""
    times = [
        (c.heartbeat_s, c.suspect_after_s, c.dead_after_s) for c in map(_detecting, ("fast", "normal", "slow", 180))
    ]
    assert times == [(0.2, 0.6, 2.0), (0.5, 1.5, 5.0), (0.5, 3.0, 20.0), (0.5, 3.0, 180.0)]
    for bad in ("quick", 0, 0.05, 4000, True, None, "5"):
        with pytest.raises(ConfigError, match="'fast', 'normal', 'slow'"):
            _detecting(bad)


def test_a_container_says_once_where_its_arenas_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the library where a caller gives no folder, and for the commands; a folder that is given counts."""
    there, other = str(tmp_path / "there"), str(tmp_path / "other")
    store = scratch_store_name()
    for each in (there, other):
        make_folder_of(each, store)
    assert check_config(None).arena_dir == Config.arena_dir
    monkeypatch.setenv("MEMSTORE_ARENA_DIR", there)
    assert check_config(None) == check_config(Config()) == Config(arena_dir=there)
    assert check_config(Config(replicas=3)) == Config(replicas=3, arena_dir=there)
    assert check_config(Config(arena_dir=other)).arena_dir == other
    for arguments, found in (([], there), (["--arena-dir", other], other)):
        said = CliRunner().invoke(main, ["down", "--leftovers", "--json", "--store", store, *arguments])
        assert [Path(row["folder"]).parents[2] for row in json.loads(said.stdout)["arenas"]] == [Path(found)]


def make_folder_of(arena_dir: str, store: str) -> None:
    Path(arena_dir).mkdir(mode=0o700)
    make_folder(arena_dir, store=store, host="h1")


def _detecting(value: Any) -> Config:
    return Config(detect=value)


def test_a_controller_decides_by_the_rules_of_its_config(tmp_path: Path) -> None:
    """Every rule that is a setting of the store has the setting's value, none its default."""
    own = {"failure_domains": ("row", "shelf"), "recovery_grace_s": 3.5, "chunk_bytes": 1 << 20}
    config = Config(store="rules", detect=2.5, keep_steps=3, **own)  # type: ignore[arg-type]
    controller = Controller(config, DirectoryMembership(tmp_path), secret=SECRET, settle_s=0.5)
    try:
        rules = controller.machine.state.rules
    finally:
        controller.close()
    shared = {field.name for field in fields(Rules)} & {field.name for field in fields(Config)}
    assert shared == own.keys()
    for name in (*shared, "suspect_after_s", "dead_after_s"):
        assert getattr(rules, name) == getattr(config, name) != getattr(Rules(), name), name
    assert (rules.lease_s, rules.outlast_s, rules.settle_s) == (config.lease_s, 0.25, 0.5)
    assert rules.job_defaults == {"keep_steps": 3}
