"""Signs of a coming failure: an early put on all ranks alike or on none, an early durable write, nothing more (R41)."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore.client.connect import connect
from memstore.core.precautions import AGAIN_S, COUNTERS
from memstore.core.report.event_kinds import event_text
from memstore.core.schedule import EarlyPut, Schedule
from memstore.core.wire.calls import DrainHost
from memstore.core.wire.messages import HostBeat
from memstore.core.wire.orders import PutEarly
from memstore.intervals import parse_put_every
from memstore.shell.holder.hardware import HardwareErrors
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.controller.holder import host_stats
from memstore.testing.controller.world import JOB, ControllerWorld

WAIT_S = 60.0

# -- a rank's part ------------------------------------------------------------------------------------


@given(st.data())
def test_no_rank_puts_alone_whatever_comes_first(data: st.DataObject) -> None:
    """Ranks that train, questions, answers and decisions in any order: all put the step, or none does."""
    count, step = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6))
    ranks = [EarlyPut() for _ in range(count)]
    at, put = [0] * count, [set[int]() for _ in ranks]
    answers: dict[int, bool] = {}
    told, asked = set[int](), set[int]()
    while min(at) < 8:
        is_decided = False in answers.values() or len(answers) == count
        moves: list[tuple[str, int]] = [("train", rank) for rank in range(count) if at[rank] < 8]
        moves += [("ask", rank) for rank in range(count) if rank not in asked]
        moves += [("tell", rank) for rank in asked - told if is_decided]
        what, rank = data.draw(st.sampled_from(moves))
        if what == "ask":
            asked.add(rank)
            answers[rank] = ranks[rank].offered(step)
        elif what == "tell":
            told.add(rank)
            ranks[rank].decided(step, is_agreed=all(answers.values()))
        else:
            is_early = ranks[rank].asks(at[rank])
            if is_early is None:  # it waits: the others come first
                assert rank not in told
                if not is_decided and asked != set(range(count)):
                    other = next(other for other in range(count) if other not in asked)
                    asked.add(other)
                    answers[other] = ranks[other].offered(step)
                elif is_decided:
                    told.add(rank)
                    ranks[rank].decided(step, is_agreed=all(answers.values()))
                continue
            put[rank] |= {at[rank]} if is_early else set()
            at[rank] += 1
    assert all(each == put[0] for each in put)
    assert put[0] <= {step}


def test_a_question_beside_an_agreed_put_is_refused_and_the_same_step_asked_again_is_put_again() -> None:
    """Else a rank that learned of the second before it came to the first would leave that out."""
    rank = EarlyPut()
    assert rank.offered(5)
    rank.decided(5, is_agreed=True)
    assert not rank.offered(9)
    assert [rank.asks(step) for step in (3, 4, 5, 5, 6)] == [False, False, True, True, False]
    assert rank.offered(9)
    assert rank.asks(12) is None, "steps may count samples: the first one from there on"
    rank.give_up()
    assert rank.asks(13) is False


# -- the controller -----------------------------------------------------------------------------------


class LockStep:
    """Ranks that train one step after the other, each at its own pace and none more than one ahead, in virtual time."""

    def __init__(self, world: ControllerWorld, paces_s: Sequence[float], job: str = JOB) -> None:
        self.world, self.ranks = world, world.launch(len(paces_s), job=job)
        world.get(self.ranks)
        world.reserve(self.ranks)
        every = parse_put_every(self.ranks[0].answers["join"][-1]["put_every"])
        self.schedules = [Schedule(every, None) for _ in paces_s]
        self.early = [EarlyPut() for _ in paces_s]
        self.put: list[list[int]] = [[] for _ in paces_s]
        self.at = [0] * len(paces_s)
        self.job, self.is_over = job, False
        for number, pace_s in enumerate(paces_s):
            self.ranks[number].on_put_early = self._listener(number)
            self._step(number, pace_s)

    def _listener(self, number: int) -> Callable[[PutEarly], None]:
        def take(message: PutEarly) -> None:
            if message.is_agreed is not None:
                self.early[number].decided(message.step, is_agreed=message.is_agreed)
                return
            is_possible = self.early[number].offered(message.step)
            self.world.call(self.ranks[number], "answer_put_early", step=message.step, is_possible=is_possible)

        return take

    def _step(self, number: int, pace_s: float) -> None:
        if self.is_over:
            return
        rank, step = self.ranks[number], self.at[number]
        is_early = None if step > min(self.at) or rank.is_blocked else self.early[number].asks(step)
        if is_early is not None:
            if self.schedules[number].due(step) or is_early:
                self.put[number].append(step)
                self.world.put(rank, step)
            self.at[number] += 1
            session = self.world._sessions.get(rank.host_id)
            if session is not None:
                trained = {self.job: (rank.attempt, step)}
                session.report(HostBeat(rank.host_id, clock_s=session.clock_s, trained=trained))
        self.world.at(pace_s if is_early is not None else 0.05, lambda: self._step(number, pace_s))

    def run(self, seconds: float) -> None:
        self.world.run(seconds)


def drain(world: ControllerWorld, training: LockStep, host: str) -> None:
    """Give notice of a host's end."""
    world.call(training.ranks[0], "drain", host=host, within_s=600.0)


