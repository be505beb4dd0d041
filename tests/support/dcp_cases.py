"""Cases that torch has for its own storage, asked of ours: one function each, run on all ranks; a false one raises."""

from __future__ import annotations

import sys
from typing import Any

import dcp_cases_tensors
import dcp_cases_training
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_case import Case, Small, State, equal, raises
from torch.distributed.checkpoint.api import CheckpointException

from memstore.client.dcp.reader import DcpReader
from memstore.client.dcp.writer import DcpWriter
from memstore.errors import StepConflict
from memstore.testing.ranks.dcp_ranks import DcpRank


def claim_room(rank: DcpRank) -> dict[str, Any]:
    """Put a state that is larger than every case's."""
    return {"step": rank.store.put(1, {"w": torch.zeros(1 << 17)}).wait("committed", 120).step}


def run_case(rank: DcpRank, case: str, step: int) -> dict[str, Any]:
    """Run one case; its steps follow `step`. Return the last one."""
    way = Case(rank, step)
    modules = (dcp_cases_tensors, dcp_cases_training, sys.modules[__name__])
    next(getattr(module, case) for module in modules if hasattr(module, case))(way)
    dist.barrier()
    return {"step": way.step}


# -- plain states ------------------------------------------------------------------------------------------


def plain_module_state(case: Case) -> None:
    saved, loaded = Small(1).state_dict(), Small(2).state_dict()
    case.save(saved, no_dist=True)
    assert not equal(saved, loaded)
    assert equal(saved, case.load(loaded, no_dist=True))


def bytes_are_replaced(case: Case) -> None:
    case.save({"bytes0": [1], "bytes1": "string"})
    assert case.load({"bytes0": [2], "bytes1": "other"}) == {"bytes0": [1], "bytes1": "string"}


def blob_of_a_stateful_object(case: Case) -> None:
    class Blob:
        def __init__(self, value: bytes) -> None:
            self.state: State = {"blob": value}

        def state_dict(self) -> State:
            return self.state

        def load_state_dict(self, state: State) -> None:
            self.state = state

    case.save({"model": Small(1).state_dict(), "blob": Blob(b"some blob")})
    loaded = case.load({"model": Small(2).state_dict(), "blob": Blob(b"")})
    assert loaded["blob"].state == {"blob": b"some blob"}
    assert equal(loaded["model"], Small(1).state_dict())


def narrower_and_wider_dtypes(case: Case) -> None:
    values = torch.rand(40, 30)
    case.save({"w": values}, no_dist=True)
    assert torch.equal(case.load({"w": torch.zeros(40, 30).bfloat16()}, no_dist=True)["w"], values.bfloat16())
    case.save({"w": values.bfloat16()}, no_dist=True)
    assert torch.equal(case.load({"w": torch.zeros(40, 30)}, no_dist=True)["w"], values.bfloat16().float())


def empty_state(case: Case) -> None:
    case.save({})
    assert case.load({}) == {}
    case.save({}, no_dist=True)
    assert case.load({}, no_dist=True) == {}


def stateful_in_place_and_others_replaced(case: Case) -> None:
    class Noted(dict[str, Any]):
        is_set = False

        def __setitem__(self, key: str, value: Any) -> None:
            self.is_set = True
            super().__setitem__(key, value)

    class Holder:
        is_loaded = False

        def state_dict(self) -> State:
            return {}

        def load_state_dict(self, state: State) -> None:
            self.is_loaded = True

    held, state = Holder(), Noted(held=None)
    dict.__setitem__(state, "held", held)
    case.save(state)
    case.load(state)
    assert (held.is_loaded, state.is_set) == (True, False)
    state = Noted(plain={"tensor": torch.rand(10, 10), "bytes": [1, 2]})
    case.save(state)
    case.load(state)
    assert state.is_set


def keys_in_another_order_on_each_rank(case: Case) -> None:
    class Talking:
        def state_dict(self) -> State:
            return {}

        def load_state_dict(self, state: State) -> None:
            dist.all_reduce(torch.ones(2))

    class Gathering(Talking):
        def load_state_dict(self, state: State) -> None:
            dist.all_gather([torch.ones(2) for _ in range(dist.get_world_size())], torch.ones(2))

    both = {"a": Gathering(), "b": Talking()}
    state = both if dist.get_rank() == 0 else dict(reversed(both.items()))
    case.save(state)
    case.load(state)


