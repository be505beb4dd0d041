"""Faults of files that are removed, cut short or rotten, under holders that are down or live."""

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
    """The methods of `Faults` for files."""

    def lose_folder_under_ranks(self, rng: random.Random, planned: Planned) -> None:
        """Kill a holder, remove its folder, start a new one; the host's ranks live on with the old mapping."""
        self._lose_under_ranks(rng, planned, "lose_folder_under_ranks", "*")

    def lose_file_under_ranks(self, rng: random.Random, planned: Planned) -> None:
        """Kill a holder, remove one file of its folder, start a new one."""
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
        """Remove files of a live holder's folder, as a cleaner of temporary files does."""
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
        """Kill a holder, cut its journal or manifests short, start a new one; files that ranks have mapped stay."""
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
        """Change bytes of sealed slots, with the holder stopped meanwhile, so that no slot is used again by then."""
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
        """Change a byte of some manifests on one host."""
        host = self.expendable(rng, planned)
        if host:
            count = sum(_flip(rng, path) for path in _files(self.hosts.arena(host) / "manifests"))
            if count:
                self.ledger.harmed(self.hosts.domain[host], "rot-file", time.monotonic())
                self.story.fault("rot_manifest", f"{host}: {count} manifests")

    def rot_journal(self, rng: random.Random, planned: Planned) -> None:
        """Change a byte of a journal."""
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
