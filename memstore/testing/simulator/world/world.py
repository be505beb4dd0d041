"""What the parts of a simulation use of the whole; `run/cluster.py` is its one implementation."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memstore.core.arena.replica_store import Store
from memstore.core.arena.slot_table import Owner
from memstore.core.cluster.state import Rules
from memstore.core.controller.machine import ControllerMachine
from memstore.core.format.manifest import Manifest
from memstore.core.holder.sessions import Sessions
from memstore.core.wire.calls import RankCall
from memstore.core.wire.messages import Event, HostInfo
from memstore.core.wire.orders import Order
from memstore.core.wire.rank_messages import HolderEvent, PutReady
from memstore.core.wire.replies import ShardPlaced
from memstore.core.wire.reports import HostInventory
from memstore.shell.holder.pending_calls import Calls
from memstore.shell.peer.server import PeerServer
from memstore.testing.simulator.world.memory import DurableStorage, Memory
from memstore.testing.simulator.world.scenario import Scenario
from memstore.testing.simulator.world.virtual_time import Network, SimProcess, Thread, Wait
from recovery.inventory import Copy

# -- processes ----------------------------------------------------------------------------------------
# What the processes of a simulation, and the checks, see of one another.
#
# Ranks, holders and controllers talk in both directions. Each of them is written against these protocols, so that no
# file of theirs imports another's.


Answer = Any  # of the type that its request declares; a `CopiedRead` for one that names bytes, a `CallFailed`


@dataclass(frozen=True)
class CallFailed:
    """Why there is no answer; "" if none came in time."""

    error: str


@dataclass(frozen=True)
class CopiedRead:
    """An answer that names bytes, and those bytes as its rank copied them, by chunk."""

    placed: ShardPlaced
    chunks: Mapping[int, bytes]

    @property
    def whole(self) -> list[bytes]:
        """Return the bytes of all chunks, where all were asked for."""
        return list(self.chunks.values())


class AnyController(Protocol):
    """A controller, as holders and checks see it."""

    term: int
    machine: ControllerMachine

    @property
    def sessions(self) -> Mapping[str, AnySession]:
        """Its open sessions, by host."""


class AnySession(Protocol):
    """A connection of a controller to a holder, as the holder and the checks see it."""

    opened_s: float
    clock_s: float  # the controller's clock, as it last sent it to the holder

    @property
    def controller(self) -> AnyController:
        """The controller at the other end."""

    def report(self, event: Event) -> None:
        """Send an event to the controller."""

    def replaced(self) -> None:
        """End the session, because the holder obeys another one from now on."""

    def reset(self) -> None:
        """End the session as a broken connection does."""


class AnyHolder(SimProcess, Protocol):
    """A holder, as ranks, controllers and checks see it."""

    host_id: str
    memory: Memory
    replicas: Store
    peer_server: PeerServer
    sessions: Sessions[AnySession]
    calls: Calls  # that no controller has answered

    @property
    def term(self) -> int:
        """Return the highest term of a controller that it has obeyed."""

    @property
    def session(self) -> AnySession | None:
        """Return the session that it obeys."""

    @property
    def is_serving(self) -> bool:
        """Return whether its process lives and runs."""

    def copies(self) -> Sequence[Copy]:
        """Return its inventory."""

    def connected(self) -> Sequence[AnyRank]:
        """Return the stores that it speaks to, on open links."""

    # -- for a rank on its host ---------------------------------------------------------------

    def join(self, rank: AnyRank) -> None:
        """Open a link."""

    def leave(self, link: object) -> None:
        """Take the `bye` that came on a link."""

    def call(self, rank: AnyRank, call_id: int, request: RankCall) -> None:
        """Relay a rank's question to the controller."""

    def take_over(self, rank: AnyRank, ready: PutReady) -> None:
        """Seal what a rank has written into its slots."""

    # -- for a controller ---------------------------------------------------------------------

    def accept(self, session: AnySession) -> bool:
        """Use a session from now on; False if the holder obeys a controller with a higher term."""

    @property
    def info(self) -> HostInfo:
        """Return who it is."""

    def hello(self) -> HostInventory:
        """Return the first message of a session."""

    def obey(self, order: Order) -> None:
        """Carry out an order."""

    def answer(self, number: int, data: bytes, error: tuple[str, str] | None) -> None:
        """Pass the answer to a question on to its rank."""


class AnyRank(SimProcess, Protocol):
    """A training process, as its holder and the checks see it."""

    job: str
    attempt: int
    rank: int
    place: tuple[int, int]  # rank and attempt that its link names
    host_id: str
    key: str
    nonce: str
    owner: Owner
    is_dead: bool
    is_fenced: bool
    holder: AnyHolder | None
    link: object  # to which it listens
    mapping: list[bytearray]  # the slots of the arena that it has mapped
    pool: list[int]  # slots leased to it
    in_copy: set[int]  # slots that it writes into
    calls: dict[int, RankCall]  # that are not answered
    tickets: dict[int, str]  # step -> level
    resume_step: int
    steps_done: int

    def held(self) -> list[int]:
        """Return every slot that it believes to be its own."""

    def ended(self) -> Sequence[Owner]:
        """Return the stores that its process has closed."""

    def read(self, slots: Sequence[int | None]) -> list[bytes]:
        """Return the bytes of slots as it has them mapped, b"" for a slot that is None."""

    def welcomed(self, holder: AnyHolder, stale: Sequence[int]) -> None:
        """Take note that a holder has taken its link, and which slots are not its own."""

    def connected(self, holder: AnyHolder) -> None:
        """Send again what was not sealed or answered."""

    def receive(self, message: HolderEvent) -> None:
        """Take what the holder says."""

    def answered(self, call_id: int, answer: Answer) -> None:
        """Take the answer to one of its questions."""

    def check(self, manifest: Manifest) -> str:
        """Say why it cannot take the shard that was staged for it, or ""."""

    def repair(self, manifest: Manifest, missing: Sequence[int]) -> Generator[Wait, None, dict[int, bytes]]:
        """Have the holder bring chunks that did not come, or came damaged; return those that are good."""


# -- world --------------------------------------------------------------------------------------------


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
    racks: dict[str, str]  # by host, also of those that are lost; "": no label
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


# -- violation ----------------------------------------------------------------------------------------
# The exception for a broken rule.


class Violation(AssertionError):
    """A rule of PROTOCOL.md (R) or an invariant (I) that a run broke."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
