"""How often to put: near the optimum, within its budget, and the same steps on every rank (R33)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore.client.connect import connect
from memstore.client.steps import Steps
from memstore.client.store import Store
from memstore.client.ticket import LEVELS, Ticket
from memstore.core.cluster.state import mean_time_between_failures_s
from memstore.core.schedule import Measured, PutCosts, Schedule, decide_steps, lead_end, optimal_interval_s
from memstore.core.wire.orders import Level, StepLevel
from memstore.core.wire.replies import Joined
from memstore.errors import ConfigError
from memstore.intervals import STEPS_MAX, Every, parse_put_every
from memstore.shell.rank.holder_link import HolderLink
from memstore.testing.clusters.processes import ProcessCluster
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
    assert parse_put_every("epoch") == Every(is_epoch=True)
    for bad in (0, -1, True, 1.5, None, "0s", "100%", "steps", "1e9s"):
        with pytest.raises(ConfigError, match="auto"):
            parse_put_every(bad)


def test_the_costs_and_the_commits_bound_the_distance() -> None:
    """A budget is never exceeded; no mode puts faster than commits come (R12)."""
    slow = Measured(0.1, 0.010, 0.35)
    assert decide_steps(parse_put_every("2%"), slow, 1e6) == 5
    assert [decide_steps(parse_put_every("2%"), slow, 1e6, last) for last in (4, 5, 6, 7)] == [5, 5, 6, 5], "of noise"
    assert decide_steps(parse_put_every("30s"), slow, 1e6) == 300
    assert decide_steps(parse_put_every("100s"), Measured(1e-9, 0, 0), 1e6) == STEPS_MAX
    assert decide_steps(parse_put_every("50%"), slow, 1e6) == 4, "a commit takes 3.5 steps"
    assert decide_steps(parse_put_every("auto"), slow, 3600.0) == round(optimal_interval_s(0.01, 3600) / 0.1)
    assert decide_steps(parse_put_every(9), slow, 3600.0) == 9, "the user's own word stands"
    for every in ("30s", "2%", "auto"):  # what was not measured changes nothing
        assert decide_steps(parse_put_every(every), Measured(0.0, 0.0, 0.0), 3600.0, 700) == 700
    for every in ("2%", "auto"):
        assert decide_steps(parse_put_every(every), Measured(0.1, 0.0, 0.0), 3600.0, 700) == 700
    assert mean_time_between_failures_s(0.0, 0) == 86_400
    assert mean_time_between_failures_s(86_400.0, 7) == 21_600


def test_costs_are_those_of_the_slowest_rank_and_of_committed_puts() -> None:
    """Stalls are no time of training, and a put that came to nothing is not measured."""
    costs = PutCosts(35)
    for step in range(0, 160, 10):
        costs.put(step, step + 0.25, 0.5)
        costs.put(step, step + 0.0, 0.1)
        if step % 20 == 0:
            costs.committed(step, step + 2.0)
        assert (costs.measured() is None) == (step < 120), step
    assert costs.measured() == Measured(0.975, 0.5, 2.0)


class Rank:
    """One rank of the model: its schedule, what it was sent and has not received, and where it is."""

    def __init__(self, base: int | None) -> None:
        self.schedule = Schedule(Every(), base)
        self.at = 0  # of the steps that all train
        self.due: dict[int, bool] = {}
        self.unknown: list[int] = []  # its puts whose fate it does not know
        self.inbox: list[tuple[int, bool, int, int]] = []  # step, is committed, the distance in force

    def befores(self) -> list[tuple[int, int]]:
        puts = [step for step, is_due in self.due.items() if is_due]
        return [(step, before) for before, step in zip([puts[0] - 1, *puts] if puts else [], puts, strict=False)]

    def train(self, steps: Sequence[int]) -> None:
        """Train one step more, unless the answer is not there yet."""
        step = steps[self.at]
        if self.schedule.awaited(step, [each for each in self.befores() if each[0] in self.unknown]) is not None:
            return
        self.due[step] = self.schedule.due(step)
        assert self.schedule.due(step) == self.due[step], "asked again it says the same"
        if self.due[step]:
            self.unknown.append(step)
        self.at += 1

    def receive(self) -> None:
        """Take the oldest message; a commit supersedes older puts."""
        step, is_committed, first, steps = self.inbox.pop(0)
        if is_committed:
            self.schedule.learn(first, steps)
        self.unknown = [put for put in self.unknown if (put > step if is_committed else put != step)]


@given(st.integers(-1, 10_000), st.lists(st.integers(1, 300), max_size=12), st.integers(0, 1 << 32))
def test_ranks_at_their_own_pace_put_the_same_steps(base: int, decided: list[int], seed: int) -> None:
    """Each is steps ahead or behind, messages come late or only with a later one: no step is due on one rank alone."""
    rng = random.Random(seed)
    ranks, stride = [Rank(None if base < 0 else base) for _ in range(3)], rng.choice((1, 1, 1, 64))
    steps = [base + 1]
    while len(steps) < 120:
        steps.append(steps[-1] + (stride if rng.random() < 0.95 else stride * rng.randrange(1, 40)))
    interval, before, given_up = (0, 1), -1, set[int]()
    for _ in range(3_000):
        rank = rng.choice(ranks)
        if rank.at < len(steps) and rng.random() < 0.7:
            rank.train(steps)
        elif rank.inbox:
            if len(rank.inbox) > 1 and rng.random() < 0.2:
                rank.inbox.pop(0)  # its link broke: the next commit says as much
            rank.receive()
        if rng.random() < 0.6:
            continue
        put_by_all = [s for s in ranks[0].due if s > before and s not in given_up and all(r.due.get(s) for r in ranks)]
        if not put_by_all:
            continue
        step = put_by_all[0] if rng.random() < 0.8 else rng.choice(put_by_all)
        if rng.random() < 0.1:
            given_up.add(step)
        else:
            if step >= interval[0] and decided and rng.random() < 0.5:
                interval = (lead_end(step, before, interval[1]), decided.pop(0))
            before = step
        for each in ranks:
            each.inbox.append((step, step == before, *interval))
        if all(each.at == len(steps) for each in ranks):
            break
    for step in steps:
        assert len({rank.due[step] for rank in ranks if step in rank.due}) <= 1, f"step {step}"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_due_steps_keep_the_distance_that_holds(decided: list[int]) -> None:
    """Against a walk over all steps: due is the first step as far from the last due one as holds there."""
    schedule, holds, first = Schedule(Every(), -1), 1, 0
    last = -1
    for number, steps in enumerate(decided):
        first = 40 * number + 7
        schedule.learn(first, steps)
        schedule.learn(first - 1, 999)  # old news
        for step in range(first - 7, first + 33):
            holds = steps if step >= first else holds
            assert schedule.due(step) == (step >= last + holds), f"step {step}"
            last = step if step >= last + holds else last


@pytest.mark.parametrize("first", [0, 50_000, 10**8])
def test_training_may_begin_anywhere_and_count_samples(first: int) -> None:
    """Nothing is due by steps of the past, and a distance less than one jump is every step."""
    schedule = Schedule(Every(steps=4), None)
    assert [step - first for step in range(first, first + 12) if schedule.due(step)] == [3, 7, 11]
    samples = [*range(first, first + 3000 * 10, 3000)]
    assert all(map(Schedule(Every(), None).due, samples))
    open_schedule = Schedule(Every(), None)
    puts = [(step, step - 3000) for step in samples]
    waits = [open_schedule.awaited(samples[at], puts[:at]) for at in range(len(samples))]
    assert waits == [None] * 4 + [samples[0]] * 6, "four puts may lack their commits, however far apart"


def test_a_fixed_distance_counts_from_the_step_that_was_restored() -> None:
    """Nothing is waited for, no step is due twice; a loop that begins again learns it from put()."""
    schedule = Schedule(Every(steps=4), 10)
    assert [step for step in range(11, 25) if schedule.due(step)] == [14, 18, 22]
    assert schedule.awaited(10**6, [(step, step - 1) for step in range(14)]) is None
    assert schedule.due(22)
    assert not schedule.due(24)
    assert schedule.due(0), "put() refuses it, and says why"
    schedule.go_on_from(15)
    assert [step for step in range(16, 25) if schedule.due(step)] == [19, 23]


def test_an_epoch_is_put_at_its_end_and_nowhere_else() -> None:
    """By what the loop says; no commit is waited for, and the same step asked again gets the same answer."""
    schedule = Schedule(parse_put_every("epoch"), None)
    assert [step for step in range(12) if schedule.due(step, is_epoch_end=step % 4 == 3)] == [3, 7, 11]
    assert schedule.awaited(10**6, [(step, step - 1) for step in range(12)]) is None
    assert schedule.due(11, is_epoch_end=True)
    schedule.go_on_from(7)
    assert [step for step in range(8, 12) if schedule.due(step, is_epoch_end=step % 4 == 3)] == [11]


def test_should_put_without_a_word_of_the_epoch_is_refused_by_name() -> None:
    """With another put_every the word is taken and changes nothing: a loop may always say it."""
    steps = Steps(cast(HolderLink, SimpleNamespace(job="job", rank=0, attempt=1, notify=lambda message: None)))

    def begin(put_every: str | int) -> None:
        steps.begin_attempt(
            Joined(
                attempt=1,
                world_size=2,
                rank=0,
                restored_step=None,
                resume_step=0,
                put_every=put_every,
                shared_shard=None,
            )
        )

    begin("epoch")
    with pytest.raises(ConfigError, match=r"should_put\(5\) does not know where one ends.*is_epoch_end="):
        steps.due(5, 1.0)
    assert [step for step in range(6, 9) if steps.due(step, 1.0, step == 7)] == [7]
    begin(2)
    assert [step for step in range(6) if steps.due(step, 1.0, step == 2)] == [1, 3, 5]


def test_a_wait_in_vain_is_logged_once_until_a_commit_comes(caplog: pytest.LogCaptureFixture) -> None:
    """Puts that lack their commits hold one step up by the budget, and no step after it."""
    steps = Steps(cast(HolderLink, SimpleNamespace(job="job", rank=0, attempt=1, notify=lambda message: None)))
    steps.begin_attempt(
        Joined(attempt=1, world_size=2, rank=0, restored_step=None, resume_step=0, put_every="10min", shared_shard=None)
    )

    def train(numbers: range) -> list[int]:
        return [step for step in numbers if steps.due(step, 0.01) and steps.add(Ticket(step))]

    def raise_level(step: int, level: Level) -> None:
        steps.on_level(StepLevel(job="train", attempt=1, step=step, level=level, put_from=12, put_steps=3))

    assert train(range(8)) == [*range(8)]
    assert caplog.text.count("should_put(4) waited") == 1 == caplog.text.count("waited")
    for step in range(8):
        raise_level(step, "skipped")
    assert train(range(8, 12)) == [*range(8, 12)]
    raise_level(8, "committed")
    raise_level(11, "committed")
    assert train(range(12, 20)) == [14, 17]
    assert caplog.text.count("waited") == 1


# -- the controller -----------------------------------------------------------------------------------


class Training:
    """The ranks of one attempt in a world of virtual time, each at its own pace."""

    def __init__(self, world: ControllerWorld, paces_s: Sequence[float], stall_s: float) -> None:
        self.world, self.ranks = world, world.launch(len(paces_s))
        every = parse_put_every(self.ranks[0].answers["join"][-1]["put_every"])
        self.schedules = [Schedule(every, None) for _ in self.ranks]
        self.due: list[list[int]] = [[] for _ in self.ranks]
        restored = world.get(self.ranks)[0]["step"]
        self.first = 0 if restored is None else restored + 1
        for schedule in self.schedules:
            schedule.go_on_from(self.first - 1)
        self.at = [self.first] * len(self.ranks)
        self.end = self.first
        world.reserve(self.ranks)
        for rank, pace_s in enumerate(paces_s):
            self.ranks[rank].stall_s = stall_s
            self.step(rank, pace_s)

    def step(self, at: int, pace_s: float) -> None:
        """Let one rank train a step, and block for its put, again and again."""
        puts, step = len(self.due[at]), self.at[at]
        self.step_once(at)
        stall_s = self.ranks[at].stall_s if len(self.due[at]) > puts else 0.0
        self.world.at(pace_s + stall_s if self.at[at] > step else 0.01, lambda: self.step(at, pace_s))

    def step_once(self, at: int) -> None:
        """Train a step, with the others: none is more than one ahead."""
        rank, step, schedule = self.ranks[at], self.at[at], self.schedules[at]
        if step == self.end or step > min(self.at) or rank.is_blocked:
            return
        schedule.learn(*rank.put_interval)
        tickets = sorted(rank.tickets.items())
        befores = [-1, *(put for put, _ in tickets)]
        unknown = [(put, b) for b, (put, level) in zip(befores, tickets, strict=False) if level in LEVELS[:3]]
        if schedule.awaited(step, unknown) is not None:
            return
        if schedule.due(step):
            self.due[at].append(step)
            self.world.put(rank, step)
        self.at[at] += 1

    def until(self, end: int) -> None:
        self.end = end
        assert self.world.run_until(lambda: min(self.at) == end, 600.0), self.at

    def intervals(self) -> set[tuple[int, int]]:
        return {rank.put_interval for rank in self.ranks}


def test_a_commit_brings_all_ranks_the_distance() -> None:
    """A new one comes only for a change that is more than noise."""
    training = Training(ControllerWorld(3, put_every="10%"), [1.0, 1.0, 1.0], stall_s=0.45)
    training.until(60)
    training.world.run(1.0)
    assert training.intervals() == {(8, 5)}
    assert training.due[0] == training.due[1] == training.due[2] == [*range(8), *range(12, 60, 5)]
    assert sum("steps are put (10%)" in note for note in training.world.notes) == 1


@pytest.mark.parametrize("ended", ["none", "died", "closed"])
def test_auto_puts_more_often_where_attempts_die(ended: str) -> None:
    """Daly's optimum by the failures that were seen; an attempt that all its ranks closed is none (R33)."""
    world, ends = ControllerWorld(2, put_every="auto"), 0 if ended == "none" else 24
    for _ in range(ends):
        for rank in world.launch(2):
            world.call(rank, "close" if ended == "closed" else "steps")
        world.run(1.0)
    training = Training(world, [1.0, 1.0], stall_s=0.5)
    training.until(30)
    mtbf_s = 86_400.0 / (1 + (ends if ended == "died" else 0))
    ((_, steps),) = training.intervals()
    assert steps == pytest.approx(optimal_interval_s(0.5, mtbf_s), rel=0.05)


