"""What a holder does whose folder's files were removed, in which order, and what it says of it (R2, R5, R35)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from memstore.core.holder.lost_files import FileLoss, look
from memstore.errors import CapacityError, MemstoreError


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
