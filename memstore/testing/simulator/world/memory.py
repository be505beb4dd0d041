"""A machine's RAM file system: arena, slot headers, manifests and journal. It outlives any holder.

Every write that the real files would see is one operation. `crash_in` ends the holder's process before an operation:
what was written before stays, and nothing is written after it, not even by clean-up code (R7).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memstore.core.arena.memory_ports import SlotHeader
from memstore.core.durable.increments import needed_names
from memstore.core.durable.paths import MARKER, step_path
from memstore.core.durable.storage_ports import DurableFiles, DurableReader, Wrote
from memstore.core.wire.orders import DurablePlace
from memstore.errors import CapacityError, IntegrityError, MemstoreError
from memstore.shell.arena.arena import Arena
from memstore.shell.arena.manifests import ManifestFolder
from memstore.shell.durable.tier import PartsTier
from recovery.inventory import StepId

Place = tuple[str, int, int]  # job, attempt, step: of a durable step


class Crashed(Exception):
    """The holder's process died at this write."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory.host_id)
        self.memory = memory


class Memory:
    """The memory of one machine; after its holder died it is cut until the next holder opens it."""

    def __init__(self, host_id: str, chunk_bytes: int) -> None:
        self.host_id, self.chunk_bytes = host_id, chunk_bytes
        self.slots: list[bytearray] = []
        self.headers: list[SlotHeader] = []
        self.manifests: dict[str, bytes] = {}
        self.journal: list[bytes] = []
        self.spoilt: dict[int, float] = {}  # slot whose bytes a fault has changed -> when, until it is freed
        self.damaged: set[bytes] = set()  # digests that a fault has spoilt here: a manifest may lack them (R30)
        self.rotten: set[str] = set()  # names of manifests that a fault has spoilt, until they are written again
        self.unbacked: set[int] = set()  # slots without pages: a process that touches one is killed
        self.is_removed = False  # the names of its files are gone, but its holder has them open (R35)
        self.is_full = False  # no room for a manifest, a slot or a fact
        self.is_cut = False
        self.crash_in: int | None = None
        self.clock_ahead_s = 0.0  # how far faults have stepped the machine's wall clock
        self.incarnation = 0  # the number of the newest holder, as the folder has it (R3)
        self.seen = ""  # the record of when a holder last ran here (R5)
        self.seen_s = 0.0  # when it was written
        self.version = 0  # grows with every change, so that a checker looks only at what changed

    @property
    def is_sound(self) -> bool:
        """Return whether every byte and every file is as it was written."""
        return not (self.spoilt or self.rotten or self.is_removed)

    def wipe(self) -> None:
        """Lose everything, as a machine that is replaced."""
        self.slots, self.headers, self.manifests, self.journal = [], [], {}, []
        self.spoilt.clear()
        self.damaged.clear()
        self.rotten.clear()
        self.unbacked.clear()
        self.is_removed = False
        self.version += 1

    def lose_folder(self) -> None:
        """Lose the holder's folder with all its files, and with the number of the newest holder."""
        self.wipe()
        self.incarnation = 0

    def write_again(self) -> None:
        """Write what the holder has open into the folder again: new files with the same bytes (R35)."""
        self.slots, self.is_removed = [bytearray(slot) for slot in self.slots], False
        self.version += 1

    def spoil(self, slot: int, now: float) -> None:
        """Change a byte of a slot, as a fault does."""
        self.slots[slot][0] ^= 0x20
        self.spoilt[slot] = now
        self.damaged.add(bytes(self.headers[slot].digest))
        self.version += 1

    def write(self) -> bool:
        """Begin an operation; return False if the process is dead already. Raises Crashed if it dies now."""
        if self.is_cut:
            return False
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.is_cut, self.crash_in = True, None
                raise Crashed(self)
        self.version += 1
        return True


class MemoryJournal:
    """The journal of a simulated machine; each write is one operation."""

    dropped_nbytes = 0

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def records(self) -> list[bytes]:
        """Return every record."""
        return self._memory.journal

    def append(self, records: Sequence[bytes]) -> None:
        """Write records behind those that are there; CapacityError if the file system is full."""
        self.rewrite([*self._memory.journal, *records])

    def rewrite(self, records: Sequence[bytes]) -> None:
        """Write records in place of all that are there; CapacityError if the file system is full."""
        if self._memory.is_full:
            raise CapacityError(f"the simulated file system has no room for {len(records)} facts")
        if self._memory.write():
            self._memory.journal = list(records)


