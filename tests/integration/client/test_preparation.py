"""store.prepare(): the first put's room is there before the put; refusals as at a first put (R9, R10, R19)."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.client.connect import connect
from memstore.client.store import Store
from memstore.core.cluster.text import size_text
from memstore.core.wire.calls import RankCall
from memstore.errors import CapacityError, ClosedError, CommitError, ConfigError, GatherTimeout
from memstore.shell.codec.interpreter import TURN_S
from memstore.shell.rank.leases import Leases
from memstore.shell.threads import ProgressLog
from memstore.testing.clusters.processes import ProcessCluster, wait_for

LABELS = {"memstore": "replica"}
WAIT_S = 60.0
CHUNK = 64 << 10


def state_of(nbytes: int, value: float = 1.0) -> dict[str, Any]:
    return {"weight": torch.full((nbytes // 4,), value)}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessCluster]:
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with ProcessCluster(tmp_path, {"h1": LABELS, "h2": LABELS}, arena_bytes=32 << 20) as made:
        yield made


@contextlib.contextmanager
def ranks(cluster: ProcessCluster, count: int, job: str = "job", **more: Any) -> Iterator[list[Store]]:
    """All ranks of a launch, in this process: each call of `together` runs on a thread of its own."""
    config = cluster.config.with_fields({"connect_timeout_s": WAIT_S, **more})
    with contextlib.ExitStack() as stack:
        joined = together(
            [lambda rank=rank: connect(job, rank=rank, world_size=count, config=config) for rank in range(count)]
        )
        yield [stack.enter_context(store) for store in joined]


def together(calls: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(2 * WAIT_S) for future in [pool.submit(call) for call in calls]]


def test_room_is_prepared_for_an_optimizer_that_has_not_stepped(cluster: ProcessCluster) -> None:
    """The put after the first step, which is three times as large, asks for nothing any more."""
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    with ranks(cluster, 1) as (store,):
        store.prepare({"model": model, "optim": optimizer}).wait(WAIT_S)
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        asked: list[RankCall] = []
        ask = store._link.call_soon
        store._link.call_soon = lambda request: asked.append(request) or ask(request)  # type: ignore
        store.put(1, {"model": model, "optim": optimizer}).wait("committed", WAIT_S)
        assert asked == []


def test_a_prepared_store_has_the_room_pages_and_streams_of_its_first_puts(cluster: ProcessCluster) -> None:
    """When wait() returns both versions are leased and entered, on the peer too; a put asks for nothing any more."""
    with ranks(cluster, 2) as stores:
        with pytest.raises(ConfigError, match="state=-5 is out of range: it must be an int from 0"):
            stores[0].prepare(-5)
        state = state_of(20 * CHUNK)
        preparations = [store.prepare(state) for store in stores]
        for preparation in preparations:
            assert preparation.wait(WAIT_S).is_ready
            assert preparation.seconds > 0
        assert all(len(store._link.leases.free) >= 2 * 20 for store in stores)
        asked: list[RankCall] = []
        for store in stores:
            ask = store._link.call_soon
            store._link.call_soon = lambda request, ask=ask: asked.append(request) or ask(request)  # type: ignore
        tickets = [store.put(1, state) for store in stores]
        for ticket in tickets:
            ticket.wait("committed", WAIT_S)
        assert asked == []
        stats = {row["host"]: row for row in cluster.status()["hosts"]}
        assert set(stats) == {"h1", "h2"}


def test_the_cost_is_reported_once(cluster: ProcessCluster, caplog: pytest.LogCaptureFixture) -> None:
    """One line for the log: bytes of a put, seconds by part."""
    with caplog.at_level(logging.INFO, "memstore"), ranks(cluster, 1) as (store,):
        preparation = store.prepare(16 * CHUNK).wait(WAIT_S)
        assert preparation.nbytes == 16 * CHUNK
        assert caplog.messages.count(preparation.cost) == 1
        assert store.prepare(16 * CHUNK) is preparation


def test_a_preparation_that_takes_long_is_told_up_to_its_end(
    cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """How much of a put's memory is entered; here in every line, on ranks that wait for no terminal."""
    monkeypatch.setattr(ProgressLog, "PERIOD_S", 0.0)
    with caplog.at_level(logging.INFO, "memstore"), ranks(cluster, 1) as (store,):
        store.prepare(16 * CHUNK).wait(WAIT_S)
        size = size_text(2 * 16 * CHUNK)  # both versions
        assert f"memstore job rank 0: preparing puts: {size} of {size}" in caplog.messages


