"""What a holder does about files of its folder that were removed: writes them again, and ends (R35).

    whole --a file is not where the holder made it--> lost --written again--> the holder ends: its successor adopts it
                                                        '--not possible: said, tried again, served on from memory

A file whose name was removed is still there while the holder has it open: bytes, slot table, manifests, journal. So
nothing that is stored is lost with the names. But no rank can connect, and a successor would find nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from memstore.errors import MemstoreError


class HolderFiles(Protocol):
    """The files of a holder's folder, as its process has them open."""

    def missing(self) -> list[str]:
        """Return the names of files that are gone, or are not the holder's any more."""
        ...

    def prepare(self) -> None:
        """Have the folder and room for all that is written again; MemstoreError or OSError if that cannot be."""
        ...

    def other_holder(self, error: Exception) -> bool:
        """Return whether `prepare` failed because another holder has the folder."""
        ...

    def say_loss(self, names: str) -> None:
        """Log the names that are gone: once for each list."""
        ...

    def last_word(self) -> None:
        """Report the loss, then end every connection: the rest is for a successor."""
        ...

    def write_again(self) -> None:
        """Write the files that a successor adopts; any error if not all of them could be written."""
        ...

    def end(self, why: str) -> None:
        """End the holder."""
        ...


@dataclass(slots=True)
class FileLoss:
    """What a holder knows of its removed files; `names` of those that its predecessor found removed at first."""

    names: str = ""
    is_now: bool = False
    problem: str = ""  # why they cannot be written again


def look(files: HolderFiles, loss: FileLoss) -> None:
    """End the holder if a file of its folder is not where it made it, once all of them are written again.

    A file system without room for the copy, or a folder that cannot be made, does not end it: its bytes are served on.
    """
    missing = files.missing()
    if not missing:
        return
    names = ", ".join(missing)
    if not loss.is_now or names != loss.names:
        files.say_loss(names)
    loss.names, loss.is_now = names, True
    try:
        files.prepare()
    except (MemstoreError, OSError) as exc:
        loss.problem = str(exc)
        if files.other_holder(exc):
            files.end(f"another holder has taken its folder: {exc}")
        return
    files.last_word()
    files.end(f"{names} were removed from its folder: {_written_again(files)}")


def _written_again(files: HolderFiles) -> str:
    try:
        files.write_again()
    except Exception as exc:  # its connections have ended, so it ends whatever happens
        return f"not all of it could be written again ({exc}); the rest is for peers to bring"
    return "written again, for another holder to adopt"
