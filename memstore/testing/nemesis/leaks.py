"""Leaks that a round must not have: processes, descriptors, leased slots, temporary files, bytes in shared memory."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from memstore.core.arena.slot_table import SlotState
from memstore.testing.faults.arena_files import slot_records
from memstore.testing.faults.processes import process_state
from memstore.testing.nemesis.hosts import Hosts
from memstore.testing.nemesis.ledger import Story

RUN_VARIABLE = "NEMESIS_RUN"  # environment variable of every process of a run
FDS_MAX = 100  # descriptors of a holder or controller at rest; 12 to 17 were measured for small stores
RANK_FDS_GROWTH_MAX = 16
THREADS_GROWTH_MAX = 12
TEMPORARY_S = 20.0
RECLAIMED_S = 20.0


def check_processes_at_rest(hosts: Hosts, story: Story) -> None:
    """Check that holders and controller have few descriptors open, and that outranked controllers have ended."""
    found = {"the controller": hosts.controller(), **{f"holder {host}": hosts.holder(host) for host in hosts}}
    for name, process in found.items():
        with contextlib.suppress(OSError):
            count = len(os.listdir(f"/proc/{process[0]}/fd")) if process is not None else 0
            if count > FDS_MAX:
                story.violate("leak", f"{name} holds {count} descriptors, more than {FDS_MAX}")
    deadline_s = time.monotonic() + RECLAIMED_S
    while hosts.outranked() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    for old in hosts.outranked():
        name, state = hosts.former.get(old.pid, "process"), process_state(old.pid)
        story.violate("leak", f"the {name} that was replaced (pid {old.pid}, state {state}) still runs")


def check_rank_growth(first: list[dict[str, int]], last: list[dict[str, int]], story: Story) -> None:
    """Check that a rank has no more descriptors or threads after many reconnections and puts."""
    for rank, (then, now) in enumerate(zip(first, last, strict=False)):
        for what, most in (("fds", RANK_FDS_GROWTH_MAX), ("threads", THREADS_GROWTH_MAX)):
            if now[what] > then[what] + most:
                story.violate("leak", f"rank {rank} went from {then[what]} to {now[what]} {what}")


def check_folders(hosts: Hosts, story: Story) -> None:
    """Check that no slot is leased and no temporary file is old while no rank is alive."""
    deadline_s = time.monotonic() + RECLAIMED_S
    while (found := leased(hosts)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    for host, count in found.items():
        story.violate("leak", f"{count} slots of {host} are leased {RECLAIMED_S:g} s after the last rank died")
    for host in hosts:
        for path in hosts.arena(host).rglob(".*"):
            with contextlib.suppress(OSError):
                age_s = time.clock_gettime(time.CLOCK_REALTIME) - path.stat().st_mtime
                if TEMPORARY_S < age_s < 3600.0:
                    story.violate("leak", f"{host}: {path.name} is {age_s:.0f} s old")


def leased(hosts: Hosts) -> dict[str, int]:
    """Return how many slots of each host are leased, as its header table says."""
    counts = {}
    for host in hosts:
        with contextlib.suppress(OSError, ValueError):
            count = int((slot_records(hosts.arena(host))["state"] == SlotState.LEASED).sum())
            if count:
                counts[host] = count
    return counts


def check_gone(run: str, known: set[int], arena_dir: Path, story: Story) -> None:
    """Check that nothing of the round is left when all is over."""
    deadline_s = time.monotonic() + RECLAIMED_S
    while processes(run) - known and time.monotonic() < deadline_s:
        time.sleep(0.2)
    for pid in sorted(processes(run) - known):
        story.violate("leak", f"process {pid} is left: {_command(pid)}")
    left = sorted(str(path.relative_to(arena_dir)) for path in arena_dir.rglob("*") if path.is_file())
    if left:
        story.violate("leak", f"files are left in shared memory: {', '.join(left[:10])}")


def processes(run: str) -> set[int]:
    """Return the processes of a run that live now."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                is_ours = f"{RUN_VARIABLE}={run}".encode() in (entry / "environ").read_bytes().split(b"\0")
                if is_ours and (process_state(int(entry.name)) or "X") not in "ZX":
                    found.add(int(entry.name))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return "gone by now"
