"""Training first: copies wait for collectives, leave in a low class and at a bounded rate, on threads that give way."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from link_site import WAIT_S, Site
from msgspec import convert
from torch._C._distributed_c10d import Work
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from memstore.adapters.torch import watch_collectives
from memstore.client.collective_hooks import watch_module, watch_optimizer
from memstore.client.connect import connect
from memstore.client.reader import reader
from memstore.client.store import Store
from memstore.config import Config
from memstore.core.network.idle_profile import BUSY_MAX_S, LEARN_MIN, Kind
from memstore.core.network.marks_layout import RING
from memstore.core.report.metrics import holder_growth
from memstore.core.wire.rank_messages import MarksMade
from memstore.core.wire.status_rows import HostStats
from memstore.errors import ConfigError, ProtocolError
from memstore.shell.holder.marks_reader import CollectiveMarksReader
from memstore.shell.holder.send_gate import SendGate, _cut
from memstore.shell.net.socket_options import Flight
from memstore.shell.rank.collective_marks import CollectiveMarks
from memstore.testing.clusters.processes import ProcessCluster, wait_for

HOSTS = {"near": {"rack": "r1"}, "far": {"rack": "r2", "memstore": "replica"}}
NOTHING = Flight(0, 0.0)
HELD_S = 0.5  # a copy that is not held travels in a tenth of this


def state(step: int) -> dict[str, Any]:
    """1 MiB that no other step has."""
    return {"weights": np.random.default_rng(step).standard_normal(1 << 17)}


@contextmanager
def training(folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Iterator[tuple[ProcessCluster, Store]]:
    """Yield a store of two hosts and the only rank's end of it."""
    monkeypatch.setenv("MEMSTORE_HOST", "near")
    cluster = ProcessCluster(folder, HOSTS, **config)
    with cluster, connect("train", rank=0, world_size=1, config=cluster.config) as store:
        yield cluster, store


def test_copies_wait_for_a_collective_and_go_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed here at once, on the peer only after the collective; also with the holder that came back meanwhile."""
    with training(tmp_path, monkeypatch) as (cluster, store):
        store.put(0, state(0)).wait("committed")
        for step in (1, 2):
            with store.collective():
                ticket = store.put(step, state(step))
                ticket.wait("sealed")
                with pytest.raises(TimeoutError):
                    ticket.wait("replicated", HELD_S)
                if step == 1:
                    read_from_far(cluster, monkeypatch)
                    assert ticket.level == "sealed"  # no restore waits for what is held
            ticket.wait("committed")
            if step == 1:
                cluster.kill_holder("near")
                cluster.start_holder("near")
                cluster.wait_live("near", "far")
                store.steps()  # answered over the link to the new holder: from now on that one gets the marks


def read_from_far(cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put another job's step on the far host alone, and read it on this one."""
    config = replace(cluster.config, replicas=1)
    with monkeypatch.context() as there:
        there.setenv("MEMSTORE_HOST", "far")
        with connect("other", rank=0, world_size=1, config=config) as store:
            store.put(0, state(7)).wait("committed")
    with reader("other", config=config) as there_from_here:
        found = there_from_here.get(0, rank=0)
        assert found.source == "peer"
        assert np.array_equal(found.state["weights"], state(7)["weights"])


def test_a_put_that_waits_for_room_lets_go_what_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one collective: room comes with commits, and those wait for copies."""
    with training(tmp_path, monkeypatch) as (_, store):
        with store.collective():
            tickets = [store.put(step, state(step)) for step in range(5)]
        tickets[-1].wait("committed")
        assert not [ticket.reason for ticket in tickets if ticket.level == "skipped"]


def test_no_collective_holds_a_copy_for_longer_than_allowed_and_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is always busy: the copy goes after the longest hold; an event, a problem, a metric say so."""
    with training(tmp_path, monkeypatch, collective_hold_max_s=HELD_S) as (cluster, store):
        with store.collective():
            store.put(1, state(1)).wait("committed")
            reported = wait_for(lambda: [e for e in cluster.events() if e["event"] == "spill"], "the event")
        assert reported[0]["host"] == "near"
        assert "found 0 ms between collectives" in reported[0]["why"]
        status = cluster.status()
        [row] = [row for row in status["problems"] if row["kind"] == "network_busy"]
        assert "found 0 ms between collectives" in row["cause"]
        assert row["remedy"].startswith("put less often or less ")

        def stats() -> dict[str, Any]:
            return next(row["stats"] for row in cluster.status()["hosts"] if row["host"] == "near")

        assert holder_growth("near", None, convert(stats(), HostStats))[-1].name == "memstore_spilled_bytes_total"
        wait_for(lambda: stats()["spilled_bytes"] >= 1 << 20, "a heartbeat after the last of the copy")
        store.put(2, state(2)).wait("committed")  # the remedy: not within a collective
        wait_for(lambda: "network_busy" not in {row["kind"] for row in cluster.status()["problems"]}, "its end")


