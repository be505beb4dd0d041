"""Late moves: each byte once, one end whichever thread works, and what shows that a source has changed (R11)."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interruption import interrupt

from memstore.core.format.layout import decode_layout
from memstore.core.format.tensor_paths import name_at
from memstore.shell.codec.encode import plan_state
from memstore.shell.device import deferred_copy
from memstore.shell.device.deferred_copy import SAMPLE_EVERY_BYTES, DeferredCopy, WatchedSource, digest_of, in_pieces
from memstore.shell.device.optimizer_memory import OptimizerMemory, optimizer_tensors
from memstore.shell.native.copy_loops import Move
from memstore.shell.tensors.memory import TensorSource
from memstore.shell.tensors.own_memory import copy_own, is_permitted

WAIT_S = 60.0
KIB = 1 << 10


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 40)), max_size=30), st.integers(1, 50))
def test_pieces_copy_the_same_bytes_in_no_longer_moves(gaps: list[tuple[int, int, int]], limit: int) -> None:
    """Joined and cut, the moves take every byte from where it was taken before."""
    moves, target, source = [], 0, 1000
    for gap, other_gap, nbytes in gaps:
        moves.append((target + gap, source + other_gap, nbytes))
        target, source = target + gap + nbytes, source + other_gap + nbytes

    def byte_by_byte(some: list[Move]) -> list[tuple[int, int]]:
        return [(to + i, at + i) for to, at, nbytes in some for i in range(nbytes)]

    pieces = list(in_pieces(moves, limit))
    assert byte_by_byte(pieces) == byte_by_byte(moves)
    assert all(nbytes <= limit for _, _, nbytes in pieces)
    full = sum(nbytes == limit for _, _, nbytes in pieces)
    assert len(pieces) - full <= len(moves)


def watch(tensor: torch.Tensor, *, is_whole: bool = True) -> WatchedSource:
    return WatchedSource((tensor,), tensor.untyped_storage(), is_whole)


def late(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], ends: list[str], wanted: list[bool], *, is_whole: bool = True
) -> DeferredCopy:
    """A copy of some tensors in moves of 4 KiB; `ends` gets why it ended."""
    rows = []
    for source, target in pairs:
        at = range(0, source.nbytes, 4 * KIB)
        # Every other one first, so that no two can be joined.
        order = [*at[::2], *at[1::2]]
        rows.append(
            (watch(source, is_whole=is_whole), [(target.data_ptr() + i, source.data_ptr() + i, 4 * KIB) for i in order])
        )
    return DeferredCopy(
        rows, keep=pairs, is_wanted=lambda: all(wanted), on_end=ends.append, name_of=lambda number: f"tensor {number}"
    )


def test_any_number_of_threads_makes_each_move_and_ends_the_copy_once() -> None:
    """The thread that makes the last move ends it; a later one finds nothing to do."""
    pairs = [(torch.rand(64 * KIB), torch.zeros(64 * KIB)) for _ in range(4)]
    ends: list[str] = []
    copy = late(pairs, ends, [True])
    assert copy.nbytes_left == 4 * 256 * KIB
    with ThreadPoolExecutor(4) as pool:
        for worker in [pool.submit(copy.work) for _ in range(4)]:
            worker.result(WAIT_S)
    copy.work()
    copy.stop("too late")
    assert copy.ended.is_set()
    assert ends == [""]
    assert all(torch.equal(source, target) for source, target in pairs)


def test_a_stopped_copy_ends_when_the_move_under_way_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that the slots are not free: a process still writes into one."""
    entered, go = threading.Event(), threading.Event()

    def slow(target: int, source: int, nbytes: int) -> bool:
        entered.set()
        assert go.wait(WAIT_S)
        return copy_own(target, source, nbytes)

    monkeypatch.setattr(deferred_copy, "copy_own", slow)
    ends: list[str] = []
    copy = late([(torch.rand(64 * KIB), torch.zeros(64 * KIB))], ends, [True])
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(copy.work)
        assert entered.wait(WAIT_S)
        copy.stop("not in time")
        assert (ends, copy.ended.is_set()) == ([], False)
        go.set()
        worker.result(WAIT_S)
    assert ends == ["not in time"]


