"""What a drill is and what it may promise: plain values, so that listing them needs neither Ray nor torch.

Read `catalogue.py` next for the drills there are.
"""

from __future__ import annotations

from dataclasses import dataclass

REFUSED = "refused"  # a verdict of ours: get() raised RecoveryError on every rank

# Where a drill can be played.
EMBEDDED, RUNNING, NAMESPACES, TIGHT = "embedded", "running", "namespaces", "tight"
PLACES = {
    EMBEDDED: "a cluster of its own, on this machine",
    RUNNING: "your running cluster, with a scratch job",
    NAMESPACES: "hosts in network namespaces, which needs root",
    TIGHT: "a cluster of its own with little memory, which needs root",
}

# A process is part of one Ray cluster at a time.
ON_RAY = frozenset({EMBEDDED, RUNNING, TIGHT})

# How it goes on after the fault.
RESTART, GOES_ON = "restart", "goes-on"

FAMILIES = ("ranks", "holders", "hosts", "control plane", "storage", "network")


@dataclass(frozen=True)
class Promise:
    """The outcome a drill must end in.

    `verdicts`, `tiers`, `needs` and `is_lossless` are of a drill that restarts its ranks: the restore's allowed
    verdicts, the tiers whose bytes may be above zero, the one whose bytes must be. `resume_s` and
    `has_commits_meanwhile` are of one whose training goes on.
    """

    words: str
    verdicts: frozenset[str] = frozenset({"local"})
    tiers: frozenset[str] = frozenset({"local", "peer"})
    needs: str | None = None
    is_lossless: bool = True
    resume_s: float = 60.0  # a new step is committed within this after the fault ended
    has_commits_meanwhile: bool = False  # steps are committed while the fault is there


LOCAL_ONLY = Promise(
    "0 steps lost, every rank from its own host's RAM, 0 bytes from peers", frozenset({"local"}), frozenset({"local"})
)
BEYOND_REFUSED = Promise(
    "a refusal that names ranks and hosts, on every rank alike", frozenset({REFUSED}), frozenset(), is_lossless=False
)
BEYOND_DURABLE = Promise(
    "the durable step, older, on every rank alike",
    frozenset({"durable", "mixed"}), frozenset({"local", "peer", "durable"}), "durable", is_lossless=False,
)  # fmt: skip


@dataclass(frozen=True)
class Drill:
    """One entry of `memstore drill list`; the scene of the same name plays it."""

    name: str
    family: str
    breaks: str
    touches: str  # blast radius
    promise: Promise
    beyond: str | None = None  # what the must-fail twin loses; None: there is none that makes sense
    flow: str = RESTART
    runs_on: tuple[str, ...] = (EMBEDDED, RUNNING)
    beyond_runs_on: tuple[str, ...] = (EMBEDDED,)  # losing several memories is no experiment for a cluster in use
    needs_victim: bool = False  # on a running cluster --victim must name the host: what is hit is not the drill's own
    needs_durable: bool = False  # the scratch job has a durable tier; one is made for it where none is named
    needs_root: bool = False  # it mounts a file system of its own
    is_standard: bool = True  # in the standard suite; every drill is in the full one


def promised(drill: Drill, *, is_beyond: bool, has_durable: bool) -> Promise:
    """Return what a run must end in."""
    if not is_beyond:
        return drill.promise
    return BEYOND_DURABLE if has_durable else BEYOND_REFUSED
