"""Faults of files that are removed, cut short or rotten, under holders that are down or live; and the class of all."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import replace

from memstore.errors import DrillError
from memstore.testing.faults.arena_files import (
    flip_in_slot,
    flip_somewhere,
    manifest_files,
    remove,
    sealed_slots,
    slot_records,
)
from memstore.testing.faults.catalogue import Fault, plays
from memstore.testing.faults.processes import freeze, process_of, thaw, wait_frozen
from memstore.testing.nemesis.faults import PLAYED, FaultBase, FaultPlayer, LinkFaults, ProcessFaults, on

LIVE_FILES = (("arena", "slots", "manifests", "journal"), ("manifests",), ("journal",), ("slots",), ("arena",), ("*",))
STOPPED_S = 2.0


class FileFaults(FaultBase):
    """The faults of files."""

    @plays("replace-arena", PLAYED)
    def replace_arena(self, rng: random.Random, fault: Fault) -> Iterator[str]:
        """Kill a holder under living ranks, remove a file of its folder or all of it, start a new one."""
        on_ranks = sorted({h for h in self.job.place if self.hosts.holder(h) is not None} - self.hosts.stopped.keys())
        wanted = on_ranks[fault.hosts[0] % len(on_ranks)] if on_ranks else ""
        host = self.expendable(replace(fault, hosts=(list(self.hosts).index(wanted),))) if wanted else ""
        if host:
            name = "*" if fault.count == 1 else rng.choice(("arena", "arena", "slots", "manifests", "journal"))
            self.hosts.kill_holder(host)
            self.harmed(host, "lost")
            remove(self.hosts.arena(host), (name,))
            yield f"{host}: holder killed, {'its folder' if name == '*' else name} removed, ranks live on"
            self.start(host)

    @plays("remove-files", PLAYED)
    @on("expendable")
    def remove_files(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Remove files of a live holder's folder, as a cleaner of temporary files does."""
        names = rng.choice(LIVE_FILES)
        self.harmed(host, "lost")
        self.hosts.mark_away(host)
        remove(self.hosts.arena(host), names)
        yield f"{host}: {', '.join(names)}"

    @plays("truncate-files", PLAYED)
    @on("expendable")
    def truncate_files(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Kill a holder, cut its journal or manifests short, start a new one; files that ranks have mapped stay."""
        what, folder = rng.choice(("journal", "manifests")), self.hosts.arena(host)
        self.hosts.kill_holder(host)
        self.harmed(host, "lost")
        for path in [folder / "journal"] if what == "journal" else manifest_files(folder):
            with contextlib.suppress(OSError):
                os.truncate(path, int(path.stat().st_size * rng.choice((0.0, 0.3, 0.9))))
        yield f"{host}: {what}"
        self.start(host)

    @plays("flip-at-rest", PLAYED)
    @on("expendable")
    def flip_at_rest(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Change bytes of sealed slots, with the holder stopped meanwhile, so that no slot is used again by then."""
        folder, count = self.hosts.arena(host), 0
        with contextlib.suppress(OSError, ValueError, DrillError):
            process = self.hosts.holder(host) or process_of(0)
            freeze(process)
            try:
                wait_frozen(process, STOPPED_S)
                table = slot_records(folder)
                sealed = sealed_slots(table)
                for slot in rng.sample(sealed, min(len(sealed), rng.choice((1, 3, 20)))):
                    flip_in_slot(folder, slot, rng.randrange(int(table["nbytes"][slot])), rng.randrange(8))
                    count += 1
            finally:
                thaw(process)
        if count:
            self.harmed(host, "rot")
            yield f"{host}: {count} sealed slots"

    @plays("rot-manifest", PLAYED)
    @on("expendable")
    def rot_manifest(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Change a byte of some manifests on one host."""
        count = sum(flip_somewhere(rng, path) for path in manifest_files(self.hosts.arena(host)))
        if count:
            self.harmed(host, "rot-file")
            yield f"{host}: {count} manifests"

    @plays("rot-journal", PLAYED)
    @on("expendable")
    def rot_journal(self, rng: random.Random, fault: Fault, host: str) -> Iterator[str]:
        """Change a byte of a journal."""
        if flip_somewhere(rng, self.hosts.arena(host) / "journal"):
            self.harmed(host, "rot-file")
            yield host


class Faults(ProcessFaults, FileFaults, LinkFaults, FaultPlayer):
    """All faults of a round."""
