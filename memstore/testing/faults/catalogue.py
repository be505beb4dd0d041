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
class Kind:
    """One kind of fault, and its weights in random scenarios; None: the engine does not play it."""

    breaks: str
    simulator: int | None = None
    processes: int | None = None
    ray: int | None = None
    is_grave: bool = False  # copies go, however short it is: within the promise only while every copy is there
    drills: str = ""  # the drills that play it, with a blank between


KINDS = {
    # Ranks.
    "kill-rank": Kind("a rank ends (SIGKILL)", 4, 3, 3,
                      drills="kill-rank kill-rank-mid-put in-place-kill-rank in-place-kill-spare"),
    "freeze-rank": Kind("a rank stops for a while", 4, 2, 1, drills="hang-rank in-place-freeze-rank in-place-pause"),
    "break-link": Kind("a rank's link to its living holder breaks, and it connects again", 0),
    "late-hello": Kind("a holder serves a link after its process has given it up and connected again", 0),
    "put-raises": Kind("puts of a rank raise before anything is copied", 0),
    "load-fails": Kind("a rank ends; in the next launch one cannot load what its get brings", 0),
    "differ": Kind("a writer of a shared shard puts other bytes than its equals", 0),
    # Ranks that are replaced in place.
    "leave-rank": Kind("a rank trains on after its launcher has replaced it", 0),
    "zombie-rank": Kind("a rank stops out of its launcher's reach, is replaced, and wakes", 0,
                        drills="in-place-freeze-host in-place-cut-link"),
    "lose-two": Kind("two ranks end at once", 0),
    "lose-both": Kind("a rank and the holder of its host end at once", 0),
    "die-in-recovery": Kind("processes end one after another while a rank is replaced", 0,
                            drills="in-place-kill-replacement"),
    "controller-in-recovery": Kind("the controller ends while a rank is replaced", 0,
                                   drills="kill-controller-restore in-place-kill-controller"),
    "holder-in-recovery": Kind("a holder ends or stops while a rank is replaced", 0),
    "late-launch": Kind("a lost rank is replaced late", 0),
    # Holders.
    "kill-holder": Kind("a holder ends; its successor adopts the arena", 4, 3, 3, drills="kill-holder"),
    "crash-holder-at": Kind("a holder ends at one of its next writes to its arena's files", 8),
    "freeze-holder": Kind("a holder stops for a while", 4, 3, 2, drills="freeze-holder"),
    "replace-holder": Kind("a holder stops, and its successor kills it", 3, 1),
    "fill-descriptors": Kind("a holder or the controller can open no descriptor for a while", None, 1),
    "speak-another-version": Kind("a holder is greeted in another version, or in none", None, 1),
    # Hosts.
    "kill-host": Kind("a host is lost with its memory and ranks; a blank one comes back", 6, 3, 3, is_grave=True,
                      drills="kill-host second-failure in-place-kill-host in-place-kill-two-hosts"),
    "kill-rack": Kind("all hosts of a rack are lost at once", 2, is_grave=True, drills="kill-rack"),
    "wear-rack": Kind("the hosts of a rack are lost one after another", 0, is_grave=True, drills="kill-rack-staggered"),
    "flap-host": Kind("a host dies and comes back again and again", 1, is_grave=True, drills="flap-host"),
    "preempt": Kind("a host is taken away some time after notice was given", 0, drills="preempt-host"),
    "add-host": Kind("a host joins", 1),
    "reboot-all": Kind("every process of the store ends at once; the memory stays", 2, 1, 1,
                       drills="restart-ray head-node"),
    "lose-everything": Kind("the memory of every host is lost, with all processes", None, 0, is_grave=True),
    "kill-raylet": Kind("a raylet ends with its processes, and is replaced over the same memory", None, None, 2,
                        drills="kill-raylet"),
    "freeze-raylet": Kind("every process of a host stops until it counts as dead, then wakes", drills="freeze-raylet"),
    # The controller.
    "kill-controller": Kind("the controller ends; its successor comes later", 5, 2, 2,
                            drills="kill-controller kill-controller-persist"),
    "freeze-controller": Kind("the controller stops for a while", 3, 2, 2),
    "second-controller": Kind("another controller starts beside the first", 3, 2),
    "kv-away": Kind("what elects controllers does not answer", 2),
    "freeze-gcs": Kind("Ray's head service stops for a while", None, None, 2),
    # Links.
    "partition": Kind("hosts and their peers cannot reach each other", 3, 1,
                      drills="partition-half swizzle-clog cable-pulled"),
    "one-way": Kind("a link loses one direction", 3, 1, drills="partition-one-way"),
    "slow-link": Kind("a host's link is late and slow", 2, 1, drills="slow-link"),
    "silent-peers": Kind("hosts and their peers wait for answers while the controller hears both", 0),
    "flip-in-transit": Kind("bits of chunks flip on their way", 3, 1, drills="flip-in-transit"),
    "reset-in-transit": Kind("connections between hosts are reset", 3, 1),
    "double-reports": Kind("reports arrive twice", 2),
    # Memory and files.
    "flip-at-rest": Kind("bytes of sealed slots change", 4, 2, 1, is_grave=True, drills="corrupt-chunk"),
    "rot-manifest": Kind("bytes of manifests change", 0, 1, is_grave=True),
    "rot-journal": Kind("a byte of a journal changes", None, 1, is_grave=True),
    "truncate-files": Kind("journal or manifests of a dead holder are cut short", None, 1, is_grave=True,
                           drills="torn-manifest"),
    "replace-arena": Kind("files of a dead holder go while its ranks live", 0, 3, 1, is_grave=True),
    "remove-files": Kind("files of a living holder are removed", 0, 2, 1, is_grave=True),
    "arena-full": Kind("a job wants more room than an arena has", drills="arena-full"),
    "memory-pressure": Kind("another job's task takes a host's memory until Ray ends it", drills="memory-pressure"),
    "memory-full": Kind("a host has no page left", 3, drills="tmpfs-full"),
    # Durable storage.
    "durable-broken": Kind("durable storage fails, hangs up or is away for a while", 2, 2,
                           drills="durable-error durable-full"),
    "durable-slow": Kind("durable storage is slow for a while", 1, drills="durable-slow"),
    "durable-torn": Kind("slices of durable steps are cut short", 1, is_grave=True, drills="durable-torn"),
    "rotate-key": Kind("the key file is replaced host by host", 0),
    # Time.
    "step-clock": Kind("wall clocks step", 0, 2),
    "days-pass": Kind("days pass without a connect, then every process ends", 0),
    "lose-number": Kind("a holder ends and forgets the number of its life", 0),
    # People: no faults, but what they ask for meanwhile.
    "pin-step": Kind("a person pins a step", 0),
    "unpin-step": Kind("a person unpins a step", 0),
    "lease-step": Kind("a reader leases the newest step for a while", 0),
    "read": Kind("a reader reads shards", None, 4, 3),
    "ask-cli": Kind("a person asks a verb of the command line", None, 1, 1),
    "end-job": Kind("the job ends for good", 0),
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
