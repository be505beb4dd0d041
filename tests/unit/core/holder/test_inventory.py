"""What a holder reports of its copies: all of them as a session begins, and one as it changes (R4, R5, R16)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from holder_io import ScriptedIo

from memstore.core.arena.replica_index import StoredReplica
from memstore.core.holder.inventory import inventory, report_copy
from memstore.core.holder.lost_files import FileLoss, look
from memstore.core.wire.ids import Endpoint, WireCopy
from memstore.core.wire.messages import HostInfo, HostUp
from memstore.core.wire.reports import Sealed
from memstore.errors import CapacityError, MemstoreError
from recovery.inventory import Copy, ShardId, ShardSpec

INFO = HostInfo(
    "me", 3, (Endpoint("10.0.0.1", 7000),), "machine", is_explicit=True, labels={"rack": "a"}, limit_bytes=100
)
SHARD = ShardId("job", 1, 2, 0)
STORED = StoredReplica(SHARD, ShardSpec("d" * 32, 16, 8, 2, 1), (b"0", b"1"), [4, 5])
COPY = Copy(SHARD, STORED.spec, "me")


def test_the_controller_gets_of_an_inventory_what_the_holder_is_and_has() -> None:
    """Nothing is lost on the way, and what no session has used is as idle as it was found."""
    holder = a_holder()
    holder.now += 7.0
    event = HostUp.of("me", inventory(holder.state, [b"fact"]), 9.0)
    assert event == HostUp(INFO, (COPY,), (b"fact",), (), 9.0, 7.0, 600.0)


def test_a_copy_that_is_sealed_is_a_use_of_the_arena() -> None:
    """Days of training without a connect make no arena old."""
    holder = a_holder()
    report_copy(holder.state, STORED)
    assert holder.reports == [Sealed(copy=WireCopy.of(COPY), put=None)]
    assert inventory(holder.state, []).idle_s == 0.0


def a_holder() -> ScriptedIo:
    """Return a holder with one copy, on an arena that none had used for ten minutes."""
    index = SimpleNamespace(find=lambda shard, digest: STORED, copies=lambda host, job: [COPY])
    holder = ScriptedIo(store=SimpleNamespace(lock=contextlib.nullcontext(), index=index), info=INFO, now=50.0)
    holder.state.idle_s = 600.0
    return holder


# -- lost files ---------------------------------------------------------------------------------------
# What a holder does whose folder's files were removed, in which order, and what it says of it (R2, R5, R35).


@dataclass
class Folder:
    """A folder that notes what was done with it."""

    gone: list[str]
    problem: Exception | None = None
    write_error: Exception | None = None
    has_other_holder: bool = False
    done: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def missing(self) -> list[str]:
        return self.gone

    def prepare(self) -> None:
        if self.problem is not None:
            raise self.problem

    def other_holder(self, error: Exception) -> bool:
        return self.has_other_holder

    def say_loss(self, names: str) -> None:
        self.said.append(names)

    def last_word(self) -> None:
        self.done.append("connections ended")

    def write_again(self) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.done.append("written")

    def end(self, why: str) -> None:
        self.done.append(why)


def test_nothing_is_done_while_every_file_is_there() -> None:
    """The names that the life before found removed are shown on, as lost in the past."""
    loss, folder = FileLoss("arena"), Folder([])
    look(folder, loss)
    assert (loss, folder.done, folder.said) == (FileLoss("arena"), [], [])


def test_lost_files_are_written_again_after_the_last_connection_and_before_the_end() -> None:
    """So no rank is acknowledged a shard that a successor would not find."""
    loss, folder = FileLoss(), Folder(["arena", "slots"])
    look(folder, loss)
    assert folder.done == [
        "connections ended",
        "written",
        "arena, slots were removed from its folder: written again, for another holder to adopt",
    ]
    assert loss == FileLoss("arena, slots", is_now=True)


@pytest.mark.parametrize("problem", [CapacityError("needs 101 bytes, has 100"), PermissionError("no folder for you")])
def test_a_holder_that_cannot_write_them_serves_on_and_tries_again(problem: Exception) -> None:
    """It says why, says the loss once for each list of names, and ends as soon as it can write."""
    loss, folder = FileLoss(), Folder(["arena"], problem)
    look(folder, loss)
    look(folder, loss)
    assert (folder.done, folder.said, loss.problem) == ([], ["arena"], str(problem))
    folder.gone = ["arena", "journal"]
    look(folder, loss)
    assert (folder.done, folder.said) == ([], ["arena", "arena, journal"])
    folder.problem = None
    look(folder, loss)
    assert folder.done[:2] == ["connections ended", "written"]


def test_a_holder_whose_folder_another_one_has_taken_ends_and_writes_nothing() -> None:
    """The other holder's files are not overwritten."""
    folder = Folder(["lock"], MemstoreError("locked"), has_other_holder=True)
    look(folder, FileLoss())
    assert folder.done == ["another holder has taken its folder: locked"]


def test_a_holder_that_wrote_only_a_part_ends_all_the_same() -> None:
    """Its connections are gone; peers bring what the successor does not find."""
    folder = Folder(["arena"], write_error=OSError("disk full"))
    look(folder, FileLoss())
    assert folder.done[0] == "connections ended"
    assert "not all of it could be written again (disk full)" in folder.done[1]
