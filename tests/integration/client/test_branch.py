"""A job that begins with a step of another one: get(from_job=) and the first put, over real holders (R32)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from link_site import Site, Stop, together

from memstore.cli import main
from memstore.client.checkpoint import Checkpoint
from memstore.client.store import Store
from memstore.core.arena.slot_table import SlotState
from memstore.core.wire.calls import AskSteps
from memstore.errors import ConfigError, LoadError, ManifestMismatch, RecoveryError, StepDropped, WorldSizeError
from memstore.testing.clusters.processes import wait_for

pytestmark = pytest.mark.timeout(240)
NUMBERS = 60_000


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(tmp_path, ["a", "b"], monkeypatch)
    yield site
    site.close()


def state(rank: int, step: int) -> dict[str, Any]:
    """Every chunk of a step, and of a rank, is another one."""
    return {"w": torch.arange(NUMBERS, dtype=torch.float32) + 1_000_000 * rank + 100 * step, "step": step}


def put(stores: list[Store], *steps: int) -> None:
    for step in steps:
        put_states(stores, step, [state(store.rank, step) for store in stores])


def put_states(stores: list[Store], step: int, states: list[dict[str, Any]]) -> None:
    tickets = together(*[lambda s=store: s.put(step, states[s.rank]) for store in stores])
    together(*[lambda t=ticket: t.wait("committed", 60.0) for ticket in tickets])


def get(stores: list[Store], *args: Any, **options: Any) -> list[Checkpoint]:
    return together(*[lambda s=store: s.get(*args, **options) for store in stores])


def refused(stores: list[Store], kind: type[Exception], *args: Any, **options: Any) -> str:
    """Every rank is refused alike; return why."""

    def ask(store: Store) -> str:
        with pytest.raises(kind) as error:
            store.get(*args, **options)
        return str(error.value)

    said = set(together(*[lambda s=store: ask(s) for store in stores]))
    assert len(said) == 1, said
    return said.pop()


def cli(site: Site, *words: str) -> str:
    result = CliRunner().invoke(main, [*words, "--store", site.config.store])
    assert result.exit_code == 0, result.output
    return result.output


def listing(store: Store, job: str) -> Any:
    return store._link.call(AskSteps(job=job), 10.0)


def origin(store: Store, job: str) -> tuple[str, int, int] | None:
    found = listing(store, job).origin
    return None if found is None else (found.job, found.attempt, found.step)


def used_slots(site: Site) -> list[int]:
    return [
        sum(slot.state is SlotState.SEALED for slot in holder.replicas.table.slots) for holder in site.holders.values()
    ]


@pytest.mark.parametrize("step", [2, None])
def test_a_job_begins_with_a_step_of_another_and_shares_its_chunks(site: Site, step: int | None) -> None:
    """All ranks get it into their own state; the other job trains on; equal chunks are stored once (R32)."""
    base = site.connect(job="base")
    put(base, 1, 2)
    twig = site.connect(job="twig")
    assert get(twig) == [None, None]
    mine = [{"w": torch.zeros(NUMBERS), "step": 0} for _ in twig]
    got = together(*[lambda s=s: s.get(step, from_job="base", into=mine[s.rank]) for s in twig])
    for rank, each in enumerate(got):
        assert (each.step, each.attempt, each.steps_lost) == (2, 1, 0)
        assert torch.equal(mine[rank]["w"], state(rank, 2)["w"])
    used = used_slots(site)
    put_states(twig, 0, mine)  # a number of its own: nothing was adopted
    assert used_slots(site) == used
    put(base, 3, 4)
    assert [each.step for each in get(site.connect(job="base"))] == [4, 4]
    again = site.connect(job="twig")
    assert [each.step for each in get(again)] == [0, 0], "its own history from now on"
    assert (origin(again[0], "twig"), origin(again[0], "base")) == (("base", 1, 2), None)
    site.restart_controller()
    assert origin(again[0], "twig") == ("base", 1, 2)
    shown = cli(site, "ls", "twig")
    assert "· began with base@2" in shown
    assert "attempt 1 from base@2" in shown
    assert "attempt 2 from step 0 of attempt 1" in shown


def test_what_cannot_be_read_of_another_job_is_refused_by_name_on_all_ranks(site: Site) -> None:
    """The errors of a get of its own; a step that retention dropped is said to be dropped, and a pin keeps one."""
    base = site.connect(job="base")
    put(base, 1)
    base[0].pin(1, "best")
    put(base, 2, 3, 4, 5)
    twig = site.connect(job="twig")
    assert "the store holds no job 'bass': it has base, twig" in refused(twig, RecoveryError, from_job="bass")
    said = refused(twig, RecoveryError, 99, from_job="base")
    assert "job 'base' has no step 99: its steps are " in said
    wait_for(lambda: 2 not in [row.step for row in listing(twig[0], "base").steps], "step 2 to be dropped")
    assert "has no step 2 any more: step 5 is committed" in refused(twig, StepDropped, 2, from_job="base")
    with pytest.raises(ConfigError, match="from_job='twig' is this job"):
        twig[0].get(from_job="twig")
    with pytest.raises(ConfigError, match="job"):
        twig[0].get(from_job="no name")
    one = site.connect(job="single", ranks=1)
    said = refused(one, WorldSizeError, 5, from_job="base")
    assert "job 'base': step 5 was put by 2 ranks, this attempt has 1. Start 2 ranks, or" in said
    assert torch.equal(one[0].get(5, rank=1, from_job="base").state["w"], state(1, 5)["w"]), "the remedy works"
    wrong = [{"w": torch.zeros(3), "step": 0} for _ in twig]
    errors = together(*[lambda s=s: _error(s, wrong[s.rank]) for s in twig])
    assert all(isinstance(error, ManifestMismatch) for error in errors), errors
    assert [each.step for each in get(twig, 1, from_job="base")] == [1, 1], "it is pinned"
    assert origin(twig[0], "twig") == ("base", 1, 1)


def _error(store: Store, into: Any) -> Exception | None:
    try:
        store.get(from_job="base", into=into)
    except Exception as error:
        return error
    return None


def test_a_job_in_mid_life_reads_another_ones_step_and_adopts_nothing(site: Site) -> None:
    """As get(step=): its lineage, and where it began, stay (R22)."""
    base, twig = site.connect(job="base"), site.connect(job="twig")
    put(base, 7)
    put(twig, 1)
    assert [each.step for each in get(twig, from_job="base")] == [7, 7]
    put(twig, 2)
    again = site.connect(job="twig")
    assert [each.step for each in get(again)] == [2, 2]
    assert [each.step for each in get(again, from_job="base")] == [7, 7]
    put(again, 3)
    assert origin(again[0], "twig") is None


def test_a_get_of_another_job_that_one_rank_cannot_load_begins_nothing(site: Site) -> None:
    """No rank goes on, and `ls` shows no beginning (R23)."""
    put(site.connect(job="base"), 1)
    twig = site.connect(job="twig")

    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"w": torch.zeros(NUMBERS), "step": 0}

        def load_state_dict(self, _: Any) -> None:
            raise ValueError("no")

    into = [Picky(), {"w": torch.zeros(NUMBERS), "step": 0}]
    errors = together(*[lambda s=s: _error(s, into[s.rank]) for s in twig])
    assert [type(error) for error in errors] == [LoadError, RecoveryError]
    assert origin(twig[0], "twig") is None


def test_a_step_stays_while_another_job_reads_it_and_rm_ends_the_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer steps of the other job do not take what is being brought (R7, R19)."""
    base = site.connect(job="base")
    put(base, 1)
    twig = site.connect(job="twig")
    checks = [Stop(store._whole_get.check) for store in twig]
    for store, check in zip(twig, checks, strict=True):
        monkeypatch.setattr(store._whole_get, "check", check)
    with ThreadPoolExecutor(2) as pool:
        gets = [pool.submit(store.get, 1, from_job="base") for store in twig]
        assert all(check.at.wait(60.0) for check in checks)
        put(base, 2, 3, 4, 5, 6)
        for check in checks:
            check.go.set()
        assert [torch.equal(each.result(60.0).state["w"], state(r, 1)["w"]) for r, each in enumerate(gets)] == [
            True
        ] * 2
    wait_for(lambda: 1 not in [row.step for row in listing(twig[0], "base").steps], "step 1 to be dropped")
    checks = [Stop(check.real) for check in checks]
    for store, check in zip(twig, checks, strict=True):
        monkeypatch.setattr(store._whole_get, "check", check)
    with ThreadPoolExecutor(2) as pool:
        gets = [pool.submit(store.get, from_job="base") for store in twig]
        assert all(check.at.wait(60.0) for check in checks)
        assert cli(site, "rm", "base", "--yes", "--force")
        for check in checks:
            check.go.set()
        for each in gets:
            with pytest.raises(RecoveryError, match="job 'base' was removed while job 'twig' read a step of it"):
                each.result(60.0)
