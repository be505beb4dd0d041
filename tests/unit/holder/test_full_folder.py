"""A holder whose file system is full keeps its controller: facts wait for room, and it says what it lacks (R16)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from cli_store import host_causes

from memstore.config import Config
from memstore.core.format.manifest import manifest_name
from memstore.core.wire.frame import Kind
from memstore.core.wire.handshake import ControllerIdentity
from memstore.core.wire.orders import Order, PushTargets, WriteJournal
from memstore.core.wire.reports import FactsWritten, Heartbeat, HostInventory, decode_holder_message
from memstore.errors import CapacityError, PeerTimeout
from memstore.shell.arena.journal_file import AHEAD_NBYTES, JournalFile
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.holder.holder import Holder
from memstore.shell.identity import HostIdentity, read_boot_id
from memstore.shell.net.channel import Channel
from memstore.shell.net.listener import connect_tcp
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.clusters.scratch import scratch_store_name
from memstore.testing.faults.kept_up import FullFileSystem
from recovery.inventory import ShardId

M = TypeVar("M")
WAIT_S = 60.0
SECRET = b"s" * 32
LARGE = b"x" * (AHEAD_NBYTES + 5000)  # more than the journal's pages still take

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 4 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.fixture
def holder(small_tmpfs: Path) -> Iterator[Holder]:
    """A holder that beats twice a second, and whose peers are never lost."""
    config = Config(
        store=scratch_store_name(),
        arena_dir=str(small_tmpfs),
        arena_bytes=1 << 20,
        chunk_bytes=64 << 10,
        interface="127.0.0.1",
        detect=600.0,
    )
    made = Holder(HostIdentity("a", read_boot_id(), True, {}), config, secret=SECRET, arena_limit_bytes=1 << 20)
    yield made
    made.close()


@pytest.fixture
def full(holder: Holder, small_tmpfs: Path) -> Iterator[FullFileSystem]:
    """No page is left beside the holder's arena."""
    filler = FullFileSystem(small_tmpfs)
    filler.start()
    yield filler
    filler.end()


def dial(holder: Holder, term: int) -> Channel:
    """Connect as the controller of a term."""
    return connect_tcp(
        holder.state.info.endpoints[0].address,
        holder.state.info.endpoints[0].port,
        secret=SECRET,
        store=holder.config.store,
        identity=ControllerIdentity(term=term),
        timeout_s=WAIT_S,
    )


def received(channel: Channel, kind: type[M], timeout_s: float = WAIT_S) -> M:
    """The next message of a kind; the others are passed over."""
    found: list[M] = []

    def look() -> bool:
        message = decode_holder_message(channel.recv(timeout_s=timeout_s).data)
        found[:] = [message] if isinstance(message, kind) else []
        return bool(found)

    wait_for(look, f"a message {kind.__name__}", timeout_s)
    return found[0]


def send(channel: Channel, order: Order) -> None:
    channel.send(Kind.EVENT, 0, order, deadline_s=WAIT_S)


def said_full(controller: Channel) -> list[str]:
    """What status would say of the next heartbeat."""
    return host_causes("host_full", received(controller, Heartbeat).stats)


def test_a_fact_without_room_waits_and_the_session_goes_on(holder: Holder, full: FullFileSystem) -> None:
    """Heartbeats say why, other orders are obeyed, later facts wait behind it; with room all are acknowledged."""
    controller = dial(holder, 5)
    received(controller, HostInventory)
    send(controller, WriteJournal(keep=None, records=(LARGE,), seq=1))
    send(controller, WriteJournal(keep=None, records=(b"small",), seq=2))
    send(controller, PushTargets(job="job", attempt=1, targets=("b",), ranks=()))
    wait_for(lambda: holder.state.shared_shards.ordinary.get("job") == ["b"], "an order after the facts")
    wait_for(lambda: said_full(controller), "a beat that says so")
    assert "journal" in said_full(controller)[0]
    assert holder.journal.records() == [], "a later fact must not be there without the one before it"
    full.end()
    assert received(controller, FactsWritten).seq == 1
    assert received(controller, FactsWritten).seq == 2
    assert len(holder.journal.records()) == 2
    wait_for(lambda: not said_full(controller), "a beat that no longer says so")
    controller.close()


def test_facts_that_waited_are_not_acknowledged_to_a_newer_controller(holder: Holder, full: FullFileSystem) -> None:
    """A newer session sends the whole journal; what an older one had sent counts for nothing any more (R16, R17)."""
    older = dial(holder, 5)
    received(older, HostInventory)
    send(older, WriteJournal(keep=None, records=(LARGE,), seq=9))
    wait_for(lambda: holder.sessions.facts.problem, "the fact to wait")
    newer = dial(holder, 6)
    assert received(newer, HostInventory).journal == ()
    send(newer, WriteJournal(keep=(), records=(b"one", LARGE), seq=1))
    wait_for(lambda: holder.sessions.facts.problem, "the newer facts to wait")
    full.end()
    assert received(newer, FactsWritten).seq == 1
    with pytest.raises((PeerTimeout, AssertionError, TimeoutError)):
        received(newer, FactsWritten, 0.5)
    assert len(holder.journal.records()) == 2
    older.close()
    newer.close()