def told(world: ControllerWorld, kind: str, job: str = JOB) -> list[dict[str, Any]]:
    """The events of a kind."""
    return [event for event in world.events(job) if event["event"] == kind]


@pytest.mark.parametrize("seed", range(12))
def test_a_notice_causes_one_early_put_on_all_ranks_alike(seed: int) -> None:
    """Whatever their pace: the same steps on all, committed within seconds, and the steps after them as ever."""
    rng = random.Random(seed)
    world = ControllerWorld(4, seed=seed, put_every=200)
    training = LockStep(world, [rng.uniform(0.05, 0.5) for _ in range(3)])
    training.run(30.0)
    drain(world, training, "h1")
    training.run(20.0)
    [sign], [early] = told(world, "precaution"), told(world, "early_put")
    assert (sign["host"], sign["sign"], early["step"], early["why_not"]) == ("h1", "drain", sign["step"], "")
    assert early["step"] in {event["step"] for event in told(world, "commit")}
    training.run(60.0)
    assert training.put[0] == training.put[1] == training.put[2]
    assert {*training.put[0]} - {early["step"]} <= {*range(199, 2000, 200)}
    assert not any("given up" in note for note in world.notes)


def test_several_notices_at_once_are_one_early_put_at_a_time() -> None:
    """A scale-down drains many hosts in a second: no rank is asked for a second step before the first is over."""
    world = ControllerWorld(6, put_every=10_000)
    training = LockStep(world, [0.1, 0.2, 0.1])
    training.run(30.0)
    for host in ("h1", "h2", "h5"):
        drain(world, training, host)
        training.run(1.5)
    training.run(15.0)
    assert training.put[0] == training.put[1] == training.put[2]
    assert len(training.put[0]) == 1
    drain(world, training, "h4")
    drain(world, training, "h0")
    training.run(20.0)
    assert training.put[0] == training.put[1] == training.put[2]
    assert len(training.put[0]) == 2


def test_a_rank_that_does_not_answer_is_no_reason_to_wait() -> None:
    """All are told that the step is not put; none of them puts it."""
    world = ControllerWorld(4, put_every=10_000)
    training = LockStep(world, [0.1, 0.1, 0.1])
    training.ranks[2].on_put_early = bool
    training.run(30.0)
    drain(world, training, "h1")
    training.run(20.0)
    [early] = told(world, "early_put")
    assert early["why_not"] == "1 ranks did not answer within 3 s"
    assert training.put == [[], [], []]
    assert min(training.at) > early["step"]


def test_a_rank_that_has_passed_the_step_keeps_all_from_putting_it() -> None:
    """Its word is late: the others, which wait there or come to it, go on without a put."""
    world = ControllerWorld(4, put_every=10_000)
    training = LockStep(world, [0.1, 0.1, 0.1])
    training.run(30.0)
    training.early[1].asks(10**6)
    drain(world, training, "h1")
    training.run(20.0)
    [early] = told(world, "early_put")
    assert "rank 1 had passed it" in early["why_not"]
    assert training.put == [[], [], []]