def test_a_first_put_waits_for_a_preparation_under_way_and_asks_for_what_is_more(cluster: ProcessCluster) -> None:
    """The optimizer had no state yet when prepare() was called: the first put gets all of its room, and waits.

    That may take minutes: the collector and turns of threads are meanwhile as ever (D113).
    """
    with ranks(cluster, 2) as stores, ThreadPoolExecutor(1) as pool:
        larger = state_of(30 * CHUNK)
        stores[0].prepare(state_of(2 * CHUNK))
        first = pool.submit(stores[0].put, 1, larger)
        with pytest.raises(TimeoutError):
            first.result(0.5)
        assert gc.isenabled()
        assert sys.getswitchinterval() > 2 * TURN_S
        stores[1].prepare(state_of(2 * CHUNK))
        tickets = [stores[1].put(1, larger), first.result(WAIT_S)]
        assert [ticket.wait("committed", WAIT_S).level for ticket in tickets] == ["committed"] * 2


def test_a_first_put_that_waited_for_its_room_says_how_not_to(
    cluster: ProcessCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, on rank 0, with the seconds; after prepare() there is nothing to say."""
    monkeypatch.setattr("memstore.client.prepare.WAITED_S", 0.0)
    with ranks(cluster, 2, "unprepared") as stores:
        together([lambda store=store: store.put(0, state_of(4 * CHUNK)) for store in stores])
    [said] = [text for text in caplog.messages if "store.prepare(state)" in text]
    assert "unprepared: the first put blocked training for " in said
    caplog.clear()
    with ranks(cluster, 1, "prepared") as (store,):
        store.prepare(4 * CHUNK).wait(WAIT_S)
        store.put(0, state_of(4 * CHUNK))
    assert not [text for text in caplog.messages if "store.prepare(state)" in text]


def test_a_larger_state_can_be_prepared_for_while_training(cluster: ProcessCluster) -> None:
    """Without it, a grown state costs the step in which it has grown (R11)."""
    with ranks(cluster, 1) as (store,):
        store.put(1, state_of(2 * CHUNK)).wait("committed", WAIT_S)
        store.prepare(20 * CHUNK).wait(WAIT_S)
        assert store.put(2, state_of(20 * CHUNK)).wait("committed", WAIT_S).level == "committed"


def test_preparing_for_less_than_the_share_leaves_the_share(cluster: ProcessCluster) -> None:
    """The state grew while training, then less is prepared for: puts of the grown size go on (R10)."""
    with ranks(cluster, 1) as (store,):
        store.put(1, state_of(3 * CHUNK)).wait("committed", WAIT_S)
        store.prepare(10 * CHUNK).wait(WAIT_S)
        store.put(2, state_of(10 * CHUNK)).wait("committed", WAIT_S)
        store.puts.room._preparation = None  # as if the put had grown the room
        assert store.prepare(5 * CHUNK).wait(WAIT_S).nbytes == 10 * CHUNK
        assert store.put(3, state_of(10 * CHUNK)).wait("committed", WAIT_S).level == "committed"


def test_what_cannot_fit_is_refused_on_all_ranks_alike_and_again_at_the_put(cluster: ProcessCluster) -> None:
    """CapacityError at wait(), with the numbers; a put asks again, and a state that fits is put (R10)."""
    with ranks(cluster, 2) as stores:
        preparations = [store.prepare(64 << 20) for store in stores]
        for preparation in preparations:
            with pytest.raises(CapacityError, match="does not fit on h1"):
                preparation.wait(WAIT_S)
            assert preparation.has_failed

        def refused(store: Store) -> None:
            with pytest.raises(CapacityError):
                store.put(1, state_of(64 << 20))

        together([lambda store=store: refused(store) for store in stores])
        tickets = together([lambda store=store: store.put(1, state_of(CHUNK)) for store in stores])
        assert [ticket.wait("committed", WAIT_S).level for ticket in tickets] == ["committed"] * 2


def test_a_larger_first_put_of_one_rank_that_does_not_fit_is_skipped_by_all(cluster: ProcessCluster) -> None:
    """Another rank's first put has fitted: no rank fails, all give the step up, and what fits is put (R10, R12)."""
    with ranks(cluster, 2) as stores:
        for preparation in [store.prepare(CHUNK) for store in stores]:
            preparation.wait(WAIT_S)
        small = stores[1].put(1, state_of(CHUNK // 2)).wait("sealed", WAIT_S)
        large = stores[0].put(1, state_of(64 << 20))
        assert large.level == "skipped"
        assert "does not fit on h1" in large.reason
        wait_for(lambda: small.is_over, "the skip on the other rank", WAIT_S)
        assert small.level == "skipped"
        step = max(store.puts.steps.resume_step for store in stores)
        tickets = [store.put(step, state_of(CHUNK // 2)) for store in stores]
        assert [ticket.wait("committed", WAIT_S).level for ticket in tickets] == ["committed"] * 2


def test_a_restart_may_not_prepare_before_it_has_asked_for_its_history(cluster: ProcessCluster) -> None:
    """As a first put, prepare() would free what it did not look at (R19)."""
    with ranks(cluster, 1) as (store,):
        store.put(1, state_of(4 * CHUNK)).wait("committed", WAIT_S)
    with ranks(cluster, 1) as (store,):
        with pytest.raises(CommitError, match=r"store\.get\(\)"):
            store.prepare(CHUNK).wait(WAIT_S)
        assert store.get().step == 1
        prepared = store.prepare(4 * CHUNK)
        assert prepared.wait(WAIT_S).is_ready
        assert store.prepare(4 * CHUNK) is prepared
        assert store.put(2, state_of(4 * CHUNK, 2.0)).wait("committed", WAIT_S).level == "committed"


def test_a_get_claims_no_room(cluster: ProcessCluster) -> None:
    """Who restores after a restart of the store and puts nothing leaves the arena to others; hosts still grow (R10)."""
    with ranks(cluster, 1) as (store,):
        store.put(1, state_of(64 * CHUNK)).wait("committed", WAIT_S)
    wait_for(
        lambda: is_closed(cluster, "job"), "the end of the attempt", WAIT_S
    )  # else this process would join it again
    cluster.kill_all()
    cluster.start_controller()
    for host in ("h1", "h2"):
        cluster.start_holder(host)
    cluster.wait_live("h1", "h2")
    with ranks(cluster, 1) as (reader,):
        assert reader.get().step == 1
        with ranks(cluster, 1, "passing"):
            pass  # as a process ends, what no job has reserved is given back
        wait_for(
            lambda: claimed_bytes(cluster, "h1") >= 2 * 64 * CHUNK,
            "growth for the reader's puts",
            WAIT_S,
            seen=lambda: cluster.status()["hosts"],
        )
        with ranks(cluster, 1, "other") as (other,):
            assert other.put(1, state_of(128 * CHUNK)).wait("committed", WAIT_S).level == "committed"


def test_a_put_that_was_begun_and_never_ended_costs_no_other_step(cluster: ProcessCluster) -> None:
    """As after a save that failed elsewhere: a rank that needs its slots gives it up alone (R12)."""
    state = state_of(16 * CHUNK)
    with ranks(cluster, 2, stall_budget_s=0.5) as (first, second):
        for step in (1, 2):
            changed = {"weight": state["weight"] + step}
            tickets = together([partial(store.put, step, changed) for store in (first, second)])
            assert [ticket.wait("committed", WAIT_S).level for ticket in tickets] == ["committed"] * 2
        begun = first.puts.begin(3, 16 * CHUNK, began_s=time.monotonic()).ticket
        tickets = [store.put(4, {"weight": state["weight"] + 4}) for store in (second, first)]
        assert [ticket.wait("committed", WAIT_S).level for ticket in tickets] == ["committed"] * 2
        assert (begun.level, begun.reason) == ("failed", "it was begun, not ended, and its slots were needed")


def is_closed(cluster: ProcessCluster, job: str) -> bool:
    return any(row["job"] == job and row["phase"] == "closed" for row in cluster.status()["jobs"])


def claimed_bytes(cluster: ProcessCluster, host: str) -> int:
    return next(int(row["stats"].get("claimed_bytes", 0)) for row in cluster.status()["hosts"] if row["host"] == host)


def test_a_rank_that_waits_alone_is_reported_who_is_missing(cluster: ProcessCluster) -> None:
    """The deadline is the job's connect_timeout_s; what waits ends with it, and a timeout of its own does not."""
    with ranks(cluster, 2, connect_timeout_s=2.0) as stores:
        preparation = stores[0].prepare(CHUNK)
        with pytest.raises(TimeoutError, match="goes on"):
            preparation.wait(0.05)
        with pytest.raises(GatherTimeout, match="1 of 2"):
            preparation.wait(WAIT_S)


def test_a_preparation_whose_pages_never_come_ends_as_closed(
    cluster: ProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed while it waits for its leases: ClosedError, no word of a peer that did not answer."""
    monkeypatch.setattr(Leases, "entered_count", lambda _: 0)
    with ranks(cluster, 1) as (store,):
        preparation = store.prepare(CHUNK)
        preparation._answer.result(WAIT_S)
        store.close()
        with pytest.raises(ClosedError):
            preparation.wait(WAIT_S)


def test_closing_ends_a_preparation_that_waits(cluster: ProcessCluster) -> None:
    """No thread and no question outlives the store."""
    with ranks(cluster, 2) as stores:
        preparation = stores[0].prepare(CHUNK)
        stores[0].close()
        assert preparation.has_failed