class MachineClock:
    """The clocks of a machine: faults step the wall clock, and never the monotonic one."""

    def __init__(self, memory: Memory, now: Callable[[], float]) -> None:
        self._memory, self.monotonic = memory, now

    def time(self) -> float:
        """Return the time of day in seconds."""
        return 1e9 + self.monotonic() + self._memory.clock_ahead_s


class MemoryHeaders:
    """The slot table's records."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def read(self, slot: int) -> SlotHeader:
        """Return one record."""
        return self._memory.headers[slot]

    def write(self, slot: int, header: SlotHeader) -> None:
        """Replace one record."""
        if self._memory.write():
            self._memory.headers[slot] = header
            if int(header.state) == 0:
                self._memory.spoilt.pop(slot, None)


class MemoryArena(Arena):
    """An arena in a simulated machine's memory."""

    def __init__(self, memory: Memory, limit_slots: int) -> None:
        self.memory = memory
        self.chunk_bytes, self.limit_slots = memory.chunk_bytes, limit_slots
        self.headers = MemoryHeaders(memory)  # type: ignore[assignment]
        self.unbacked = sorted(memory.unbacked)

    @property
    def identity(self) -> str:
        """Return the name of the arena; that a rank has another one mapped shows in what it sees there."""
        return "arena"

    @property
    def slots_count(self) -> int:
        """How many slots are claimed."""
        return len(self.memory.slots)

    def view(self, slot: int, nbytes: int | None = None) -> memoryview:
        """Return a slot's bytes."""
        if slot in self.memory.unbacked:
            raise AssertionError(f"slot {slot} of {self.memory.host_id} is used without memory behind it: a SIGBUS")
        return memoryview(self.memory.slots[slot])[: self.chunk_bytes if nbytes is None else nbytes]

    def grow(self, slots_count: int, should_stop: Any = None) -> int:
        """Claim slots; CapacityError if the file system is full."""
        memory = self.memory
        if memory.is_full or slots_count > self.limit_slots:
            raise CapacityError(f"the simulated file system has no room for {slots_count} slots")
        if memory.write():
            count = slots_count - len(memory.slots)
            memory.slots += [bytearray(self.chunk_bytes) for _ in range(count)]
            memory.headers += [SlotHeader() for _ in range(count)]
        return len(memory.slots)

    def fill(self, slots: Sequence[int]) -> None:
        """Claim the pages of unbacked slots again; CapacityError if the file system is full."""
        if self.memory.is_full:
            raise CapacityError(f"the simulated file system has no room for {len(slots)} slots")
        if self.memory.write():
            self.memory.unbacked.difference_update(slots)

    def give_back(self, slots: Sequence[int]) -> list[int]:
        """Give the pages of slots back, each in an operation of its own; the slots read as zeros from then on."""
        for slot in slots:
            if self.memory.write():
                self.memory.unbacked.add(slot)
                self.memory.slots[slot] = bytearray(self.chunk_bytes)
        return []

    def close(self) -> None:
        """Do nothing: no file is open."""


class MemoryManifests(ManifestFolder):
    """The manifests of a simulated machine; a name is there whole or not at all, as after a rename."""

    def __init__(self, memory: Memory) -> None:  # no super().__init__: there is no folder to open
        self.memory, self.path = memory, Path(memory.host_id)
        self.skipped: dict[str, str] = {}
        self.problem = ""

    def save(self, name: str, data: bytes) -> None:
        """Store a manifest; CapacityError if the file system is full."""
        if self.memory.is_removed:
            raise MemstoreError(f"the folder of manifest {name} was removed")
        if self.memory.is_full:
            raise CapacityError(f"the simulated file system has no room for a manifest of {len(data)} bytes")
        if self.memory.write():
            self.memory.manifests[name] = data
            self.memory.rotten.discard(name)

    def load(self, name: str) -> bytes:
        """Return a manifest; FileNotFoundError if it is not there."""
        if name not in self.memory.manifests:
            raise FileNotFoundError(name)
        data = self.memory.manifests[name]
        return data if name not in self.memory.rotten else data[:-1] + bytes([data[-1] ^ 0x20])

    def remove(self, name: str) -> None:
        """Unlink a manifest if it is there."""
        if self.memory.write():
            self.memory.manifests.pop(name, None)
            self.memory.rotten.discard(name)

    def load_all(self) -> Iterator[tuple[str, bytes]]:
        """Yield every manifest in name order."""
        for name in sorted(self.memory.manifests):
            yield name, self.load(name)