@pytest.mark.parametrize("seed", range(8))
def test_a_controller_that_dies_meanwhile_leaves_no_rank_waiting(seed: int) -> None:
    """Ranks that were asked and told nothing give up after their budget; a step that some put is given up on all."""
    world = ControllerWorld(4, seed=seed, put_every=10_000)
    training = LockStep(world, [0.1, 0.15, 0.1])
    training.run(30.0)
    drain(world, training, "h1")
    world.run(random.Random(seed).uniform(0.0, 0.15))
    world.crash_controller()
    training.run(10.0)
    for early in training.early:
        early.give_up()
    at = min(training.at)
    training.run(10.0)
    assert min(training.at) > at
    assert world.run_until(lambda: bool(world.served.is_settled), 30.0)


def test_an_early_put_and_the_newest_step_are_written_to_durable_storage() -> None:
    """Long before durable_every; once, and only where a tier is configured."""
    world = ControllerWorld(4, put_every=10_000, durable="/durable", durable_every="1d")
    training = LockStep(world, [0.1, 0.1, 0.1])
    training.run(30.0)
    drain(world, training, "h1")
    training.run(30.0)
    [early] = told(world, "early_put")
    assert [event["step"] for event in told(world, "durable")] == [early["step"]]
    assert told(world, "precaution")[0]["durable"]


def test_a_job_that_puts_every_step_is_only_written() -> None:
    """Nothing is asked of its ranks; the newest committed step at the sign becomes durable."""
    world = ControllerWorld(4, durable="/durable", durable_every="1d")
    training = LockStep(world, [0.3, 0.3, 0.3])
    training.run(20.0)
    before = {event["step"] for event in told(world, "durable")}
    drain(world, training, "h1")
    training.run(20.0)
    [sign] = told(world, "precaution")
    assert ("step" not in sign, sign["why_not"]) == (True, "its next put comes as soon")
    assert told(world, "early_put") == []
    assert len({event["step"] for event in told(world, "durable")} - before) == 1


def beat(world: ControllerWorld, host: str, **counts: int) -> None:
    """A heartbeat with what a host counts."""
    world._handle(HostBeat(host, clock_s=world._sessions[host].clock_s, stats=host_stats(**counts)))


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("scrub", "scrub"),
        ("uncorrected", "uncorrected_errors"),
        ("corrected", "corrected_errors"),
        ("link", "link_errors"),
    ],
)
def test_counts_that_rise_are_a_sign_and_what_was_before_is_none(kind: str, field: str) -> None:
    """By the threshold of each; no host is emptied for it. A holder's own count begins with it."""
    world, rise = ControllerWorld(4, put_every=10_000), COUNTERS[kind].rise
    if COUNTERS[kind].begins_with_holder:
        world.crash_controller()  # its successor cannot know what was a sign already
        world.run(5.0)
    training = LockStep(world, [0.1, 0.1, 0.1])
    training.run(30.0)
    beat(world, "h1", **{field: 5000})
    beat(world, "h1", **{field: 5000 + rise - 1})
    assert told(world, "precaution") == []
    beat(world, "h1", **{field: 5000 + rise})
    training.run(20.0)
    [sign] = told(world, "precaution")
    assert (sign["sign"], sign["host"], len(training.put[0])) == (kind, "h1", 1)
    assert not world.served.state.draining
    row = next(e for e in world.served.parts.recorder.recent_events.since(0) if e.event == "precaution")
    assert "ahead of its turn; no durable storage is configured" in event_text(row)


def test_a_guess_is_acted_on_once_in_ten_minutes_and_only_for_jobs_that_are_there() -> None:
    """A cable that makes errors without end costs a put in ten minutes; a job on other hosts nothing."""
    world = ControllerWorld(6, put_every=10_000)
    training = LockStep(world, [0.1, 0.1])
    other = LockStep(world, [0.1], job="other")
    here = {rank.host_id for rank in training.ranks} | {
        host for host in world.job().on_host if world.job().on_host[host]
    }
    training.run(30.0)
    host = training.ranks[1].host_id
    assert host in here
    assert host != other.ranks[0].host_id
    for number in range(50):
        beat(world, host, link_errors=number * 5000)
        training.run(4.0)
    assert len(told(world, "precaution")) == 1
    training.run(AGAIN_S)
    beat(world, host, link_errors=10**6)
    training.run(20.0)
    assert len(told(world, "precaution")) == 2
    assert training.put[0] == training.put[1]
    assert told(world, "precaution", "other") == []


