"""Faults of files: removed, cut short, rotten; of holders that are down and of ones that live."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np

from memstore.shell.arena.slot_headers import HEADER_NBYTES, RECORD_DTYPE, SlotState
from memstore.testing.nemesis.fault_base import FaultBase
from memstore.testing.nemesis.schedule import Planned

LIVE_FILES = (("arena", "slots", "manifests", "journal"), ("manifests",), ("journal",), ("slots",), ("arena",), ("*",))
STOPPED_S = 2.0


class FileFaults(FaultBase):
    """A part of `Faults`."""

    def lose_folder_under_ranks(self, rng: random.Random, planned: Planned) -> None:
        """A holder dies, its folder is removed, a new holder comes; the host's ranks live on with the old mapping."""
        self._lose_under_ranks(rng, planned, "lose_folder_under_ranks", "*")

    def lose_file_under_ranks(self, rng: random.Random, planned: Planned) -> None:
        """The same with one file of the folder."""
        name = rng.choice(("arena", "arena", "slots", "manifests", "journal"))
        self._lose_under_ranks(rng, planned, "lose_file_under_ranks", name)

    def _lose_under_ranks(self, rng: random.Random, planned: Planned, kind: str, name: str) -> None:
        on_ranks = [h for h in self.job.place if self.hosts.pid(h) is not None and h not in self.hosts.stopped]
        host = rng.choice(on_ranks) if on_ranks else ""
        host = self.expendable(rng, Planned(planned.at_s, planned.kind, 0.0, {"host": host})) if host else ""
        if not host:
            return
        self.story.fault(kind, f"{host}: holder killed, {'its folder' if name == '*' else name} removed, ranks live on")
        self.hosts.kill_holder(host)
        self.ledger.harmed(self.hosts.domain[host], "lost", time.monotonic())
        self._remove(self.hosts.arena(host), (name,))
        self.later(planned, lambda: self.start(host))

    def remove_live_files(self, rng: random.Random, planned: Planned) -> None:
        """A cleaner removes files of a live holder's folder."""
        host = self.expendable(rng, planned)
        if host:
            names = rng.choice(LIVE_FILES)
            self.story.fault("remove_live_files", f"{host}: {', '.join(names)}")
            self.ledger.harmed(self.hosts.domain[host], "lost", time.monotonic())
            self.hosts.mark_away(host)
            self._remove(self.hosts.arena(host), names)

    def _remove(self, folder: Path, names: tuple[str, ...]) -> None:
        if names == ("*",):
            shutil.rmtree(folder, ignore_errors=True)
            return
        for name in names:
            if name == "manifests":
                shutil.rmtree(folder / name, ignore_errors=True)
            else:
                (folder / name).unlink(missing_ok=True)

    def truncate_while_down(self, rng: random.Random, planned: Planned) -> None:
        """A holder dies, its journal or its manifests are cut short, a new one comes. Never what a rank has mapped."""
        host = self.expendable(rng, planned)
        if not host:
            return
        what = rng.choice(("journal", "manifests"))
        self.story.fault("truncate_while_down", f"{host}: {what}")
        self.hosts.kill_holder(host)
        self.ledger.harmed(self.hosts.domain[host], "lost", time.monotonic())
        folder = self.hosts.arena(host)
        paths = [folder / "journal"] if what == "journal" else _files(folder / "manifests")
        for path in paths:
            with contextlib.suppress(OSError):
                os.truncate(path, int(path.stat().st_size * rng.choice((0.0, 0.3, 0.9))))
        self.later(planned, lambda: self.start(host))

    def rot_slots(self, rng: random.Random, planned: Planned) -> None:
        """Bytes of sealed slots change; the holder is stopped meanwhile, so that no slot is another by then."""
        host = self.expendable(rng, planned)
        pid = self.hosts.pid(host) if host else None
        if pid is None:
            return
        folder = self.hosts.arena(host)
        os.kill(pid, signal.SIGSTOP)
        try:
            count = self._rot_sealed(rng, pid, folder)
        except (OSError, ValueError):
            count = 0
        finally:
            os.kill(pid, signal.SIGCONT)
        if count:
            self.ledger.harmed(self.hosts.domain[host], "rot", time.monotonic())
            self.story.fault("rot_slots", f"{host}: {count} sealed slots")

    def _rot_sealed(self, rng: random.Random, pid: int, folder: Path) -> int:
        _wait_stopped(pid)
        table = np.fromfile(folder / "slots", RECORD_DTYPE, offset=HEADER_NBYTES)
        sealed = np.flatnonzero((table["state"] == SlotState.SEALED) & (table["nbytes"] > 0))
        chunk = self.hosts.cluster.config.chunk_bytes
        victims = rng.sample(sorted(int(i) for i in sealed), min(len(sealed), rng.choice((1, 3, 20))))
        with (folder / "arena").open("r+b") as arena:
            for slot in victims:
                at = slot * chunk + rng.randrange(int(table["nbytes"][slot]))
                arena.seek(at)
                byte = arena.read(1)
                arena.seek(at)
                arena.write(bytes((byte[0] ^ (1 << rng.randrange(8)),)))
        return len(victims)

    def rot_manifest(self, rng: random.Random, planned: Planned) -> None:
        """A byte of some manifests on one host changes."""
        host = self.expendable(rng, planned)
        if host:
            count = sum(_flip(rng, path) for path in _files(self.hosts.arena(host) / "manifests"))
            if count:
                self.ledger.harmed(self.hosts.domain[host], "rot-file", time.monotonic())
                self.story.fault("rot_manifest", f"{host}: {count} manifests")

    def rot_journal(self, rng: random.Random, planned: Planned) -> None:
        """A byte of a journal changes."""
        host = self.expendable(rng, planned)
        if host and _flip(rng, self.hosts.arena(host) / "journal"):
            self.ledger.harmed(self.hosts.domain[host], "rot-file", time.monotonic())
            self.story.fault("rot_journal", host)


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return []


def _flip(rng: random.Random, path: Path) -> bool:
    """Flip a bit of a file's content."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        size = file.seek(0, 2)
        if size:
            at = rng.randrange(size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes((byte[0] ^ (1 << rng.randrange(8)),)))
            return True
    return False


def _wait_stopped(pid: int) -> None:
    """Wait until a process that was sent SIGSTOP has stopped; OSError if it does not."""
    deadline_s = time.monotonic() + STOPPED_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"process {pid} did not stop")
        time.sleep(0.002)