def a_step_is_saved_once(case: Case) -> None:
    case.save({"random": torch.zeros(10)})
    again = DcpWriter(case.store.puts, case.step)
    raises(CheckpointException, StepConflict.__name__, lambda: dcp.save({"r": torch.ones(10)}, storage_writer=again))
    assert torch.equal(case.load({"random": torch.ones(10)})["random"], torch.zeros(10))


def storage_meta_names_the_step(case: Case) -> None:
    case.save({"a": torch.zeros(4, 4)})
    meta = case.reader().read_metadata().storage_meta
    assert meta is not None
    assert meta.checkpoint_id == f"memstore:{case.store.job}/{case.step}"


def names_are_not_claimed(case: Case) -> None:
    assert not DcpWriter.validate_checkpoint_id("/tmp/x")
    assert not DcpReader.validate_checkpoint_id("/tmp/x")


# -- errors of every phase on every rank -----------------------------------------------------------------------


def failing(kind: type[Any], phase: str, bad_rank: int) -> type[Any]:
    """A writer or reader that fails in one phase on one rank."""

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == bad_rank:
            raise ValueError(f"rank {bad_rank} fails in {phase}")
        return getattr(kind, phase)(self, *args, **kwargs)

    return type("Failing", (kind,), {phase: fail})


def saves_that_fail_in_any_phase(case: Case) -> None:
    phases = [
        ("set_up_storage_writer", 0),
        ("prepare_local_plan", 1),
        ("prepare_global_plan", 0),
        ("_write", 2),
        ("_submit", 0),
    ]
    for phase, bad_rank in phases:  # the last two are in the midst of write_data and finish
        writer = case.writer(failing(DcpWriter, phase, bad_rank))
        state = {"w": torch.full((20, 20), float(case.step)), "bytes": [1, 2]}
        words = f"rank {bad_rank} fails in {phase}"
        raises(CheckpointException, words, lambda s=state, w=writer: dcp.save(s, storage_writer=w))  # type: ignore[misc]
        case.step += 1  # a rank that is late with the news skips the next step (R12)
        dist.barrier()
    for phase in ("set_up_storage_writer", "_write", "_submit"):  # every rank alone, without a group
        writer = case.writer(failing(DcpWriter, phase, dist.get_rank()))
        work = lambda w=writer: dcp.save({"w": torch.ones(3)}, storage_writer=w, no_dist=True)  # type: ignore[misc]  # noqa: E731
        raises(CheckpointException, f"fails in {phase}", work)
        case.step += 1
        dist.barrier()
    state = {"w": torch.rand(20, 20), "bytes": [3]}
    case.save(state)
    assert equal(case.load({"w": torch.zeros(20, 20), "bytes": []})["bytes"], [3])


def loads_that_fail_in_any_phase(case: Case) -> None:
    state = {"w": torch.arange(400.0).view(20, 20), "bytes": [1, 2]}
    case.save(state)
    phases = [
        ("set_up_storage_reader", 0),
        ("prepare_local_plan", 1),
        ("prepare_global_plan", 0),
        ("read_metadata", 3),
        ("read_data", 2),
    ]
    for phase, bad_rank in phases:
        reader = failing(DcpReader, phase, bad_rank)(case.reader()._ranges, case.step)
        target = {"w": torch.zeros(20, 20), "bytes": [0]}
        words = f"rank {bad_rank} fails in {phase}"
        raises(CheckpointException, words, lambda t=target, r=reader: dcp.load(t, storage_reader=r))  # type: ignore[misc]
    alone = failing(DcpReader, "read_data", dist.get_rank())(case.reader()._ranges, case.step)
    target = {"w": torch.zeros(20, 20)}
    raises(CheckpointException, "fails in read_data", lambda: dcp.load(target, storage_reader=alone, no_dist=True))
    assert equal(case.load({"w": torch.zeros(20, 20), "bytes": [0]}), state)