def test_a_host_that_is_silent_or_dies_again_and_again_is_a_sign() -> None:
    """Three times within ten minutes, each; what goes on is told once."""
    world = ControllerWorld(4, put_every=10_000)
    training = LockStep(world, [0.1, 0.1])
    training.run(30.0)
    for _ in range(4):
        world.silence("h1")
        training.run(2.5)
        world.thaw("h1")
        training.run(10.0)
    signs = told(world, "precaution")
    assert [sign["sign"] for sign in signs] == ["slow"]
    assert "silent for a while 3 times" in signs[0]["why"]


def test_an_epochs_job_is_never_put_in_the_middle_of_one_and_a_removed_job_is_forgotten() -> None:
    """It asked for ends of epochs since it can resume nowhere else."""
    world = ControllerWorld(4, put_every="epoch")
    training = LockStep(world, [0.1, 0.1])
    training.run(30.0)
    drain(world, training, "h1")
    training.run(20.0)
    [sign] = told(world, "precaution")
    assert 'put_every="epoch"' in sign["why_not"]
    assert training.put == [[], []]
    training.is_over = True
    world.call(training.ranks[0], "rm", force=True)
    training.run(5.0)
    assert world.served.parts.precautions.of == {}


# -- the holder, real ranks ---------------------------------------------------------------------------


def test_what_the_kernel_counts_is_read_where_it_says_something(tmp_path: Path) -> None:
    """Files that are not there, not readable or no numbers count nothing."""
    counts = {
        "devices/system/edac/mc/mc0/ce_count": "7\n",
        "devices/system/edac/mc/mc1/ce_count": "5\n",
        "devices/system/edac/mc/mc0/ue_count": "1\n",
        "class/net/eth0/statistics/rx_errors": "20\n",
        "class/net/eth0/statistics/tx_errors": "nonsense",
        "class/infiniband/mlx5_0/ports/1/counters/symbol_error": "3\n",
    }
    for name, text in counts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "class/net/lo/statistics/rx_errors").mkdir(parents=True)
    found = HardwareErrors(threading.Event(), tmp_path)
    found.look()
    assert found.counts == {"corrected_errors": 12, "uncorrected_errors": 1, "link_errors": 23}
    nothing = HardwareErrors(threading.Event(), tmp_path / "none")
    nothing.look()
    assert set(nothing.counts.values()) == {0}


@pytest.mark.parametrize("is_listed", [False, True])
def test_what_the_kernel_counts_stays_while_no_file_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """Counts that fell to nothing and came back would be new errors, and an early put; the thread goes on."""
    path = tmp_path / "class/net/eth0/statistics/rx_errors"
    path.parent.mkdir(parents=True)
    path.write_text("20")
    found = HardwareErrors(threading.Event(), tmp_path)
    found.look()
    if is_listed:
        monkeypatch.setattr(found, "_files", lambda patterns: [path])
    limits, lowest = resource.getrlimit(resource.RLIMIT_NOFILE), os.open(tmp_path, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        found.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(lowest)
    assert found.counts["link_errors"] == 20
    path.write_text("21")
    found.look()
    assert found.counts["link_errors"] == 21


def test_real_ranks_put_one_step_early_when_a_host_is_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in lock-step that would put every millionth step: after a notice both put the same one."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with ProcessCluster(tmp_path, {"h1": {"memstore": "replica"}, "h2": {"memstore": "replica"}}) as cluster:
        config = cluster.config.with_fields({"put_every": 10**6, "connect_timeout_s": WAIT_S})
        together, put, is_told = threading.Barrier(2), threading.Event(), threading.Event()

        def train(rank: int) -> list[int]:
            early, step = list[int](), 0
            with connect("job", rank=rank, world_size=2, config=config) as store:
                while not early:
                    together.wait(WAIT_S)
                    if store.should_put(step):
                        store.put(step, {"weight": torch.ones(1000) * step}).wait("committed", WAIT_S)
                        early.append(step)
                    step += 1
                    put.wait(0.02)  # a step's work
                    if rank == 0 and step == 150:
                        cluster.ask(DrainHost(host="h1", within_s=600.0))
                        is_told.set()
            return early

        with ThreadPoolExecutor(2) as pool:
            one, other = (future.result(2 * WAIT_S) for future in [pool.submit(train, rank) for rank in (0, 1)])
        assert is_told.is_set()
    assert one == other
    assert len(one) == 1