def test_a_manifest_without_room_is_reported_until_there_is_some(small_tmpfs: Path) -> None:
    """The problem names the size; it goes by itself once such a manifest would fit, and leaves no file."""
    folder = ManifestFolder.open(small_tmpfs)
    name = manifest_name(ShardId("j", 1, 2, 3), "ab")
    filler = FullFileSystem(small_tmpfs)
    filler.start()
    with pytest.raises(CapacityError, match="no room for a manifest"):
        folder.save(name, bytes(9000))
    folder.look_for_room()
    assert "9000 bytes" in folder.problem
    filler.end()
    folder.look_for_room()
    assert folder.problem == ""
    assert list(folder.path.iterdir()) == []
    folder.save(name, b"small")
    assert list(folder.load_all()) == [(name, b"small")]
    folder.close()


def test_manifests_need_no_room_where_the_slots_are_claimed(small_tmpfs: Path) -> None:
    """With no page left some are saved, for ever as old ones go, and the journal takes the commits; all is adopted."""
    folder, journal = ManifestFolder.open(small_tmpfs), JournalFile.open(small_tmpfs / "journal")
    names = [manifest_name(ShardId("j", 1, step, 3), "ab") for step in range(100)]
    for name in names[:8]:
        folder.save(name, bytes(50_000))
    for name in names[:8]:
        folder.remove(name)
    filler = FullFileSystem(small_tmpfs)
    filler.start()
    for step, name in enumerate(names):
        folder.save(name, bytes(50_000 if step % 2 else 2000))
        journal.append([bytes(200)])
        if step >= 8:
            folder.remove(names[step - 8])
    folder.close()
    adopted = ManifestFolder.open(small_tmpfs)
    assert {name: len(data) for name, data in adopted.load_all()} == {
        name: 50_000 if step % 2 else 2000 for step, name in enumerate(names) if step >= 92
    }
    assert adopted.skipped == {}
    adopted.save(manifest_name(ShardId("j", 1, 100, 3), "ab"), b"small")
    assert len(journal.records()) == len(names)
    filler.end()
    journal.close()
    adopted.close()


def test_removed_files_wait_for_room_before_a_byte_is_moved(holder: Holder, small_tmpfs: Path) -> None:
    """With no page left the holder says what it needs and serves on from memory; with room its successor has all."""
    ended: list[str] = []
    holder.context.on_fatal = ended.append
    shard = ShardId("job", 1, 5, 0)
    holder.replicas.ensure_free(2)
    slots = holder.replicas.take_slots(2)
    for slot in slots:
        holder.replicas.arena.view(slot)[:] = b"\7" * (64 << 10)
    holder.replicas.seal_local(shard, world_size=1, layout=b"", nbytes=2 * (64 << 10), slots=slots, attempt=1)
    filler = FullFileSystem(small_tmpfs)
    filler.start()
    (holder.folder / "arena").unlink()
    wait_for(lambda: " free; " in holder.guard.loss.problem, "the word of no room")
    assert ended == []
    assert [bytes(holder.replicas.arena.view(slot, 2)) for slot in slots] == [b"\7\7"] * 2
    filler.end()
    wait_for(lambda: bool(ended), "the end of the holder")
    assert "written again, for another holder to adopt" in ended[0]
    holder.guard.lock_file.release()
    identity = HostIdentity("a", read_boot_id(), True, {})
    again = Holder(identity, holder.config, secret=SECRET, arena_limit_bytes=1 << 20)
    try:
        found = again.replicas.index.find(shard)
        assert found is not None
        assert [bytes(again.replicas.arena.view(slot, 2)) for slot in found.slots if slot is not None] == [b"\7\7"] * 2
    finally:
        again.close()


def test_a_killed_holder_comes_back_while_the_file_system_is_full(
    small_tmpfs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its memory is there, and all that its start needs: no file is written again that is there already (R3, R4)."""
    folder = tmp_path_factory.mktemp("cluster")
    with ProcessCluster(folder, {"a": {}}, arena_dir=str(small_tmpfs), arena_bytes=1 << 20) as cluster:
        filler = FullFileSystem(small_tmpfs)
        filler.start()
        try:
            cluster.kill_holder("a")
            cluster.start_holder("a")
            cluster.wait_live("a")
        finally:
            filler.end()
