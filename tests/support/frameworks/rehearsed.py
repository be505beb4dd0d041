"""What rehearsals build: one state that comes back, and one for each way in which it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import memstore

Built = tuple[dict[str, Any], Callable[[], float]]


def _training(state: Callable[[torch.nn.Module, Any, Any], dict[str, Any]], *, dropout: float = 0.0) -> Built:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(dropout), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step() -> float:
        loss = model(torch.ones(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return float(loss.detach())

    return state(model, optimizer, schedule), step


def good() -> Built:
    return _training(lambda m, o, s: {"model": m, "opt": o, "schedule": s})


def without_random_state() -> Built:
    """Dropout draws what an unbroken run would not draw."""
    return _training(lambda m, o, s: {"model": m, "opt": o, "schedule": s}, dropout=0.5)


class Grows:
    """It counts what it has seen, and a fresh one cannot take more than it has room for."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seen"] > self.seen:
            raise ValueError(f"has room for {self.seen} and gets {state['seen']}")


def refuses() -> Built:
    state, step = good()
    state["seen"] = Grows()

    def grow() -> float:
        state["seen"].seen += 1
        return step()

    return state, grow


class Forgets:
    """Its load_state_dict takes nothing."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def forgets() -> Built:
    state, step = good()
    state["counter"] = Forgets()

    def count() -> float:
        state["counter"].count += 1
        return step()

    return state, count


def prints() -> Built:
    print("a model is built")  # noqa: T201
    return good()


def raises() -> Built:
    raise RuntimeError("no data set here")


def hangs() -> Built:
    torch.futures.Future().wait()  # for ever
    raise AssertionError


def connects() -> Built:
    """A training script's whole work: in a rehearsal it would become the job's next launch."""
    memstore.connect("llm", rank=0, world_size=1)
    return good()
