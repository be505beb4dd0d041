"""How often to put: near the optimum, within its budget, and the same steps on every rank (R33)."""

from __future__ import annotations

import math
import random
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore.client.connect import connect
from memstore.client.put_interval import PutSchedule
from memstore.client.puts import Puts
from memstore.client.store import Store
from memstore.client.ticket import Ticket
from memstore.core.schedule.put_interval import (
    Measured,
    Schedule,
    decide_steps,
    mean_time_between_failures_s,
    optimal_interval_s,
)
from memstore.core.wire.replies import Joined, PutInterval
from memstore.errors import ConfigError, GatherTimeout
from memstore.intervals import STEPS_MAX, Every, parse_put_every
from memstore.testing.clusters.processes import ProcessCluster
from memstore.testing.controller.holder import FakeRank
from memstore.testing.controller.world import ControllerWorld

WAIT_S = 60.0


def efficiency(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Useful time over wall time, exact for exponential failures and a restart that costs nothing."""
    return interval_s / (mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s))


def simulated(interval_s: float, cost_s: float, mtbf_s: float, rng: random.Random) -> float:
    """The same from failures drawn one by one."""
    wall_s = useful_s = 0.0
    until_failure_s = rng.expovariate(1 / mtbf_s)
    while wall_s < 3000 * mtbf_s:
        piece_s = interval_s + cost_s
        if piece_s <= until_failure_s:
            wall_s, useful_s, until_failure_s = wall_s + piece_s, useful_s + interval_s, until_failure_s - piece_s
        else:  # what was computed since the last checkpoint is lost
            wall_s += until_failure_s
            until_failure_s = rng.expovariate(1 / mtbf_s)
    return useful_s / wall_s


@pytest.mark.parametrize("cost_s", [0.001, 0.1, 2.0, 60.0, 600.0])
@pytest.mark.parametrize("mtbf_s", [600.0, 3600.0, 86_400.0])
def test_the_optimum_wastes_no_more_than_the_best_of_all_intervals(cost_s: float, mtbf_s: float) -> None:
    """Against brute force over five decades of intervals."""
    best = max(efficiency(mtbf_s * 10 ** (k / 100 - 5), cost_s, mtbf_s) for k in range(601))
    assert efficiency(optimal_interval_s(cost_s, mtbf_s), cost_s, mtbf_s) >= 0.99 * best


def test_simulated_failures_agree_with_the_optimum() -> None:
    """A third and three times the optimal interval both lose more, in failures drawn one by one."""
    cost_s, mtbf_s, rng = 5.0, 600.0, random.Random(3)
    best_s = optimal_interval_s(cost_s, mtbf_s)
    less, best, more = (simulated(f * best_s, cost_s, mtbf_s, rng) for f in (1 / 3, 1, 3))
    assert best > max(less, more)
    assert best == pytest.approx(efficiency(best_s, cost_s, mtbf_s), abs=0.02)


def test_what_put_every_says() -> None:
    """Steps, times, shares, and what is refused, with the ways to say it."""
    assert [parse_put_every(v).steps for v in ("step", 7)] == [1, 7]
    assert parse_put_every("5min") == Every(interval_s=300.0)
    assert parse_put_every("2%") == Every(overhead=0.02)
    assert parse_put_every("auto") == Every()
    for bad in (0, -1, True, 1.5, None, "0s", "100%", "steps", "1e9s"):
        with pytest.raises(ConfigError, match="auto"):
            parse_put_every(bad)


def test_the_slowest_rank_and_the_commits_bound_the_distance() -> None:
    """A budget is never exceeded; no mode puts faster than commits come (R12)."""
    fast, slow = Measured(0.1, 0.004, 0.15), Measured(0.1, 0.010, 0.35)
    assert decide_steps(parse_put_every("2%"), [fast, slow], 1e6) == 5
    assert decide_steps(parse_put_every("30s"), [fast, slow], 1e6) == 300
    assert decide_steps(parse_put_every("100s"), [Measured(1e-9, 0, 0)], 1e6) == STEPS_MAX
    assert decide_steps(parse_put_every("50%"), [fast, slow], 1e6) == 4, "a commit takes 3.5 steps"
    assert decide_steps(parse_put_every("auto"), [fast, slow], 3600.0) == round(optimal_interval_s(0.01, 3600) / 0.1)
    assert decide_steps(parse_put_every("auto"), [], 3600.0) == 1
    assert decide_steps(parse_put_every(9), [slow], 3600.0) == 9, "the user's own word stands"
    assert mean_time_between_failures_s(0.0, 0) == 86_400
    assert mean_time_between_failures_s(86_400.0, 7) == 21_600


answers = st.lists(st.integers(1, 3000), min_size=1, max_size=6)


@given(st.integers(-1, 10_000), answers, st.randoms(use_true_random=False))
def test_ranks_that_receive_at_different_times_agree_on_every_step(
    base: int, reported: list[int], rng: random.Random
) -> None:
    """Each answer may come at any time before it counts: no step is due on one rank and not on another."""
    early, late = Schedule(Every(), base), Schedule(Every(), base)
    received, taken, step = 0, 0, base + 1
    while True:
        early.come_to(step)
        late.come_to(step)
        if early.asks_at <= step and received < len(reported) and rng.random() < 0.3:
            early.take(reported[received])  # ahead of its time
            received += 1
        if early.is_open(step):
            if received == len(reported):
                return
            early.take(reported[received])
            received += 1
            continue
        while late.is_open(step):
            late.take(reported[taken])  # at the last moment
            taken += 1
        assert taken <= received
        assert early.due(step) == late.due(step), f"step {step}"
        step += 1 if rng.random() < 0.9 else rng.randrange(1, 40)


@given(st.integers(-1, 1000), answers)
def test_due_steps_keep_the_distance_that_was_sent(base: int, reported: list[int]) -> None:
    """Against a walk over all steps: due is the first step as far from the last due one as holds there."""
    schedule = Schedule(Every(), base)
    holds = {base + 1: 1}
    for steps in reported:
        holds[schedule.holds_from] = steps
        schedule.take(steps)
    end = min(schedule.holds_from, base + 6000)
    last, distance = base, 1
    for step in range(base + 1, end):
        distance = holds.get(step, distance)
        is_due = step >= last + distance
        assert schedule.due(step) == is_due, f"step {step}"
        last = step if is_due else last


class Questions:
    """In the place of the puts of a store: keeps what is asked, and answers at once, or when ordered to."""

    job, rank = "job", 0

    def __init__(self, steps: int | None = 1) -> None:
        self.steps = steps
        self.asked: list[int] = []
        self.measured: list[dict[str, float]] = []
        self.answers: list[Future[dict[str, Any]]] = []
        self.forgotten: list[Future[dict[str, Any]]] = []

    def newest_first(self) -> list[Ticket]:
        return []

    def ask_put_interval(self, step: int, measured: dict[str, float]) -> Future[dict[str, Any]]:
        self.asked.append(step)
        self.measured.append(measured)
        self.answers.append(Future())
        if self.steps is not None:
            self.answers[-1].set_result(PutInterval(steps=self.steps))
        return self.answers[-1]

    def forget_put_interval(self, answer: Future[dict[str, Any]]) -> None:
        self.forgotten.append(answer)


def put_intervals_of(questions: Questions, put_every: str = "10min") -> PutSchedule:
    put_intervals = PutSchedule(cast(Puts, questions), 0.01)
    put_intervals.begin_attempt(
        Joined(
            attempt=1, world_size=1, rank=0, restored_step=None, resume_step=0, put_every=put_every,
            shared_shard=None,
        )
    )  # fmt: skip
    return put_intervals


@pytest.mark.parametrize("first", [50_000, 10**8])
def test_a_training_that_begins_far_on_asks_as_one_that_begins_at_0(first: int) -> None:
    """A job without history may number its steps from anywhere: no round of the past is worked through."""
    questions = Questions(5)
    put_intervals = put_intervals_of(questions)
    assert [step - first for step in range(first, first + 30) if put_intervals.due(step)] == [*range(11), 15, 20, 25]
    assert questions.asked == [first + 7]


def test_a_jump_asks_once_where_it_lands_and_keeps_the_distance() -> None:
    """Steps that count samples pass over rounds: one question at most for each step there is."""
    questions = Questions(5)
    put_intervals = put_intervals_of(questions)
    steps = [0, *range(10**6, 10**6 + 3000 * 100, 3000)]
    for step in steps:
        put_intervals.due(step)
    assert set(questions.asked) <= set(steps)
    assert len(questions.asked) == len(set(questions.asked))
    assert all(measured["step_s"] < 1.0 for measured in questions.measured)


def test_a_refused_question_is_asked_again_and_a_void_one_forgotten() -> None:
    """An answer that ended with an error is not kept for ever; a get ends what was asked for before it."""
    questions = Questions(None)
    put_intervals = put_intervals_of(questions)
    for step in range(8):
        put_intervals.due(step)
    questions.answers[0].set_exception(GatherTimeout("given up"))
    for step in range(8, 13):
        put_intervals.due(step)
    assert questions.asked == [7, 7]
    questions.answers[1].set_result(PutInterval(steps=3))
    assert [step for step in range(13, 20) if put_intervals.due(step)] == [13, 16, 19]
    questions = Questions(None)
    put_intervals = put_intervals_of(questions)
    for step in range(8):
        put_intervals.due(step)
    put_intervals.restart(100)
    assert questions.forgotten == questions.answers


def test_a_round_that_is_given_up_refuses_who_waits_for_it() -> None:
    """A rank whose question lapsed learns of it, and can ask again (R33)."""
    world = ControllerWorld(2, put_every="10%")
    ranks = world.launch(2)
    world.call(ranks[0], "ask_put_interval", step=7, step_s=0.1, stall_s=0.1, commit_s=0.0)
    world.run(1.0)
    world.call(ranks[1], "ask_put_interval", step=43, step_s=0.1, stall_s=0.1, commit_s=0.0)
    assert world.run_until(lambda: bool(ranks[0].errors.get("ask_put_interval")), 10.0)
    assert "step 43" in ranks[0].error("ask_put_interval")


def test_what_was_not_measured_changes_no_distance() -> None:
    """No step, or no put within a long distance: neither says that a step or a put costs nothing."""
    for every in ("30s", "2%", "auto"):
        assert decide_steps(parse_put_every(every), [Measured(0.0, 0.0, 0.0)], 3600.0, 700) == 700
    for every in ("2%", "auto"):
        assert decide_steps(parse_put_every(every), [Measured(0.1, 0.0, 0.0)], 3600.0, 700) == 700
    world = ControllerWorld(2, put_every="10%")
    ranks = world.launch(2)
    for step, stall_s in ((7, 0.04), (43, 0.0)):
        for rank in ranks:
            world.call(rank, "ask_put_interval", step=step, step_s=0.1, stall_s=stall_s, commit_s=0.0)
        assert world.run_until(
            lambda step=step: all(len(r.answers.get("ask_put_interval", ())) == 1 + step // 43 for r in ranks), 10.0
        )
    assert [rank.answers["ask_put_interval"] for rank in ranks] == [[{"steps": 4}] * 2] * 2


@pytest.mark.parametrize("ended", ["none", "died", "closed"])
def test_auto_puts_more_often_where_attempts_die(ended: str) -> None:
    """Daly's optimum by the failures that were seen; an attempt that all its ranks closed is none (R33)."""
    world, ends = ControllerWorld(2, put_every="auto"), 0 if ended == "none" else 24
    for _ in range(ends):
        for rank in (ranks := world.launch(2)):
            world.call(rank, "close" if ended == "closed" else "steps")
        world.run(1.0)
    ranks = world.launch(2)
    for rank in ranks:
        world.call(rank, "ask_put_interval", step=7, step_s=1.0, stall_s=2.0, commit_s=0.0)
    assert world.run_until(lambda: all(rank.answers.get("ask_put_interval") for rank in ranks), 10.0)
    mtbf_s = 86_400.0 / (1 + (ends if ended == "died" else 0))
    steps = round(optimal_interval_s(2.0, mtbf_s))
    for rank in ranks:
        assert rank.answers["ask_put_interval"][-1]["steps"] == pytest.approx(steps, rel=0.01)


def test_a_fixed_distance_counts_from_the_step_that_was_restored() -> None:
    """Nothing is asked, no step is due twice."""
    schedule = Schedule(Every(steps=4), 10)
    assert [step for step in range(25) if schedule.due(step)] == [14, 18, 22]
    assert not schedule.is_open(10**6)


@pytest.mark.parametrize("crash_at", [None, 0, 1, 2, 3])
def test_all_ranks_are_sent_the_same_by_any_controller(crash_at: int | None) -> None:
    """A controller that dies after it has informed some ranks is followed by one that says the same (R16, R33)."""
    world = ControllerWorld(3, seed=crash_at or 0, put_every="10%")
    ranks = world.launch(3)
    for rank in ranks:
        world.call(rank, "ask_put_interval", step=7, step_s=0.1, stall_s=0.03 + 0.01 * rank.rank, commit_s=0.0)
        if crash_at == rank.rank:
            world.crash_controller()
        world.run(0.005)
    if crash_at == 3:
        world.run_until(lambda: any(rank.answers.get("ask_put_interval") for rank in ranks), 5.0)
        world.crash_controller()
    assert world.run_until(lambda: all(rank.answers.get("ask_put_interval") for rank in ranks), 30.0)
    assert [rank.answers["ask_put_interval"][-1] for rank in ranks] == [{"steps": 5}] * 3
    world.call(ranks[0], "ask_put_interval", step=7, step_s=9.0, stall_s=9.0, commit_s=9.0)
    assert world.run_until(lambda: len(ranks[0].answers["ask_put_interval"]) == 2, 10.0)
    assert ranks[0].answers["ask_put_interval"][-1] == {"steps": 5}, "who asks later learns what the others received"


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_rank_is_replaced_and_answers_as_the_others(rounds: int) -> None:
    """A new process of the rank, of another configuration and measure, learns what the others received (R20)."""
    world = ControllerWorld(3, put_every="10%")
    ranks, moments = world.launch(3, key="launch"), (7, 43)

    def ask(rank: FakeRank, at: int, cost: float) -> None:
        world.call(rank, "ask_put_interval", step=moments[at], step_s=0.1, stall_s=cost * (at + 1), commit_s=0.0)

    def all_received(count: int) -> bool:
        return world.run_until(lambda: all(len(r.answers.get("ask_put_interval", ())) >= count for r in ranks), 30.0)

    for at in range(rounds):
        for rank in ranks:
            ask(rank, at, 0.05)
        assert all_received(at + 1)
    for at in range(rounds, 1):
        for rank in ranks[:2]:
            ask(rank, at, 0.05)
    world.kill_rank(ranks[2])
    ranks[2] = world.join(2, 3, "launch", config={**world.config, "put_every": "50%"})
    assert world.run_until(lambda: bool(ranks[2].answers.get("join")), 30.0)
    assert (ranks[2].attempt, ranks[2].answers["join"][-1]["put_every"]) == (1, "10%")
    for at in range(max(1, rounds)):
        ask(ranks[2], at, 0.001)
    assert all_received(max(1, rounds))
    reported = [[answer["steps"] for answer in rank.answers["ask_put_interval"]] for rank in ranks]
    assert reported == [[5, 10][: max(1, rounds)]] * 3
    due = []
    for rank, answers in zip(ranks, reported, strict=True):
        schedule = Schedule(parse_put_every(rank.answers["join"][-1]["put_every"]), -1)
        for steps in answers:
            schedule.take(steps)
        due.append([step for step in range(100) if schedule.due(step)])
    assert due[2] == due[1] == due[0]


def test_real_ranks_put_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that measure differently: equal due steps, every step while measuring, and what is due commits."""
    monkeypatch.setenv("MEMSTORE_HOST", "h1")
    with ProcessCluster(tmp_path, {"h1": {"memstore": "replica"}, "h2": {"memstore": "replica"}}) as cluster:
        config = cluster.config.with_fields({"put_every": "10min", "connect_timeout_s": WAIT_S})

        def train(rank: int) -> list[int]:
            with connect("job", rank=rank, world_size=2, config=config) as store:
                return [step for step in range(60) if store.should_put(step) and is_put(store, step)]

        def is_put(store: Store, step: int) -> bool:
            ticket = store.put(step, {"weight": torch.ones(1000) * step}).wait("sealed", WAIT_S)
            if step < 12:
                ticket.wait("committed", WAIT_S)
            return True

        with ThreadPoolExecutor(2) as pool:
            one, other = (future.result(2 * WAIT_S) for future in [pool.submit(train, rank) for rank in (0, 1)])
    assert one == other
    assert one[:11] == list(range(11))
    assert all(b - a >= 1 for a, b in pairwise(one))
    assert len(one) < 20, f"ten minutes are more than a few steps: {one}"