def test_a_copy_that_no_process_wants_any_more_makes_no_move() -> None:
    """Another rank gave the step up."""
    source, target, ends = torch.rand(64 * KIB), torch.zeros(64 * KIB), []
    late([(source, target)], ends, [False]).work()
    assert ends == ["it was given up while it was copied"]
    assert not target.any()


def test_a_deadline_leaves_the_rest_to_others() -> None:
    """At least one move is made, and the copy is not over."""
    ends: list[str] = []
    copy = late([(torch.rand(64 * KIB), torch.zeros(64 * KIB))], ends, [True])
    copy.work(deadline_s=0.0)
    assert copy.nbytes_left == 252 * KIB
    assert ends == []


def write_unseen(tensor: torch.Tensor, how: str) -> None:
    """Write to a tensor of 1024 x 1024 past autograd's version counter, and past every sample but for "all"."""
    version = tensor._version
    if how == "all":
        tensor.grad = torch.ones_like(tensor)
        torch.optim.AdamW([tensor], fused=True).step()
    elif how == "rows of .data":
        tensor.data[400:490] += 1
    elif how == "clamp of .data":
        tensor.data[1000, 7] = 2.0
        tensor.data.clamp_(-1.5, 1.5)
    else:
        tensor.detach().numpy()[500, 3:9] += 1
    assert tensor._version == version


@pytest.mark.parametrize("how", ["all", "rows of .data", "clamp of .data", "numpy"])
def test_a_write_that_torch_does_not_count_and_the_copy_took_is_found_by_name(how: str) -> None:
    """The slot does not hold what was there at the put, wherever in the tensor the write was."""
    ends: list[str] = []
    source, target = torch.rand(1024, 1024), torch.zeros(1024, 1024)
    copy = late([(source, target)], ends, [True])
    write_unseen(source, how)
    copy.work()
    assert ends == [deferred_copy.changed_message("tensor 0")]


@pytest.mark.parametrize("how", ["all", "rows of .data", "clamp of .data", "numpy"])
def test_a_write_after_the_copy_of_its_bytes_is_none(how: str) -> None:
    """The slot holds the state of the put, so there is nothing to fail."""
    ends: list[str] = []
    source, target = torch.rand(1024, 1024), torch.zeros(1024, 1024)
    expected = source.clone()
    copy = late([(source, target)], ends, [True])
    copy.work()
    write_unseen(source, how)
    assert (copy.release(), ends) == ("", [""])
    assert torch.equal(target, expected)


def test_samples_find_a_write_over_all_of_a_tensor_and_miss_one_of_a_part() -> None:
    """What `overlap_check="sampled"` gives up."""
    ends: list[str] = []
    for how in ("all", "numpy"):
        source, target = torch.rand(1024, 1024), torch.zeros(1024, 1024)
        moves = [(target.data_ptr(), source.data_ptr(), source.nbytes)]
        copy = DeferredCopy(
            [(watch(source, is_whole=False), moves)], keep=target, is_wanted=lambda: True, on_end=ends.append,
            name_of=lambda number: f"tensor {number}",
        )  # fmt: skip
        write_unseen(source, how)
        copy.work()
    assert ends == [deferred_copy.changed_message("tensor 0"), ""]


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, SAMPLE_EVERY_BYTES - 1, SAMPLE_EVERY_BYTES + 64])
def test_samples_lie_in_memory_of_any_length(nbytes: int) -> None:
    """Its first byte is among them."""
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    before = digest_of(memory.data_ptr(), nbytes, is_whole=False)
    memory[0] = 1
    assert digest_of(memory.data_ptr(), nbytes, is_whole=False) != before


def test_memory_that_is_gone_is_no_fault() -> None:
    """The kernel copies, and says that nothing is there; what is there is copied, across any borders of pages."""
    source, target = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    assert copy_own(target.data_ptr() + 1, source.data_ptr() + 77, 100_001)
    assert torch.equal(target[1:100_002], source[77:100_078])
    mapped = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    mapped.close()
    assert not copy_own(target.data_ptr(), address, 1 << 20)
    assert is_permitted()


