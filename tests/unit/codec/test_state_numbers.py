"""Long lists of numbers are one block each; counters and deques are plain data."""

from __future__ import annotations

import pickle
import random
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memstore.core.format.layout import decode_layout, encode_layout
from memstore.core.format.object_tree import Tag
from memstore.errors import ManifestMismatch, ProtocolError
from memstore.shell.codec import encode
from memstore.shell.codec.decode import check_into, decode_state, matched
from memstore.shell.codec.encode import PlanMemory, StatePlan, copy_into, plan_state
from memstore.shell.codec.walk import NUMBERS_MIN, StateWalk

NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000123))[0]
BASE = torch.arange(6.0)


def stored(state: object, chunk_bytes: int = 4096) -> tuple[bytes, list[memoryview], int]:
    return slots(plan_state(state), chunk_bytes)


def slots(plan: StatePlan, chunk_bytes: int = 4096) -> tuple[bytes, list[memoryview], int]:
    views = [memoryview(bytearray(chunk_bytes)) for _ in range(0, plan.nbytes, chunk_bytes)]
    copy_into(plan, views, chunk_bytes)
    return plan.layout, views, chunk_bytes


def bits(value: Any) -> Any:
    """Return a form in which equal means the same bits and types."""
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [bits(item) for item in value]
    return type(value), struct.pack("<d", value) if isinstance(value, float) else value


LONG: dict[str, Any] = {
    "floats": [0.5, -0.0, NAN, float("inf"), 5e-324] * 50,
    "integers": [0, -(1 << 63), (1 << 63) - 1, 7] * 50,
    "truths": [True, False, True] * 50,
    "tuple": tuple(range(200)),
    "tuple of floats": (NAN, 1.0) * 100,
    "tuple of truths": (True,) * 200,
    "deque": deque([0.25] * 200, maxlen=300),
    "short deque": deque(["a", 1], maxlen=None),
    "beyond 64 bits": [1 << 70] * 100,
    "unsigned": [1 << 63] * 100,
    "two kinds": [1, 0.5] * 100,
    "truths and integers": [True, 1] * 100,
    "in a set": {tuple(range(100))},
    "as a key": {tuple(range(100)): 1},
}


@pytest.mark.parametrize("name", LONG)
def test_sequences_of_numbers_come_back_bit_for_bit(name: str) -> None:
    """Of one kind as a block, else item by item."""
    got = decode_state(*stored({"x": LONG[name], "w": BASE}))["x"]
    assert bits(got) == bits(LONG[name])


@pytest.mark.parametrize("kind", [float, int, bool])
def test_a_block_costs_the_layout_nothing(kind: type) -> None:
    """So no length is refused in the middle of training: eight million were."""
    for make in (list, tuple, deque):
        plan = plan_state({"losses": make([kind(1)] * 300_000)})
        assert len(plan.layout) < 200
        assert plan.nbytes == 300_000 * (1 if kind is bool else 8)


def test_a_random_state_comes_back() -> None:
    """It is a tuple of 625 integers inside another one."""
    random.seed(5)
    into = {"rng": random.getstate(), "w": torch.zeros(6)}
    random.random()
    drawn = random.getstate()
    random.seed(6)
    decode_state(*stored({"rng": drawn, "w": BASE}), into=into)
    random.setstate(into["rng"])  # type: ignore[arg-type]
    assert random.getstate() == drawn


def test_a_block_goes_into_the_live_list() -> None:
    """The list stays the one that it was, whatever it held; a tuple is replaced in its entry."""
    losses, window, pair = [0.0, "x"], deque([1.0], maxlen=100), (0, 0)
    into = {"losses": losses, "window": window, "pair": pair, "none": None, "inner": (1, ())}
    many = [float(number) for number in range(200)]
    state = {
        "losses": many,
        "window": deque(many, maxlen=200),
        "pair": tuple(range(100)),
        "none": many,
        "inner": (2, tuple(many)),
    }
    decode_state(*stored(state), into=into)
    assert into["losses"] is losses
    assert losses == many
    assert into["window"] is window
    assert list(window) == many[100:]
    assert (into["pair"], into["none"], into["inner"]) == (tuple(range(100)), many, (2, tuple(many)))


def test_live_objects_in_a_list_stay_where_numbers_were_stored() -> None:
    """They are listed; a tensor is refused, as is a list that has more items than were stored."""
    live = {"w": torch.zeros(1)}
    into: dict[str, Any] = {"x": [0, live, 0]}
    state = stored({"x": list(range(100))})
    match = matched(decode_layout(state[0]), into)
    assert match is not None
    assert match.plain.not_filled == ["state['x'][1]"]
    decode_state(*state, into=into)
    assert into["x"] == [0, live, *range(2, 100)]
    with pytest.raises(ManifestMismatch, match=r"state\['x'\]\[1\] was stored as a plain object"):
        check_into(state[0], {"x": [0, torch.zeros(1)]})
    with pytest.raises(ManifestMismatch, match=r"state\['x'\] was stored with 100 items and has 101"):
        check_into(state[0], {"x": [0] * 101})
    match = matched(decode_layout(stored((tuple(range(100)), BASE))[0]), ((1,), torch.zeros(6)))
    assert match is not None
    assert match.plain.not_filled == ["state[0]"]