def test_marks_are_ignored_where_interleaving_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """collective_hold_max_s=0."""
    with training(tmp_path, monkeypatch, collective_hold_max_s=0) as (_, store), store.collective():
        store.put(1, state(1)).wait("committed")


@pytest.mark.parametrize("has_marks", [True, False])
def test_an_iteration_begins_where_the_loop_says_or_at_every_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_marks: bool
) -> None:
    """Two collectives and two puts in each: the holder learns the three idle spans of an iteration, not of a put."""
    site = Site(tmp_path, ["a"], monkeypatch)
    [store] = site.connect()
    send_gate = site.holders["a"].send_gate
    step = 0
    for _ in range(LEARN_MIN + 2):
        if has_marks:
            store.mark_iteration()
        for _ in range(2):
            with store.collective():
                pass
            step += 1
            store.put(step, state(step)).wait("committed", WAIT_S)
    wait_for(lambda: send_gate._readers, "the marks")
    with send_gate._lock:
        send_gate._read()
        [spans] = send_gate._gate.ranks.values()
    # Idle before, between and after the collectives; an iteration of one put has one collective, and two spans.
    assert len(spans.expected) == (3 if has_marks else 2)
    site.close()


# -- marks ------------------------------------------------------------------------------------------


class FakeLink:
    """The two things of a rank's link that marks use."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.channel = folder, object()
        self.files: list[str] = []

    def notify(self, message: MarksMade) -> None:
        """Take a message that names a file."""
        self.files.append(message.file)


@pytest.fixture
def link(tmp_path: Path) -> FakeLink:
    """A link into an empty folder."""
    return FakeLink(tmp_path)


def opened(link: FakeLink) -> CollectiveMarksReader:
    """Open the newest file as the holder would."""
    return CollectiveMarksReader(link.folder, link.files[-1])


def test_what_a_rank_marks_its_holder_reads(link: FakeLink) -> None:
    """Overlapping collectives are one busy span; the file loses its name when it is opened."""
    marks: Any = CollectiveMarks(link)  # type: ignore[arg-type]
    marks.put()
    assert link.files == []  # no process marks collectives: nothing to tell
    marks.begin()
    reader = opened(link)
    marks.begin()
    marks.end()
    reader.read()
    assert reader.spans.is_busy
    marks.end()
    marks.put()
    reader.read()
    assert not reader.spans.is_busy
    assert reader.spans.iteration_s is not None
    assert list(link.folder.iterdir()) == []
    reader.close()


def test_a_holder_that_comes_back_gets_a_file_of_its_own(link: FakeLink) -> None:
    """Its connection is another one; what was under way ends with it."""
    marks: Any = CollectiveMarks(link)  # type: ignore[arg-type]
    marks.begin()
    link.channel = object()
    marks.end()
    assert len(set(link.files)) == 2
    assert [path.name for path in link.folder.iterdir()] == link.files[1:]  # no holder opened the former one
    reader = opened(link)
    reader.read()
    assert not reader.spans.is_busy
    reader.close()


def test_marks_that_were_overwritten_are_lost_and_the_newest_count(link: FakeLink) -> None:
    """A holder that did not look for three rings' time: what is busy now is known, the iteration is not."""
    marks: Any = CollectiveMarks(link)  # type: ignore[arg-type]
    marks.iteration()
    reader = opened(link)
    reader.read()
    for _ in range(3 * RING // 2):
        marks.begin()
        marks.end()
    marks.begin()
    reader.read()
    assert reader.spans.is_busy
    assert reader.spans.iteration_s is None
    reader.close()


def test_a_mark_that_is_not_there_yet_is_waited_for(link: FakeLink) -> None:
    """The count became visible before the mark, which is an old one of a ring ago: not taken."""
    marks: Any = CollectiveMarks(link)  # type: ignore[arg-type]
    marks.begin()
    reader = opened(link)
    marks._words[0] = 2
    reader.read()
    assert reader.spans.is_busy
    marks._words[2] = marks._words[1] // 4 * 4 + Kind.IDLE
    reader.read()
    assert not reader.spans.is_busy
    reader.close()


def test_a_collective_that_was_given_up_is_forgotten(link: FakeLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its future never completes, and training goes on in another group: its collectives are marked."""
    marks = CollectiveMarks(link)  # type: ignore[arg-type]
    now = time.monotonic()
    marks.begin()
    reader = opened(link)
    monkeypatch.setattr("memstore.shell.rank.collective_marks.time.monotonic", lambda: now + BUSY_MAX_S + 1.0)
    monkeypatch.setattr(
        "memstore.shell.rank.collective_marks.time.monotonic_ns", lambda: int((now + BUSY_MAX_S + 1.0) * 1e9)
    )
    marks.begin()
    reader.read()
    assert reader.spans.is_busy
    assert reader.spans.since_s > now + BUSY_MAX_S
    marks.end()
    reader.read()
    assert not reader.spans.is_busy
    reader.close()


def test_marks_that_cannot_be_sent_leave_nothing_behind(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No room beside the arena: training goes on, a warning says so, once for each holder."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    marks = CollectiveMarks(link)  # type: ignore[arg-type]
    for _ in range(3):
        marks.begin()
        marks.end()
    assert list(link.folder.iterdir()) == []
    assert link.files == []
    assert caplog.text.count("no room") == 1


def test_marks_that_cannot_be_opened_do_not_end_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are advice; puts go over the same link."""
    SendGate(tmp_path, 60.0).watch("rank", "marks-absent")
    assert "marks of rank process rank are ignored" in caplog.text


@pytest.mark.parametrize("name", ["slots", "marks-/../slots", "marks-absent", "marks-link", "marks-folder"])
def test_a_holder_opens_files_of_marks_only(tmp_path: Path, name: str) -> None:
    """Any folder that a process of this user names."""
    (tmp_path / "slots").write_bytes(b"s")
    (tmp_path / "marks-link").symlink_to(tmp_path / "slots")
    (tmp_path / "marks-folder").mkdir()
    with pytest.raises(ProtocolError):
        CollectiveMarksReader(tmp_path, name)
    assert (tmp_path / "slots").exists()


def test_a_file_that_is_cut_short_is_ignored_from_then_on(tmp_path: Path, link: FakeLink) -> None:
    """It harms no process, and holds nothing back."""
    send_gate = SendGate(tmp_path, 60.0)
    marks: Any = CollectiveMarks(link)  # type: ignore[arg-type]
    marks.begin()
    file = os.open(tmp_path / link.files[0], os.O_RDWR)
    send_gate.watch("rank", link.files[0])
    shipment: Any = SimpleNamespace(shard=SimpleNamespace(job="j", rank=0, attempt=1, step=1), sizes=[1 << 20])
    with send_gate.sending(shipment) as gate:
        assert gate is not None
        assert send_gate.allow(gate._sending, 1 << 20, 1, lambda: NOTHING, 0.0)[0] == 0
        os.ftruncate(file, 4)
        assert send_gate.allow(gate._sending, 1 << 20, 1, lambda: NOTHING, 0.0)[0] == 1 << 20
    os.close(file)


def test_a_rank_that_is_gone_holds_nothing_back(tmp_path: Path, link: FakeLink) -> None:
    """Its link has ended in the middle of a collective."""
    send_gate = SendGate(tmp_path, 60.0)
    marks: Any = CollectiveMarks(link)  # type: ignore[arg-type]
    marks.begin()
    send_gate.watch("rank", link.files[0])
    shipment: Any = SimpleNamespace(shard=SimpleNamespace(job="j", rank=0, attempt=1, step=1), sizes=[1 << 20])
    with send_gate.sending(shipment) as gate:
        assert gate is not None
        send_gate.forget("rank", "j", 0)
        assert send_gate.allow(gate._sending, 1 << 20, 1, lambda: NOTHING, 0.0)[0] == 1 << 20
    with send_gate.sending(shipment) as gate:
        assert gate is None


def test_a_share_of_the_pace_is_taken_only_while_bytes_go(tmp_path: Path, link: FakeLink) -> None:
    """Who waits for idle time leaves the host's limit to the others."""
    send_gate = SendGate(tmp_path, 60.0)
    marks: Any = CollectiveMarks(link)  # type: ignore[arg-type]
    marks.begin()
    marks.end()
    send_gate.watch("rank", link.files[0])
    shipment: Any = SimpleNamespace(shard=SimpleNamespace(job="j", rank=0, attempt=1, step=1), sizes=[1 << 20])
    sending: list[int] = []

    @contextmanager
    def pace() -> Iterator[None]:
        sending.append(1)
        yield
        sending.clear()

    def waiting() -> Flight:
        assert sending == []
        return NOTHING

    with send_gate.sending(shipment) as gate:
        assert gate is not None
        sizes = []
        for part in gate.paced(pace).parts([memoryview(bytes(1 << 20))], waiting, threading.Event()):
            assert sending == [1]
            sizes.append(sum(view.nbytes for view in part))
    assert sum(sizes) == 1 << 20
    assert len(sizes) > 1


# -- hooks of torch ---------------------------------------------------------------------------------


class Counting:
    """Counts marks."""

    def __init__(self) -> None:
        self.begun = self.ended = self.iterations = 0
        self.has_iterations = False

    def begin(self) -> None:
        """One more."""
        self.begun += 1

    def end(self) -> None:
        """One more."""
        self.ended += 1

    def iteration(self) -> None:
        """One more."""
        self.iterations += 1


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_ddps_reductions_and_the_optimizers_steps_are_marked() -> None:
    """As many ends as begins; gradients are those of an unwatched module; an iteration per step."""
    torch.manual_seed(1)
    plain = torch.nn.Linear(8, 8)
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    module.module.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    marks: Any = Counting()
    watch_module(marks, module)
    watch_optimizer(marks, optimizer)
    rows = torch.ones(2, 8)
    for _ in range(3):
        optimizer.zero_grad()
        module(rows).sum().backward()
        optimizer.step()
    plain(rows).sum().backward()
    assert torch.equal(module.module.weight.grad, plain.weight.grad)
    assert marks.begun >= 3
    wait_for(lambda: marks.ended == marks.begun, "the end of the last reduction")
    assert marks.iterations == 3
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        watch_module(marks, plain)


@pytest.mark.usefixtures("group")
def test_torchs_functions_are_marked_while_they_are_watched() -> None:
    """Blocking or not, and one that raises; afterwards they are torch's own again."""
    original = dist.all_reduce
    store: Any = SimpleNamespace(marks=Counting())
    with watch_collectives(store):
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        with pytest.raises(RuntimeError, match="root"):
            dist.broadcast(torch.ones(4), 7)
        wait_for(lambda: store.marks.ended == 3, "three ends")
    assert store.marks.begun == 3
    assert dist.all_reduce is original


class Foreign(Work):
    """Of a backend that has no futures."""


def test_a_collective_without_a_future_is_over_when_it_was_started() -> None:
    """What torch itself would not refuse is not refused because it is marked."""
    store: Any = SimpleNamespace(marks=Counting())
    with watch_collectives(store) as watched:
        work = Foreign()
        assert watched._wrapped(lambda tensor: work)(torch.ones(4)) is work
    assert (store.marks.begun, store.marks.ended) == (1, 1)


@pytest.mark.usefixtures("group")
def test_a_module_is_watched_for_the_newest_store() -> None:
    """The process has connected again; and a hook of another's is left alone."""
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    first: Any = Counting()
    second: Any = Counting()
    for marks in (first, second):
        watch_module(marks, module)
    module(torch.ones(2, 8)).sum().backward()
    assert (first.begun, second.begun > 0) == (0, True)
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    module.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(ConfigError, match="watch_collectives"):
        watch_module(first, module)
    module(torch.ones(2, 8)).sum().backward()


# -- the gate and its settings ---------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", range(1, 8))
def test_a_frame_is_cut_anywhere(nbytes: int) -> None:
    """Both parts together are the whole."""
    views = [memoryview(b"ab"), memoryview(b""), memoryview(b"cde"), memoryview(b"fg")]
    first, rest = _cut(views, nbytes)
    assert b"".join(first) == b"abcdefg"[:nbytes]
    assert b"".join(rest) == b"abcdefg"[nbytes:]


@pytest.mark.parametrize("field", ["dscp", "collective_hold_max_s", "replicate_bytes_per_s"])
def test_settings_out_of_range_are_refused(field: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=field):
        Config(**{field: -1})