# -- durable storage ----------------------------------------------------------------------------------
# Durable storage that all simulated hosts see.


@dataclass(frozen=True)
class _Stored(DurableReader):
    """A file of the simulation, open for reading."""

    data: bytes
    path: str

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return its size."""
        return len(self.data)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset`."""
        if offset + view.nbytes > len(self.data):
            raise IntegrityError(f"{self.path} ends at byte {len(self.data)}")
        view[:] = self.data[offset : offset + view.nbytes]


@dataclass
class DurableStorage(DurableFiles):
    """The files of durable steps, on which the product's own tier stands, and the keys in the hosts' key files."""

    where: str = "/durable"
    markers: dict[Place, bytes] = field(default_factory=dict)
    slices: dict[Place, dict[str, bytes]] = field(default_factory=dict)  # of a step: name -> bytes
    removed: set[Place] = field(default_factory=set)  # steps of which an order removed something
    keys: dict[str, str] = field(default_factory=dict)  # host -> name of the key in its file
    problem: str = ""  # every operation fails with it
    usual_s: float = 0.05
    delay_s: float = 0.05  # of every operation
    tears: int = 0  # so many of the next slices are spoilt, silently

    def tier(self, key: str, tags: Sequence[str] = ()) -> PartsTier:
        """Return the tier over these files; the name of a key stands for it: nothing is encrypted."""
        tier = PartsTier(self, read_under=key, tags=tags)
        tier.key = key
        return tier

    def path(self, job: str, *names: object) -> str:
        """Return a path for messages."""
        return step_path(self.where, job, *names)

    def write(
        self,
        job: str,
        step: StepId,
        name: str,
        pieces: Sequence[bytes | memoryview],
        *,
        should_stop: Callable[[], bool],
        is_once: bool,
    ) -> Wrote:
        """Put a file in place."""
        place, data = (job, step.attempt, step.step), b"".join(pieces)
        if name == MARKER and not (is_once and place in self.markers):
            self.markers[place] = data
            return "written"
        if name == MARKER or (is_once and name in self.slices.get(place, {})):
            return "there"
        if self.tears:
            self.tears -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        self.slices.setdefault(place, {})[name] = data
        return "written"

    @contextmanager
    def opened(self, job: str, step: StepId, name: str) -> Iterator[DurableReader]:
        """Open a file for reading."""
        place, path = (job, step.attempt, step.step), self.path(job, step.attempt, step.step, name)
        data = self.markers.get(place) if name == MARKER else self.slices.get(place, {}).get(name)
        if data is None:
            raise IntegrityError(f"{path} is gone")
        yield _Stored(data, path)

    def names(self, job: str, step: StepId) -> set[str]:
        """Return the files of a step."""
        place = (job, step.attempt, step.step)
        return {*self.slices.get(place, ()), *([MARKER] if place in self.markers else [])}

    def has(self, job: str, step: StepId, name: str) -> bool:
        """Say whether the step has such a file."""
        return name in self.names(job, step)

    def steps(self, job: str) -> tuple[list[StepId], list[str]]:
        """Return the job's steps, oldest first."""
        return sorted(StepId(*place[1:]) for place in {*self.markers, *self.slices} if place[0] == job), []

    def remove(self, job: str, step: StepId, names: Collection[str]) -> None:
        """Remove files of a step."""
        place = (job, step.attempt, step.step)
        self.removed.add(place)
        if MARKER in names:
            self.markers.pop(place, None)
        left = {name: data for name, data in self.slices.pop(place, {}).items() if name not in names}
        if left:
            self.slices[place] = left

    def tidy(self, job: str, step: StepId) -> None:
        """Do nothing: a file is never partial."""

    def probe(self, name: str = "", *, is_kept: bool = False) -> None:
        """Do nothing."""

    def probes(self) -> set[str]:
        """Return none: a simulated host is not examined."""
        return set()

    def lost(self, job: str) -> dict[StepId, set[str]]:
        """Return what the markers of a job need of older steps, and is not there."""
        records, _ = self.tier("").marker_records(job)
        needed = needed_names(record.marker for record in records)
        return {step: gone for step, names in needed.items() if (gone := names - self.names(job, step))}

    def key_of(self, place: DurablePlace, host: str) -> str:
        """Return the name of the key that a host has for a job's storage."""
        return self.keys.get(host, "0" * 16) if place.key_file else ""
