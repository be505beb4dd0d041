"""Training first: copies wait for collectives, leave in a low class and at a bounded rate, on threads that give way."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import convert

import memstore
from memstore.client.connect import connect
from memstore.client.reader import reader
from memstore.client.store import CollectiveMarks, Store
from memstore.config import Config
from memstore.core.report.metrics import holder_growth
from memstore.core.send_gate import MARK_MAX_S, PIECE_FIRST_BYTES
from memstore.core.wire.rank_messages import MarksMade
from memstore.core.wire.status_rows import HostStats
from memstore.errors import ConfigError
from memstore.shell.holder.send_gate import PushGate, SendGate
from memstore.shell.net.channel import Flight
from memstore.testing.clusters.processes import ProcessCluster, may_lower_nice, wait_for

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
    """Within one collective: room comes with commits, and those wait for copies; a metric counts what goes beside."""
    with training(tmp_path, monkeypatch) as (cluster, store):
        with store.collective():
            tickets = [store.put(step, state(step)) for step in range(5)]
        tickets[-1].wait("committed")
        assert not [ticket.reason for ticket in tickets if ticket.level == "skipped"]

        def stats() -> dict[str, Any]:
            return next(row["stats"] for row in cluster.status()["hosts"] if row["host"] == "near")

        wait_for(lambda: stats().get("spilled_bytes", 0) >= 1 << 20, "a heartbeat after the last of a copy")
        assert holder_growth("near", None, convert(stats(), HostStats))[-1].name == "memstore_spilled_bytes_total"


IN_A_COLLECTIVE = """
import json, sys, threading
import numpy, memstore
with memstore.connect(sys.argv[1], rank=0, world_size=1, config=memstore.Config(**json.loads(sys.argv[2]))) as store:
    with store.collective():
        store.put(0, {"weights": numpy.random.default_rng(0).standard_normal(1 << 17)}).wait("sealed")
        print("sealed", flush=True)
        threading.Event().wait()
"""


def test_a_collective_that_never_ends_holds_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks within one, one is frozen and the other killed: both steps are committed after a while."""
    with training(tmp_path, monkeypatch) as (cluster, _), contextlib.ExitStack() as ranks:
        fields = json.dumps(cluster.config.store_fields())
        argv = [sys.executable, "-c", IN_A_COLLECTIVE]
        started = {
            ending: ranks.enter_context(
                subprocess.Popen([*argv, ending.name, fields], env=cluster.env("near"), stdout=subprocess.PIPE)
            )
            for ending in (signal.SIGSTOP, signal.SIGKILL)
        }
        for ending, rank in started.items():
            ranks.callback(rank.kill)
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"sealed\n"
            rank.send_signal(ending)
        for ending in started:
            wait_for(lambda job=ending.name: committed_step(cluster, job) == 0, f"the commit after {ending.name}")


def committed_step(cluster: ProcessCluster, job: str) -> int | None:
    """Return a job's newest committed step, None before the first."""
    found = cluster.job(job)
    return found and found["committed_step"]


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


def watching(link: FakeLink) -> SendGate:
    """Return a gate that looks at the newest mark, as the holder's does."""
    gate = SendGate(link.folder / "no files of its own")
    gate._folder = link.folder
    gate.watch("rank", link.files[-1])
    return gate


def allowed(gate: SendGate, push: PushGate | None) -> int:
    """Return how many of 1 MiB may go now."""
    assert push is not None
    return gate.allow(push._sending, 1 << 20, lambda: NOTHING, 0.0)[0]


SHIPMENT: Any = SimpleNamespace(shard=SimpleNamespace(job="j", rank=0, attempt=1, step=1))


@pytest.fixture
def marks(link: FakeLink) -> CollectiveMarks:
    """The rank's end."""
    return CollectiveMarks(link)  # type: ignore[arg-type]


def test_what_a_rank_marks_its_holder_reads(link: FakeLink, marks: CollectiveMarks) -> None:
    """Overlapping collectives are one; the file loses its name when it is opened."""
    marks.begin()
    gate = watching(link)
    push = gate.sending(SHIPMENT)
    marks.begin()
    marks.end()
    assert allowed(gate, push) == 0
    marks.end()
    assert allowed(gate, push) == PIECE_FIRST_BYTES
    assert list(link.folder.iterdir()) == []


def test_a_holder_that_comes_back_gets_a_file_of_its_own(link: FakeLink, marks: CollectiveMarks) -> None:
    """Its connection is another one; a collective that ends meanwhile is no longer under way."""
    marks.begin()
    link.channel = object()
    marks.end()
    assert len(set(link.files)) == 2
    assert [path.name for path in link.folder.iterdir()] == link.files[1:]  # no holder opened the former one
    assert watching(link)._marks_s() == []
    SendGate(link.folder)
    assert list(link.folder.iterdir()) == []