@pytest.mark.parametrize("live", [{}, {"milestones": Counter({9: 1})}])
def test_counters_come_back_as_counters(live: dict[str, Any]) -> None:
    """A missing key counts 0."""
    value = Counter({30: 1, 80: 2})
    into: Any = dict(live)
    decode_state(*stored({"milestones": value}), into=into)
    assert type(decode_state(*stored({"milestones": value}))["milestones"]) is Counter
    assert into["milestones"] == value
    assert into["milestones"]["absent"] == 0


def test_every_schedule_of_milestones_is_stored() -> None:
    """MultiStepLR keeps them in a Counter."""
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2)]
    one, other = (torch.optim.lr_scheduler.MultiStepLR(each, [1, 2]) for each in optimizers)
    optimizers[0].step()
    one.step()
    decode_state(*stored({"s": one}), into={"s": other})
    assert other.state_dict() == one.state_dict()


def test_tensors_in_a_deque_are_filled() -> None:
    """As in a list; a shorter one has no place for them."""
    state = stored({"d": deque([BASE, 3, BASE + 1])})
    into = {"d": deque([torch.zeros(6), 0, torch.zeros(6)])}
    first = into["d"][0]
    decode_state(*state, into=into)
    assert into["d"][0] is first
    assert (first.tolist(), into["d"][1]) == (BASE.tolist(), 3)
    with pytest.raises(ManifestMismatch, match=r"state\['d'\]\[2\] was stored with tensors"):
        check_into(state[0], {"d": deque([torch.zeros(6), 0])})


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], int]] = {
    "other numbers": (lambda s: s["losses"].__setitem__(3, NAN), 0),
    "longer": (lambda s: s["losses"].append(0.5), 0),
    "both longer": (lambda s: s["losses"].append(0.5) or s["params"].append(7), 0),
    "plain value": (lambda s: s.update(step=9), 0),
    "another kind": (lambda s: s.update(losses=[int(each) for each in s["losses"]]), 1),
    "another type": (lambda s: s.update(losses=tuple(s["losses"])), 1),
    "one of another kind": (lambda s: s["losses"].append(1), 1),
    "beyond 64 bits": (lambda s: s["params"].append(1 << 63), 1),
    "short": (lambda s: s.update(losses=s["losses"][: NUMBERS_MIN - 1]), 1),
    "counted": (lambda s: s["count"].update(a=1), 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_known_state_takes_new_blocks_without_a_walk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history that grows, an optimizer's list of parameters: what is stored is what a walk would store."""
    state: dict[str, Any] = {
        "deep": {"more": [0.0] * 70},
        "losses": [0.5] * 100,
        "w": BASE,
        "step": 1,
        "params": list(range(80)),
        "count": Counter(a=1),
    }
    memory, walks = PlanMemory(), []
    for _ in range(3):
        memory.plan(state)
    change, wanted = CHANGES[name]
    change(state)
    monkeypatch.setattr(encode, "StateWalk", lambda *given: walks.append(given) or StateWalk(*given))
    plan = memory.plan(state)
    monkeypatch.undo()
    assert len(walks) == wanted
    assert slots(plan)[:2] == slots(plan_state(state))[:2]


def test_a_long_list_costs_a_small_multiple_of_pickle() -> None:
    """It was 160 times, at every put. The bound is far from both: this is no measurement."""
    state = {"losses": [number / 7 for number in range(300_000)], "w": BASE}
    memory = PlanMemory()

    def cost_s(work: Callable[[], object]) -> float:
        took = []
        for _ in range(5):
            began_s = time.thread_time()
            work()
            took.append(time.thread_time() - began_s)
        return min(took)

    assert cost_s(lambda: memory.plan(state)) < 30 * cost_s(lambda: pickle.dumps(state["losses"]))


@pytest.mark.parametrize("tag", [Tag.INT_LIST, Tag.FLOAT_TUPLE])
def test_a_block_that_ends_within_a_number_is_malformed(tag: Tag) -> None:
    """So is a deque of anything but one list."""
    for tree in ([int(tag), bytes(12)], [int(Tag.DEQUE), None, [1, 2]], [int(Tag.DEQUE), -1, [[1, None]]]):
        with pytest.raises(ProtocolError):
            decode_state(encode_layout(0, [], [], [], tree), [], 4096)