@pytest.mark.parametrize("seed", range(24))
def test_all_ranks_put_the_same_steps_whatever_dies(seed: int) -> None:
    """Controllers die before, while and after a distance is sent; what is due on one rank is due on all (R16, R33)."""
    rng = random.Random(seed)
    world = ControllerWorld(3, seed=seed, put_every="10%")
    training = Training(world, [0.05 * rng.uniform(0.5, 2.0) for _ in range(3)], stall_s=0.04)
    for _ in range(3):
        training.until(training.end + rng.randrange(5, 25))
        world.crash_controller()
        for rank in training.ranks:
            rank.stall_s *= rng.choice((0.3, 1.0, 3.0))
    training.until(training.end + 60)
    assert training.due[0] == training.due[1] == training.due[2]
    assert len(training.due[0]) < training.end
    assert not any("given up" in note for note in world.notes)


@pytest.mark.parametrize("killed_at", [3, 12, 40])
def test_a_rank_dies_and_the_next_attempt_agrees(killed_at: int) -> None:
    """The ranks that go on to a new attempt measure again, all from the step that was restored."""
    world = ControllerWorld(3, put_every="10%")
    training = Training(world, [0.1, 0.1, 0.1], stall_s=0.04)
    training.until(killed_at)
    world.kill_rank(training.ranks[1])
    world.run(5.0)
    again = Training(world, [0.1, 0.2, 0.1], stall_s=0.04)
    assert {rank.attempt for rank in again.ranks} == {2}
    again.until(again.first + 60)
    assert again.due[0] == again.due[1] == again.due[2]
    assert again.due[0][:8] == [*range(again.first, again.first + 8)]
    assert len(again.due[0]) < 60


def test_a_rank_is_replaced_and_goes_by_the_attempts_word() -> None:
    """A new process of the rank, of another configuration, is answered what the others were (R20)."""
    world = ControllerWorld(3, put_every="10%")
    ranks = world.launch(3, key="launch")
    world.kill_rank(ranks[2])
    ranks[2] = world.join(2, 3, "launch", config={**world.config, "put_every": "50%"})
    assert world.run_until(lambda: bool(ranks[2].answers.get("join")), 30.0)
    assert (ranks[2].attempt, ranks[2].answers["join"][-1]["put_every"]) == (1, "10%")


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
    assert one[:8] == list(range(8))
    assert all(b - a >= 1 for a, b in pairwise(one))
    assert len(one) < 20, f"ten minutes are more than a few steps: {one}"
