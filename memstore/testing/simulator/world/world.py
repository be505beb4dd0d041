"""What the parts of a simulation use of the whole; `run/cluster.py` is its one implementation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from memstore.core.cluster.state import Rules
from memstore.testing.simulator.world.durable_storage import DurableStorage
from memstore.testing.simulator.world.memory import Memory
from memstore.testing.simulator.world.network import Network
from memstore.testing.simulator.world.processes import AnyController, AnyHolder, AnyRank
from memstore.testing.simulator.world.scenario import Scenario
from memstore.testing.simulator.world.virtual_time import SimProcess, Thread


class World(Protocol):
    """Virtual time, chance, machines and processes, as each part of a simulation sees them."""

    scenario: Scenario
    rules: Rules  # of controllers
    config: dict[str, Any]  # of the job
    rng: random.Random
    ids: Iterator[int]
    network: Network
    durable: DurableStorage
    memories: dict[str, Memory]  # by host
    drains: dict[str, float]  # host -> the moment at which Ray will end it
    failing_loads: int  # so many of the next gets fail as a rank loads what they brought
    has_kv: bool  # Ray's key-value store answers
    term: int  # the highest that a controller has taken

    @property
    def now(self) -> float:
        """Seconds since the start."""

    @property
    def holders(self) -> Mapping[str, AnyHolder]:
        """The newest holder of each host."""

    @property
    def ranks(self) -> Sequence[AnyRank]:
        """The ranks of the newest launch."""

    @property
    def former(self) -> Sequence[AnyRank]:
        """Stores of living processes that are open beside those of `ranks`: left in place, or of a lost process."""

    def entered(self, rank: AnyRank) -> None:
        """Let a process that recovers in place use a new Store from now on."""

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do something after a delay."""

    def spawn(self, work: Thread, process: SimProcess) -> None:
        """Run a generator as a thread of a process."""

    def note(self, text: str) -> None:
        """Record a line of the run."""

    def served(self) -> AnyController | None:
        """Return the controller in charge if it serves."""

    def is_alive(self, pid: int, start: int) -> bool:
        """Say whether a rank's process lives."""

    def kill_holder(self, name: str) -> None:
        """End the holder of a host; another one follows."""

    def take_incarnation(self, name: str, above: int = 0) -> int:
        """Return the number of the next holder of a host, which is above all before it."""
