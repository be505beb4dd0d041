"""`memstore status --check` on real processes: ranks that are killed, a holder that is frozen, ranks that disagree."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
from cli_store import connect_all, on_every_rank, run

from memstore.client.store import Store
from memstore.testing.clusters.processes import ProcessCluster, wait_for
from memstore.testing.ranks.fleet import Fleet
from memstore.testing.ranks.rank_process import RankNursery, together

FROZEN_S = 1.0  # shorter than dead_after_s
BUSY_S = 5.0  # longest that a put of the small budget takes on a busy machine
HOSTS = {"h1": {"rack": "r1"}, "h2": {"rack": "r2"}, "h3": {"rack": "r3", "memstore": "replica"}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("store"), HOSTS) as cluster:
        yield cluster


def kinds(cluster: ProcessCluster) -> set[str]:
    """The kinds of the problems of job "train"."""
    return {row["kind"] for row in cluster.status()["problems"] if row["about"] == "train"}


def check(cluster: ProcessCluster) -> int:
    """What `memstore status --check` exits with."""
    return run(cluster, "status", "--check").exit_code


def test_a_killed_rank_stops_training_and_a_frozen_holder_does_not(
    cluster: ProcessCluster, nursery: RankNursery
) -> None:
    """Exit code 5 with rank, host and pid until the job is started again; a frozen holder's ranks are out of sight."""
    fleet = Fleet(cluster, nursery)
    ranks = fleet.begin(["h1", "h2"], last_step=3)
    wait_for(lambda: check(cluster) == 0, "a store without trouble")
    cluster.signal_holder("h2", signal.SIGSTOP)
    wait_for(lambda: "ranks_unseen" in kinds(cluster), "ranks out of sight")
    screen = run(cluster, "status", "--check")
    assert screen.exit_code == 4
    assert "ranks_ended" not in kinds(cluster)
    assert "do not restart them for that" in screen.stdout
    cluster.signal_holder("h2", signal.SIGCONT)
    wait_for(lambda: "ranks_unseen" not in kinds(cluster), "the ranks of h2 in sight again")
    last = fleet.put_until_committed(ranks, 4)
    wait_for(lambda: check(cluster) == 0, "a store without trouble")
    ranks[1].kill()
    wait_for(lambda: check(cluster) == 5, "the exit code of a job that does not train")
    screen = run(cluster, "status", "--check")
    words = f"1 of 2 ranks ended without closing the store (rank 1 on h2, pid {ranks[1].pid}, put up to step {last})"
    assert words in screen.stdout
    assert "with --check the exit code would be 5 (stopped)" in screen.stdout
    assert re.search(r"^train .* 1/2 !", screen.stdout, re.MULTILINE)
    fleet.kill(ranks)
    ranks, got = fleet.resume(["h1", "h2"])  # the remedy
    assert got["step"] == last
    assert kinds(cluster).isdisjoint({"ranks_ended", "ranks_unseen"})
    wait_for(lambda: check(cluster) == 0, "a store without trouble")
    together(ranks, "close")


@contextlib.contextmanager
def launched(cluster: ProcessCluster, job: str, **fields: Any) -> Iterator[list[Store]]:
    """Connect two ranks of this process, and restore nothing."""
    stores = connect_all(cluster.config.with_fields(fields), job)
    try:
        assert on_every_rank(2, lambda rank: stores[rank].get()) == [None, None]
        yield stores
    finally:
        for store in stores:
            store.close()


def test_ranks_that_put_different_steps_are_warned_and_so_is_who_starts_from_nothing(
    cluster: ProcessCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank's log says who puts what, ever more rarely; the next get() is None and says why (D284)."""
    caplog.set_level(logging.WARNING, "memstore")
    state: dict[str, Any] = {"w": np.ones(100)}

    def said(rank: int) -> list[str]:
        found = [text for text in map(logging.LogRecord.getMessage, caplog.records) if f"clocks rank {rank}: " in text]
        caplog.records[:] = [] if rank else caplog.records
        return found

    with launched(cluster, "clocks") as stores:
        found: list[list[str]] = [[], []]
        for turn in range(1, 200):
            pair = [10 * turn, 10 * turn + 1]
            tickets = on_every_rank(2, lambda rank, pair=pair: stores[rank].put(pair[rank], state))
            for ticket in tickets:
                wait_for(lambda ticket=ticket: ticket.level != "pending", f"{ticket} sealed or given up")
            found = [mine + more for mine, more in zip(found, [said(0), said(1)], strict=True)]
            if min(map(len, found)) >= 2:
                break
        for mine in found:
            counts = [int(n) for text in mine for n in re.findall(r"(\d+) puts in a row were skipped", text)]
            assert counts == [3 << n for n in range(len(mine))]
            assert "Every rank has to put the same steps, and rank " in mine[-1]
            assert re.search(r"rank 0 puts \d+0, \d+0, \d+0\b", mine[-1])
            assert re.search(r"rank 1 puts \d+1, \d+1, \d+1\b", mine[-1])
    with launched(cluster, "clocks") as stores:
        for rank in range(2):
            [text] = said(rank)
            assert "there is no step to restore although steps were put: attempt 1 put steps up to" in text
            assert "Every rank has to put the same steps" in text
        on_every_rank(2, lambda rank: stores[rank].put(1, state).wait("committed", 30))  # the remedy
        assert [said(rank) for rank in range(2)] == [[], []]


def test_puts_that_come_faster_than_their_copies_are_skipped_unless_training_may_wait(cluster: ProcessCluster) -> None:
    """The row about room, the reason with the step that holds it, and both printed remedies."""
    state: dict[str, Any] = {"w": np.ones(100_000)}

    def row() -> dict[str, Any] | None:
        rows = [row for row in cluster.status()["problems"] if row["about"].startswith("fast")]
        return next((row for row in rows if row["kind"] == "steps_skipped"), None)

    def frozen_meanwhile(stores: list[Store], first: int, limit_s: float) -> list[str]:
        """Put two steps while no copy leaves this process's hosts, until a rank is done; the first fills the room."""
        cluster.signal_holder("h2", signal.SIGSTOP)
        with ThreadPoolExecutor(2) as pool:
            puts = [pool.submit(lambda store=store: [store.put(first + n, state) for n in (0, 1)]) for store in stores]
            wait(puts, limit_s, FIRST_COMPLETED)
            cluster.signal_holder("h2", signal.SIGCONT)
            tickets = [put.result(60) for put in puts]
        for pair in tickets:
            wait_for(lambda pair=pair: pair[1].level not in ("pending", "sealed", "replicated"), "the end of a put")
        return [pair[1].reason if pair[1].level == "skipped" else "" for pair in tickets]

    with launched(cluster, "fast", stall_budget_s=0.05) as stores:
        on_every_rank(2, lambda rank: stores[rank].put(1, state).wait("committed", 30))
        reasons = frozen_meanwhile(stores, 2, BUSY_S)
        assert any("no free slots within 0.05 s: step 2 is not committed yet" in reason for reason in reasons)
        found = wait_for(row, "the row")
        assert found["remedy"].startswith("put less often, or raise stall_budget_s if training may wait")
    with launched(cluster, "faster", stall_budget_s=30.0) as stores:
        on_every_rank(2, lambda rank: stores[rank].put(1, state).wait("committed", 30))
        assert frozen_meanwhile(stores, 2, FROZEN_S) == ["", ""]
