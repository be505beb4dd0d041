"""The catalogue of faults: every kind, in words, with how often a random scenario of each engine draws it.

There are two engines. The simulator (`memstore.testing.simulator`) plays a fault in virtual time, the nemesis
(`memstore.testing.nemesis`) on real processes, plain or as a Ray cluster. A drill is one kind that a person plays with
a promise. An engine has a function for each kind that has a weight for it here; 0: only written scenarios have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Fault:
    """One fault of a scenario: when, what, on which hosts or rank, how long, how much.

    `hosts` and `rank` are taken modulo what there is when the fault is played. An engine draws what is left open from
    a random stream that these fields seed.
    """

    at_s: float
    kind: str
    hosts: tuple[int, ...] = (0,)
    rank: int = 0
    for_s: float = 1.0
    count: int = 1

    def text(self) -> str:
        """Return a line for people."""
        return (
            f"{self.at_s:6.2f} s  {self.kind:<18} hosts {list(self.hosts)} rank {self.rank} "
            f"for {self.for_s:.1f} s x{self.count}"
        )


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault, and its weights in random scenarios; None: the engine does not play it."""

    breaks: str
    simulator: int | None = None
    processes: int | None = None
    ray: int | None = None
    is_grave: bool = False  # copies go, however short it is: within the promise only while every copy is there
    drills: str = ""  # the drills that play it, with a blank between