def test_a_collective_that_was_given_up_is_forgotten(
    link: FakeLink, marks: CollectiveMarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never ends, and training goes on in another group: its collectives are marked."""
    marks.begin()
    gate = watching(link)
    [first_s] = gate._marks_s()
    monkeypatch.setattr("memstore.client.store.time.monotonic_ns", lambda: int((first_s + MARK_MAX_S + 1.0) * 1e9))
    marks.begin()
    assert gate._marks_s() == pytest.approx([first_s + MARK_MAX_S + 1.0])
    marks.end()
    assert gate._marks_s() == []


def test_marks_that_cannot_be_sent_leave_nothing_behind(
    link: FakeLink, marks: CollectiveMarks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No room beside the arena: training goes on, a warning says so, once for each holder."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("memstore.client.store.mmap.mmap", refuse)
    for _ in range(3):
        marks.begin()
        marks.end()
    assert list(link.folder.iterdir()) == []
    assert link.files == []
    assert caplog.text.count("no room") == 1


@pytest.mark.parametrize("name", ["slots", "mark-/../slots", "mark-absent", "mark-link", "mark-folder"])
def test_a_holder_opens_files_of_marks_only(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Any folder that a process of this user names; marks are advice, so its link goes on."""
    gate = SendGate(tmp_path)
    (tmp_path / "slots").write_bytes(b"s")
    (tmp_path / "mark-link").symlink_to(tmp_path / "slots")
    (tmp_path / "mark-folder").mkdir()
    gate.watch("rank", name)
    assert "marks of rank process rank are ignored" in caplog.text
    assert gate.sending(SHIPMENT) is None
    assert (tmp_path / "slots").exists()


def test_a_file_that_is_cut_short_is_ignored_from_then_on(link: FakeLink, marks: CollectiveMarks) -> None:
    """It harms no process, and holds nothing back."""
    marks.begin()
    file = os.open(link.folder / link.files[0], os.O_RDWR)
    gate = watching(link)
    push = gate.sending(SHIPMENT)
    assert allowed(gate, push) == 0
    os.ftruncate(file, 4)
    os.close(file)
    assert allowed(gate, push) > 0
    assert gate.sending(SHIPMENT) is None


def test_a_rank_that_is_gone_holds_nothing_back(link: FakeLink, marks: CollectiveMarks) -> None:
    """Its link has ended in the middle of a collective."""
    marks.begin()
    gate = watching(link)
    push = gate.sending(SHIPMENT)
    assert allowed(gate, push) == 0
    gate.forget("rank")
    assert allowed(gate, push) == 1 << 20
    assert gate.sending(SHIPMENT) is None


def test_a_share_of_the_pace_is_taken_only_while_bytes_go(link: FakeLink, marks: CollectiveMarks) -> None:
    """Who waits leaves the host's limit to the others."""
    marks.begin()
    marks.end()
    gate = watching(link).sending(SHIPMENT)
    assert gate is not None
    sending: list[int] = []

    @contextmanager
    def pace() -> Iterator[None]:
        sending.append(1)
        yield
        sending.clear()

    def waiting() -> Flight:
        assert sending == []
        return NOTHING

    sizes = []
    for part in gate.paced(pace).parts([memoryview(bytes(1 << 20))], waiting, threading.Event()):
        assert sending == [1]
        sizes.append(sum(view.nbytes for view in part))
    assert sum(sizes) == 1 << 20
    assert len(sizes) > 1


# -- the gate and its settings ---------------------------------------------------------------------


def test_a_frame_leaves_whole_and_in_order(link: FakeLink, marks: CollectiveMarks) -> None:
    """Its views are of any size, one is empty, one longer than a piece."""
    marks.begin()
    marks.end()
    gate = watching(link).sending(SHIPMENT)
    assert gate is not None
    views = [memoryview(b"ab"), memoryview(b""), memoryview(os.urandom(3 * PIECE_FIRST_BYTES + 5)), memoryview(b"cde")]
    parts = list(gate.parts(views, lambda: NOTHING, threading.Event()))
    assert b"".join(view for part in parts for view in part) == b"".join(views)
    assert len(parts) > len(views)


@pytest.mark.parametrize("field", ["dscp", "replicate_bytes_per_s"])
def test_settings_out_of_range_are_refused(field: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=field):
        Config(**{field: -1})


# -- holder priority ----------------------------------------------------------------------------------
# A holder that stands behind its rank for a core, as Ray starts it beside torchrun, on real processes.


def test_a_holder_comes_forward_to_its_rank_or_status_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system forbids it a put beside busy cores is committed many times later: the remedy is named."""
    monkeypatch.setenv("MEMSTORE_HOST", "h0")
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    cluster = ProcessCluster(tmp_path, {"h0": {}}, replicas=1)
    cluster.niceness = 4
    with cluster:
        holder = cluster.holders["h0"].pid
        assert os.getpriority(os.PRIO_PROCESS, holder) == nice + 4

        def outcome() -> str:
            if os.getpriority(os.PRIO_PROCESS, holder) == nice:
                return "forward"
            problems = cluster.status()["problems"]
            return next((row["remedy"] for row in problems if row["kind"] == "holder_nice"), "")

        with memstore.connect("job", rank=0, world_size=1, config=cluster.config) as store:
            store.put(0, {"weights": torch.ones(9)}).wait("committed")
            found = wait_for(outcome, "the holder to come forward, or the status to say why not")
        assert found == "forward" if may_lower_nice() else "RAY_worker_niceness=0" in found
        cluster.kill_holder("h0")
        cluster.niceness = 0  # the remedy: what starts it has the nice value of ranks
        cluster.start_holder("h0")
        cluster.wait_live("h0")
        with memstore.connect("job", rank=0, world_size=1, config=cluster.config) as store:
            assert store.get() is not None
            store.put(1, {"weights": torch.ones(9)}).wait("committed")
            holder = cluster.holders["h0"].pid
            assert outcome() == "forward"
