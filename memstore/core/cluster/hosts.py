"""Decides which hosts are live, suspect or dead, by what arrived from them and when (R28). Pure.

    (unknown) --HostUp--> live --silence > suspect_after_s--> suspect --silence > dead_after_s--> dead
                           ^  <--------- beats again ---------'                                      |
                           '------------------------------- HostUp ----------------------------------'
    any --HostLost (reset connection, Ray's notice)--> dead

Suspicion only redirects new work and is free to undo; only death starts repair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from memstore.core.wire.messages import HostBeat, HostInfo
from memstore.core.wire.status_rows import HostStats
from placement.topology import Host, Topology, domains_of_hosts

# Up to this much of the time between two ticks always counts as listened: two controller ticks, even if
# `suspect_after_s` is tiny.
LISTENED_S_MIN = 0.2

Status = Literal["live", "suspect", "dead"]


@dataclass(slots=True)
class HostState:
    """One host as the controller sees it."""

    info: HostInfo
    last_beat_s: float  # when its last beat arrived
    was_with_us_s: float  # the latest time, on our clock, at which it certainly obeyed this controller (R17)
    began_s: float = 0.0  # when its holder started
    idle_s: float = 0.0  # for how long none had run there before, unless it was used since (R5)
    beat_at_s: float = 0.0  # when that beat arrived, on the clock of `HostTable.listened_s`
    status: Status = "live"
    why: str = ""
    since_s: float = 0.0  # when `status` was last entered
    stats: HostStats | None = None
    is_gone: bool = False  # dead for certain: its connection ended within our lease; silence may be a partition (R17)
    deaths_s: list[float] = field(default_factory=list)  # when it died, for probation (R29)
    suspected_s: list[float] = field(default_factory=list)  # when it was silent for a while (R41)


@dataclass(frozen=True, slots=True)
class Change:
    """One host changed its status."""

    host_id: str
    status: Status
    why: str
    is_move: bool = True  # it came, came back, or went; False: only suspected, or no longer suspected


class HostTable:
    """Hosts by id. Every method that can change a status returns the changes."""

    def __init__(self, *, suspect_after_s: float, dead_after_s: float, failure_domains: Iterable[str]) -> None:
        self.suspect_after_s = suspect_after_s
        self.dead_after_s = dead_after_s
        self.failure_domains = tuple(failure_domains)
        self.listened_s = 0.0  # how long heartbeats could be received, up to the last tick: see `tick`
        self._ticked_s: float | None = None
        self.states: dict[str, HostState] = {}
        self._places: dict[str, Host] = {}
        self.changes_count = 0  # of hosts and their status
        self._live_domains: dict[str, dict[str, str]] = {}  # by level; made again when a host comes or goes
        self.joined: dict[str, Mapping[str, str]] = {}  # every host ever seen, with its labels (facts)

    def later_life(self, info: HostInfo) -> HostInfo | None:
        """Return the later life of the host that is known; None if this one may come (R3)."""
        state = self.states.get(info.host_id)
        return state.info if state is not None and info.incarnation < state.info.incarnation else None

    def up(
        self, now: float, info: HostInfo, asked_s: float = -math.inf, up_s: float = 0.0, idle_s: float = 0.0
    ) -> list[Change]:
        """Take a session that was asked for at `asked_s`, with a holder that has been up for `up_s` (R3).

        Args:
            idle_s: For how long no holder had run there before this one.
        """
        state = self.states.get(info.host_id)
        self._changed()
        self._places[info.host_id] = Host(info.host_id, dict(info.labels), info.machine, info.is_explicit)
        if state is None:
            self.states[info.host_id] = HostState(
                info, now, asked_s, now - up_s, idle_s, self._listened_at(now), since_s=now
            )
            return [Change(info.host_id, "live", "joined")]
        state.info, state.last_beat_s, state.began_s, state.is_gone = info, now, now - up_s, False
        state.was_with_us_s, state.idle_s = max(state.was_with_us_s, asked_s), idle_s
        state.beat_at_s = self._listened_at(now)
        return self._enter(now, state, "live", "joined again", is_new=True)

    def heartbeat(self, now: float, beat: HostBeat) -> list[Change]:
        """Take a heartbeat: it clears suspicion, but a dead host needs a new session to be live again."""
        state = self.states.get(beat.host_id)
        if state is None or state.status == "dead":
            return []
        state.last_beat_s, state.beat_at_s, state.stats = now, self._listened_at(now), beat.stats
        if state.was_with_us_s < beat.clock_s <= now:
            state.was_with_us_s = beat.clock_s
        return self._enter(now, state, "live", "heartbeat again") if state.status == "suspect" else []

    def lost(self, now: float, host_id: str, why: str, *, is_certain: bool = True) -> list[Change]:
        """Take the end of a holder's connection: the host is dead.

        Args:
            is_certain: This controller has its lease. Without the lease the host may have closed this connection only
                because a newer controller took over.
        """
        state = self.states.get(host_id)
        if state is None or state.status == "dead":
            return []
        state.is_gone = is_certain
        return self._enter(now, state, "dead", why)

    def tick(self, now: float) -> list[Change]:
        """Turn silent hosts from live into suspect, and from suspect into dead.

        If a tick comes late, because the process was busy or stopped, beats lie unread. So silence counts only while
        the controller listened: of the time between two ticks at most a third of `suspect_after_s`, or LISTENED_S_MIN
        where that is more.
        """
        self.listened_s, self._ticked_s = self._listened_at(now), now
        changes: list[Change] = []
        for state in self.states.values():
            silent_s = self.listened_s - state.beat_at_s
            if state.status == "live" and silent_s > self.suspect_after_s:
                changes += self._enter(now, state, "suspect", f"no heartbeat for {silent_s:.1f} s")
            elif state.status == "suspect" and silent_s > self.dead_after_s:
                changes += self._enter(now, state, "dead", f"no heartbeat for {silent_s:.1f} s")
        return changes

    def _listened_at(self, moment_s: float) -> float:
        """Return the clock of silence at a moment since the last tick."""
        since_s = moment_s - self._ticked_s if self._ticked_s is not None else 0.0
        return self.listened_s + min(max(0.0, since_s), max(self.suspect_after_s / 3, LISTENED_S_MIN))

    def dead_since(self, moment_s: float) -> set[str]:
        """Return the hosts that died after that moment and are not back."""
        return {host for host, state in self.states.items() if state.status == "dead" and state.since_s > moment_s}

    def _enter(self, now: float, state: HostState, status: Status, why: str, *, is_new: bool = False) -> list[Change]:
        if status == "dead":
            state.deaths_s = [*state.deaths_s[-9:], now]
        elif status == "suspect":
            state.suspected_s = [*state.suspected_s[-9:], now]
        self._changed()
        is_flap = status == "suspect" or (status == "live" and state.status == "suspect" and not is_new)
        state.status, state.why, state.since_s = status, why, now
        return [Change(state.info.host_id, status, why, is_move=not is_flap)]

    def _changed(self) -> None:
        self.changes_count += 1
        self._live_domains.clear()

    def is_live(self, host_id: str) -> bool:
        """True unless the host is unknown or dead; a suspect host is still counted live."""
        state = self.states.get(host_id)
        return state is not None and state.status != "dead"

    def is_answering(self, host_id: str) -> bool:
        """Return whether the host is live and not suspect: new work may go there."""
        state = self.states.get(host_id)
        return state is not None and state.status == "live"

    def may_bring_back(self, now: float, host_id: str) -> bool:
        """Return whether the host may yet come with memory: new, or dead for at most `dead_after_s` (R3, R24)."""
        state = self.states.get(host_id)
        return state is None or (state.status == "dead" and now - state.since_s <= self.dead_after_s)

    def was_with_all(self, since_s: float) -> bool:
        """Return whether every host was with us since then, including silent ones, but not those surely gone."""
        found = [s.was_with_us_s >= since_s for s in self.states.values() if not s.is_gone]
        return bool(found) and all(found)

    def live_ids(self) -> list[str]:
        """Return every host that is not dead, sorted."""
        return sorted(h for h, s in self.states.items() if s.status != "dead")

    def is_on_probation(self, now: float, host_id: str, *, window_s: float = 600.0, deaths_max: int = 3) -> bool:
        """Return whether a host died `deaths_max` times within the window: it is the last choice for a copy (R29)."""
        state = self.states.get(host_id)
        return state is not None and sum(now - t <= window_s for t in state.deaths_s) >= deaths_max

    def on_probation(self, now: float) -> set[str]:
        """Return the hosts that are on probation."""
        return {host for host, state in self.states.items() if state.deaths_s and self.is_on_probation(now, host)}

    def topology(self, host_ids: Iterable[str]) -> Topology:
        """Return the placement topology of the given known hosts."""
        return Topology.of((self._places[h] for h in host_ids if h in self._places), self.failure_domains)

    def live_domains(self, level: str) -> dict[str, str]:
        """Return the failure domain at a level of every host that is not dead (R1); not to be changed."""
        if level not in self._live_domains:
            self._live_domains[level] = domains_of_hosts((self._places[h] for h in self.live_ids()), level)
        return self._live_domains[level]

    def domains(self, host_ids: Iterable[str]) -> set[str]:
        """Return the distinct host-level failure domains of the given known hosts (R1)."""
        return {self._places[h].domain("host") for h in host_ids if h in self._places}

    def live_domains_count(self, enough: int) -> int:
        """Return how many distinct domains the live hosts are in, counting no further than `enough`."""
        found: set[str] = set()
        for domain in self.live_domains("host").values():
            if len(found) >= enough:
                break
            found.add(domain)
        return len(found)
