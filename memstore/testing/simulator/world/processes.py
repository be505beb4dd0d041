"""What the processes of a simulation, and the checks, see of one another.

Ranks, holders and controllers talk in both directions. Each of them is written against these protocols, so that no
file of theirs imports another's.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from memstore.core.arena.replica_store import Store
from memstore.core.arena.slot_table import Owner
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
from memstore.testing.simulator.world.memory import Memory
from memstore.testing.simulator.world.virtual_time import SimProcess, Wait
from recovery.inventory import Copy

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