KINDS = {
    # Ranks.
    "kill-rank": FaultKind("a rank ends (SIGKILL)", 4, 3, 3,
                      drills="kill-rank kill-rank-mid-put in-place-kill-rank in-place-kill-spare"),
    "freeze-rank": FaultKind("a rank stops for a while", 4, 2, 1,
                       drills="hang-rank in-place-freeze-rank in-place-pause"),
    "break-link": FaultKind("a rank's link to its living holder breaks, and it connects again", 0),
    "late-hello": FaultKind("a holder serves a link after its process has given it up and connected again", 0),
    "put-raises": FaultKind("puts of a rank raise before anything is copied", 0),
    "load-fails": FaultKind("a rank ends; in the next launch one cannot load what its get brings", 0),
    "differ": FaultKind("a writer of a shared shard puts other bytes than its equals", 0),
    # Ranks that are replaced in place.
    "leave-rank": FaultKind("a rank trains on after its launcher has replaced it", 0),
    "zombie-rank": FaultKind("a rank stops out of its launcher's reach, is replaced, and wakes", 0,
                        drills="in-place-freeze-host in-place-cut-link"),
    "lose-two": FaultKind("two ranks end at once", 0),
    "lose-both": FaultKind("a rank and the holder of its host end at once", 0),
    "die-in-recovery": FaultKind("processes end one after another while a rank is replaced", 0,
                            drills="in-place-kill-replacement"),
    "controller-in-recovery": FaultKind("the controller ends while a rank is replaced", 0,
                                   drills="kill-controller-restore in-place-kill-controller"),
    "holder-in-recovery": FaultKind("a holder ends or stops while a rank is replaced", 0),
    "late-launch": FaultKind("a lost rank is replaced late", 0),
    # Holders.
    "kill-holder": FaultKind("a holder ends; its successor adopts the arena", 4, 3, 3, drills="kill-holder"),
    "crash-holder-at": FaultKind("a holder ends at one of its next writes to its arena's files", 8),
    "freeze-holder": FaultKind("a holder stops for a while", 4, 3, 2, drills="freeze-holder"),
    "replace-holder": FaultKind("a holder stops, and its successor kills it", 3, 1),
    "fill-descriptors": FaultKind("a holder or the controller can open no descriptor for a while", None, 1),
    "speak-another-version": FaultKind("a holder is greeted in another version, or in none", None, 1),
    # Hosts.
    "kill-host": FaultKind("a host is lost with its memory and ranks; a blank one comes back", 6, 3, 3, is_grave=True,
                      drills="kill-host lose-host-parity lose-two-hosts-parity second-failure in-place-kill-host "
                             "in-place-kill-two-hosts"),
    "lose-host": FaultKind("a host is lost for good; another one joins, or none", 0, is_grave=True),
    "kill-rack": FaultKind("all hosts of a rack are lost at once", 2, is_grave=True, drills="kill-rack"),
    "wear-rack": FaultKind("the hosts of a rack are lost one after another", 0, is_grave=True,
                       drills="kill-rack-staggered"),
    "flap-host": FaultKind("a host dies and comes back again and again", 1, is_grave=True, drills="flap-host"),
    "preempt": FaultKind("a host is taken away some time after notice was given", 0, drills="preempt-host"),
    "add-host": FaultKind("a host joins", 1),
    "reboot-all": FaultKind("every process of the store ends at once; the memory stays", 2, 1, 1,
                       drills="restart-ray head-node"),
    "lose-everything": FaultKind("the memory of every host is lost, with all processes", None, 0, is_grave=True),
    "kill-raylet": FaultKind("a raylet ends with its processes, and is replaced over the same memory", None, None, 2,
                        drills="kill-raylet"),
    "freeze-raylet": FaultKind("every process of a host stops until it counts as dead, then wakes",
                       drills="freeze-raylet"),
    # The controller.
    "kill-controller": FaultKind("the controller ends; its successor comes later", 5, 2, 2,
                            drills="kill-controller kill-controller-persist"),
    "freeze-controller": FaultKind("the controller stops for a while", 3, 2, 2),
    "second-controller": FaultKind("another controller starts beside the first", 3, 2),
    "kv-away": FaultKind("what elects controllers does not answer", 2),
    "freeze-gcs": FaultKind("Ray's head service stops for a while", None, None, 2, drills="lose-head"),
    # Links.
    "partition": FaultKind("hosts and their peers cannot reach each other", 3, 1,
                      drills="partition-half swizzle-clog cable-pulled"),
    "one-way": FaultKind("a link loses one direction", 3, 1, drills="partition-one-way"),
    "slow-link": FaultKind("a host's link is late and slow", 2, 1, drills="slow-link"),
    "silent-peers": FaultKind("hosts and their peers wait for answers while the controller gets reports of both", 0),
    "flip-in-transit": FaultKind("bits of chunks flip on their way", 3, 1, drills="flip-in-transit"),
    "reset-in-transit": FaultKind("connections between hosts are reset", 3, 1),
    "double-reports": FaultKind("reports arrive twice", 2),
    # Memory and files.
    "flip-at-rest": FaultKind("bytes of sealed slots change", 4, 2, 1, is_grave=True, drills="corrupt-chunk"),
    "rot-manifest": FaultKind("bytes of manifests change", 0, 1, is_grave=True),
    "rot-journal": FaultKind("a byte of a journal changes", None, 1, is_grave=True),
    "truncate-files": FaultKind("journal or manifests of a dead holder are cut short", None, 1, is_grave=True,
                           drills="torn-manifest"),
    "replace-arena": FaultKind("files of a dead holder go while its ranks live", 0, 3, 1, is_grave=True),
    "remove-files": FaultKind("files of a living holder are removed", 0, 2, 1, is_grave=True),
    "arena-full": FaultKind("a job wants more room than an arena has", drills="arena-full"),
    "memory-pressure": FaultKind("another job's task takes a host's memory until Ray ends it",
                       drills="memory-pressure"),
    "memory-full": FaultKind("a host has no page left", 3, drills="tmpfs-full"),
    # Durable storage.
    "durable-broken": FaultKind("durable storage fails, hangs up or is away for a while", 2, 2,
                           drills="durable-error durable-full"),
    "durable-slow": FaultKind("durable storage is slow for a while", 1, drills="durable-slow"),
    "durable-torn": FaultKind("slices of durable steps are spoilt", 1, is_grave=True, drills="durable-torn"),
    "rotate-key": FaultKind("the key file is replaced host by host", 0),
    # Time.
    "step-clock": FaultKind("wall clocks step", 0, 2),
    "days-pass": FaultKind("days pass without a connect, then every process ends", 0),
    "lose-number": FaultKind("a holder ends and forgets the number of its life", 0),
    # People: no faults, but what they ask for meanwhile.
    "pin-step": FaultKind("a person pins a step", 0),
    "unpin-step": FaultKind("a person unpins a step", 0),
    "trust-step": FaultKind("a person trusts a step", 0),
    "lease-step": FaultKind("a reader leases the newest step for a while", 0),
    "read": FaultKind("a reader reads shards", None, 4, 3),
    "ask-cli": FaultKind("a person asks a verb of the command line", None, 1, 1),
    "end-job": FaultKind("the job ends for good", 0),
}  # fmt: skip


def weights(engine: str) -> dict[str, int]:
    """Return the kinds that random scenarios of an engine draw, with their weights."""
    return {name: weight for name, kind in KINDS.items() if (weight := getattr(kind, engine))}


def played_by(engine: str) -> set[str]:
    """Return the kinds that an engine plays."""
    return {name for name, kind in KINDS.items() if getattr(kind, engine) is not None}


def plays(name: str, table: dict[str, T]) -> Callable[[T], T]:
    """Return a decorator that enters an engine's function for a kind into its table.

    Raises:
        KeyError: the catalogue has no such kind.
    """
    KINDS[name]

    def enter(function: T) -> T:
        table[name] = function
        return function

    return enter