@pytest.mark.parametrize("is_foreach", [False, True])
def test_an_optimizer_that_torch_counts_shows_in_parameters_and_moments(is_foreach: bool) -> None:
    """One counter for a parameter and what state_dict() returns of it."""
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, foreach=is_foreach)
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    moments = list(optimizer.state[model.weight].values())[1:]
    watched = [watch(one, is_whole=False) for one in (model.state_dict()["weight"], *moments)]
    optimizer.step()
    assert [one.is_counted_change() for one in watched] == [True] * 3


def test_steady_memory_is_that_of_large_dense_tensors_for_each_reader() -> None:
    """A parameter's detached view and a part of it are; what is small, another's or beyond its end is not."""
    weight, small = torch.nn.Parameter(torch.ones(200, 200)), torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([weight, small], lr=0.1, momentum=0.9)
    weight.grad, small.grad = torch.ones(200, 200), torch.ones(10)
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    gaps = torch.ones(400, 200)[::2]
    memory = OptimizerMemory([*optimizer_tensors(optimizer), gaps])

    def owners(tensor: torch.Tensor, nbytes: int) -> tuple[torch.Tensor, ...]:
        return memory.owners_of(TensorSource(nbytes, tensor.data_ptr(), tensor))

    assert owners(weight.detach(), 160_000)[-1] is weight
    assert owners(weight.detach()[10:], 152_000)[-1] is weight
    assert owners(momentum, 160_000)[-1] is momentum
    assert owners(weight.detach(), 160_004) == ()
    assert owners(small, 40) == ()
    assert owners(gaps, 160_000) == ()
    assert owners(weight.clone(), 160_000) == ()
    assert memory.owners_of(TensorSource(160_000, None, weight)) == ()
    memory = OptimizerMemory(weight)  # one tensor, not its rows
    assert owners(weight, 160_000)[-1] is weight


def test_a_tensor_is_named_by_its_path() -> None:
    """Through dicts, lists and tuples; the first of tied ones."""
    weights = [torch.rand(64 * KIB) for _ in range(3)]
    state = {"a": [{"w": weights[0]}, (weights[1],)], ("k", 1): weights[2], "tied": weights[0]}
    plan = plan_state(state)
    names = {name_at(decode_layout(plan.layout), offset) for offset, source in plan.placed if source.nbytes >= 64 * KIB}
    assert names == {"state['a'][0]['w']", "state['a'][1][0]", "state[None]"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("bad")], ids=["Ctrl-C", "an error"])
def test_an_exception_in_mid_move_ends_the_copy_with_a_problem(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Else the fence would wait for a move that no thread makes, and the slots would be lost."""

    def interrupted(*_: int) -> bool:
        raise error

    monkeypatch.setattr(deferred_copy, "copy_own", interrupted)
    ends: list[str] = []
    copy = late([(torch.rand(64 * KIB), torch.zeros(64 * KIB))], ends, [True])
    with pytest.raises(type(error)):
        copy.work()
    assert copy.ended.is_set()
    assert len(ends) == 1
    assert "interrupted" in ends[0]
    assert type(error).__name__ in ends[0]


def test_sources_that_cannot_be_compared_are_not_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not known to be of one moment: the step is given up, and the copy ends."""
    ends: list[str] = []
    copy = late([(torch.rand(64 * KIB), torch.zeros(64 * KIB))], ends, [True])

    def broken(self: WatchedSource) -> bool:
        raise OSError("bad")

    monkeypatch.setattr(WatchedSource, "is_counted_change", broken)
    copy.work()
    assert ends == ["its sources could not be compared: OSError('bad')"]
    assert copy.ended.is_set()


def test_a_copy_that_is_interrupted_anywhere_ends_and_is_not_taken_for_whole() -> None:
    """By a signal's handler that raises, say between taking a move and making it."""
    for at in itertools.count(1):
        ends: list[str] = []
        source, target = torch.rand(4 * KIB), torch.zeros(4 * KIB)
        copy = late([(source, target)], ends, [True])
        interrupted = interrupt(copy.work, at)
        copy.work()
        assert copy.ended.is_set(), interrupted
        assert ends != [""] or torch.equal(source, target), interrupted
        if interrupted is None:
            break
    assert at > 20
