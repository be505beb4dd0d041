"""The definition of a drill and of its promise. Plain values: to list drills needs neither Ray nor torch.

Read `catalogue.py` next: it has an entry for every drill.
"""

from __future__ import annotations

from dataclasses import dataclass

REFUSED = "refused"  # the drills' own verdict: get() raised RecoveryError on every rank

# The places where a drill can be played.
EMBEDDED, RUNNING, TIGHT = "embedded", "running", "tight"
NAMESPACES, RAY_NAMESPACES = "namespaces", "ray-namespaces"
PLACES = {
    EMBEDDED: "a cluster of its own, on this machine",
    RUNNING: "your running cluster, with a scratch job",
    NAMESPACES: "hosts in network namespaces, without Ray, which needs root",
    RAY_NAMESPACES: "raylets in network namespaces, which needs root",
    TIGHT: "a cluster of its own with little memory, which needs root",
}

# A process can be part of one Ray cluster at a time; so a suite opens only one of these at a time.
ON_RAY = frozenset({EMBEDDED, RUNNING, RAY_NAMESPACES, TIGHT})

# The flow after the fault: a launcher restarts the ranks, or they go on training, or only lost ranks are replaced.
RESTART, GOES_ON, IN_PLACE = "restart", "goes-on", "in-place"
AFTERWARDS = {
    RESTART: "the ranks are restarted",
    GOES_ON: "the ranks go on",
    IN_PLACE: "lost ranks are replaced, the others stay",
}

FAMILIES = ("ranks", "holders", "hosts", "control plane", "storage", "network", "in place")


@dataclass(frozen=True)
class Promise:
    """The outcome in which a drill must end, as text and as limits."""

    words: str
    # If the ranks are restarted, or replaced in place:
    verdicts: frozenset[str] = frozenset({"local"})  # allowed for the restore
    tiers: frozenset[str] = frozenset({"local", "peer"})  # may give bytes
    needs: str | None = None  # the tier that must give bytes
    is_lossless: bool = True  # no committed step may be lost
    # If training goes on:
    resume_s: float = 60.0  # a new step must be committed within this time after the end of the fault
    has_commits_meanwhile: bool = False  # steps must be committed while the fault is there


LOCAL_ONLY = Promise(
    "0 steps lost, every rank from its own host's RAM, 0 bytes from peers", frozenset({"local"}), frozenset({"local"})
)
BEYOND_REFUSED = Promise(
    "a refusal that names ranks and hosts, on every rank alike", frozenset({REFUSED}), frozenset(), is_lossless=False
)
BEYOND_DURABLE = Promise(
    "the durable step, older, on every rank alike",
    frozenset({"durable", "mixed"}),
    frozenset({"local", "peer", "durable"}),
    "durable",
    is_lossless=False,
)


@dataclass(frozen=True)
class Drill:
    """One entry of the catalogue; the scene of the same name plays it."""

    name: str
    family: str
    breaks: str
    touches: str  # the blast radius
    promise: Promise
    beyond: str | None = None  # what the play beyond the tolerance loses; None if no such play makes sense
    flow: str = RESTART
    runs_on: tuple[str, ...] = (EMBEDDED, RUNNING)
    beyond_runs_on: tuple[str, ...] = (EMBEDDED,)  # a cluster in use must not lose several memories for an experiment
    needs_victim: bool = (
        False  # the fault hits more than the drill's own processes; so on a running cluster --victim must name the host
    )
    needs_durable: bool = (
        False  # the scratch job has a durable tier; on the drill's own cluster a directory is made if none is named
    )
    needs_root: bool = False  # it mounts a file system
    is_standard: bool = True  # in the standard suite; the full suite has every drill


def promised(drill: Drill, *, is_beyond: bool, has_durable: bool) -> Promise:
    """Return the promise for a run of a drill, or for a run of its play beyond the tolerance."""
    if not is_beyond:
        return drill.promise
    return BEYOND_DURABLE if has_durable else BEYOND_REFUSED
