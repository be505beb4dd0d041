"""A get that fails once it has begun to load: nothing is adopted, no rank goes on, and no put evicts the step (R23)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from link_site import WAIT_S, Site, state, together
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from memstore.client.store import Store
from memstore.errors import CommitError, LoadError, RecoveryError, StepConflict


class Picky:
    """An object whose load_state_dict refuses, as torch's optimizers do with another number of groups."""

    def __init__(self, groups: int) -> None:
        self.groups, self.error = groups, True
        self.says = "loaded state dict has a different number of parameter groups"

    def state_dict(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        if self.error:
            raise ValueError(self.says)
        self.groups = loaded["groups"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Two hosts with a rank each, whose job has steps 5 to 7."""
    site = Site(tmp_path, ["a", "b"], monkeypatch)
    stores = site.connect()
    for step in (5, 6, 7):
        for ticket in together(*[lambda s=store, n=step: s.put(n, full(n)) for store in stores]):
            ticket.wait("committed", WAIT_S)
    yield site
    site.close()


def full(value: float) -> dict[str, Any]:
    return {**state(float(value)), "opt": Picky(1)}


def get_all(stores: list[Store], states: list[dict[str, Any]]) -> list[Any]:
    """Return what each rank's get() returned or raised."""

    def one(store: Store, into: dict[str, Any]) -> Any:
        try:
            return store.get(into=into, timeout_s=WAIT_S)
        except Exception as error:
            return error

    return together(*[lambda s=s, i=i: one(s, i) for s, i in zip(stores, states, strict=True)])


def test_what_load_state_dict_raises_fails_the_get_on_all_ranks_and_no_put_is_taken(site: Site) -> None:
    """try: get / except: start from scratch keeps the newest step: the next launch restores it."""
    stores = site.connect()
    states = [full(0.0), full(0.0)]
    states[1]["opt"].error = False
    mine, others = get_all(stores, states)
    assert isinstance(mine, LoadError)
    said = str(mine)
    assert "Picky.load_state_dict() raised ValueError: loaded state dict has a different number" in said
    assert "(of state['opt']; written by then: all tensors" in said
    assert said.endswith("the state given as into= is unusable: repair that object and call get() again")
    assert isinstance(others, RecoveryError)
    assert "get() failed on rank 0 while its state was loaded" in str(others)
    for store in stores:
        with pytest.raises(CommitError, match="a load failed here, and nothing is put"):
            store.put(0, full(0.0))
        with pytest.raises(CommitError, match="a load failed here"):
            store.prepare(full(0.0))
    again = site.connect()
    states = [full(0.0), full(0.0)]
    for each in states:
        each["opt"].error = False
    found = get_all(again, states)
    assert [got.step for got in found] == [7, 7]
    assert all(torch.equal(each["w"], state(7.0)["w"]) for each in states)
    assert [ticket.wait("committed", WAIT_S).step for ticket in put_all(again, 8)] == [8, 8]


def put_all(stores: list[Store], step: int) -> list[Any]:
    return together(*[lambda s=store: s.put(step, full(step)) for store in stores])


def test_a_repaired_object_gets_the_step_in_the_same_attempt(site: Site) -> None:
    """The remedy of the error works: repair the object, call get() again on every rank, go on."""
    stores = site.connect()
    states = [full(0.0), full(0.0)]
    assert all(isinstance(each, RecoveryError) for each in get_all(stores, states))
    for each in states:
        each["opt"].error = False
    assert [got.step for got in get_all(stores, states)] == [7, 7]
    assert [ticket.wait("committed", WAIT_S).step for ticket in put_all(stores, 8)] == [8, 8]


def test_a_read_of_an_older_step_that_fails_half_way_stops_puts_too(site: Site) -> None:
    """get(step=S, into=) adopts nothing, and still the state is no longer what was trained."""
    stores = site.connect()
    states = [full(0.0), full(0.0)]
    for each in states:
        each["opt"].error = False
    get_all(stores, states)
    states[0]["opt"].error = True

    def read(store: Store, into: dict[str, Any]) -> Any:
        with pytest.raises(RecoveryError) as caught:
            store.get(7, into=into, timeout_s=WAIT_S)
        return caught.value

    together(*[lambda s=s, i=i: read(s, i) for s, i in zip(stores, states, strict=True)])
    for store in stores:
        with pytest.raises(CommitError, match="a load failed here"):
            store.put(8, full(8))
    states[0]["opt"].error = False
    assert [got.step for got in get_all(stores, states)] == [7, 7]
    assert [ticket.wait("committed", WAIT_S).step for ticket in put_all(stores, 8)] == [8, 8]


class StopsHalfWay(DefaultLoadPlanner):
    """A planner that fails once the first tensor is filled."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        raise ValueError("no more of it")


def test_a_dcp_load_that_fails_half_way_stops_puts_too(site: Site) -> None:
    """agree_on_step() has adopted the step by then; a load that fills the state lets the rank put again."""
    stores = site.connect("saving")
    states = [full(0.0), full(0.0)]
    for each in states:
        each["opt"].error = False
    get_all(stores, states)
    together(*[lambda s=store: dcp.save(state(8.0), storage_writer=s.dcp_writer(8), no_dist=True) for store in stores])

    stores, filled = site.connect("loading"), [state(0.0), state(0.0)]

    def load(store: Store, planner: DefaultLoadPlanner | None = None) -> Any:
        try:
            dcp.load(filled[store.rank], storage_reader=store.dcp_reader(), planner=planner, no_dist=True)
        except CheckpointException as error:
            return error
        return None

    ends = together(lambda: load(stores[0], StopsHalfWay()), lambda: load(stores[1]))
    assert "no more of it" in str(ends[0])
    assert ends[1] is None
    with pytest.raises(CommitError, match=r"a load failed here.*a DCP load of step 8 failed: .*no more of it"):
        stores[0].put(9, state(9.0))
    assert together(lambda: load(stores[0]), lambda: load(stores[1])) == [None, None]
    assert all(torch.equal(each["w"], state(8.0)["w"]) for each in filled)
    assert [ticket.wait("committed", WAIT_S).step for ticket in put_all(stores, 9)] == [9, 9]


def test_step_numbers_that_begin_again_are_refused_and_only_the_newest_is_put_twice(site: Site) -> None:
    """A second epoch that counts from 0 gets an error that names the cause; a retry of the newest step its ticket."""
    stores = site.connect()
    states = [full(0.0), full(0.0)]
    for each in states:
        each["opt"].error = False
    get_all(stores, states)
    for step in (8, 9):
        tickets = put_all(stores, step)
    for ticket in tickets:
        ticket.wait("committed", WAIT_S)
    assert [s.put(9, full(9)) is t for s, t in zip(stores, tickets, strict=True)] == [True, True]
    with pytest.raises(StepConflict, match="step 9 was put already, with another state"):
        stores[0].put(9, full(1))
    for older in (8, 7, 0):
        with pytest.raises(StepConflict, match=r"does not follow step 9\. .* step \+ epoch \* steps_per_epoch"):
            stores[0].put(older, full(older))
    assert [ticket.wait("committed", WAIT_S).step for ticket in put_all(stores, 10)] == [10, 10]


def test_an_error_whose_text_no_message_can_hold_reaches_the_rank_and_the_others(site: Site) -> None:
    """A file name that is no UTF-8, in what load_state_dict raises: its rank gets that error, the others their own."""
    stores = site.connect()
    states = [full(0.0), full(0.0)]
    states[0]["opt"].says, states[1]["opt"].error = "cannot read a\udc80", False
    mine, others = get_all(stores, states)
    assert isinstance(mine, LoadError)
    assert "cannot read a\udc80" in str(mine)
    assert "get() failed on rank 0 while its state was loaded" in str(others)
    assert "cannot read a\\udc80" in str(others)
    stores[0].close(error=OSError("cannot read a\udc80"))
    job = site.controller.machine.state.jobs["job"]  # in this process: the store's own view
    assert job.newest is not None
    assert job.newest.ended_by == "OSError on rank 0: cannot read a\\udc80"
