"""The catalogue of all drills: what each one breaks, what it touches, what is promised.

To add a drill, add an entry here and a scene: a class with the same `name` in the `scenes_*.py` of its family.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memstore.config import MIB, Config
from memstore.errors import ConfigError

# -- promises -----------------------------------------------------------------------------------------
# The definition of a drill and of its promise. Plain values: to list drills needs neither Ray nor torch.
#
# Read `catalogue.py` next: it has an entry for every drill.


REFUSED = "refused"  # the drills' own verdict: get() raised RecoveryError on every rank

# The places where a drill can be played.
EMBEDDED, RUNNING, TIGHT, APART, KEPT_HEAD = "embedded", "running", "tight", "apart", "kept-head"
NAMESPACES, RAY_NAMESPACES = "namespaces", "ray-namespaces"
PLACES = {
    EMBEDDED: "a cluster of its own, on this machine",
    RUNNING: "your running cluster, with a scratch job",
    NAMESPACES: "hosts in network namespaces, without Ray, which needs root",
    RAY_NAMESPACES: "raylets in network namespaces, which needs root",
    TIGHT: "a cluster of its own with little memory, which needs root",
    APART: "a cluster of its own, each host in another rack, with two hosts more than ranks",
    KEPT_HEAD: "a cluster of its own, whose head keeps Ray's tables on disk, which needs Ray 2.60",
}

# A process can be part of one Ray cluster at a time; so a suite opens only one of these at a time.
ON_RAY = frozenset({EMBEDDED, RUNNING, RAY_NAMESPACES, TIGHT, APART, KEPT_HEAD})

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


# -- catalogue ----------------------------------------------------------------------------------------


ANYWHERE = frozenset({"local", "peer", "mixed"})
GOES_ON_WELL = "no put raises, every stall within its budget"
COPIES_AGAIN = f"{GOES_ON_WELL}, commits go on and copies are complete again"
CONTROLLER = "the controller, which Ray restarts: commits of every job of the store stop for some seconds"
ALL_OF_RAY = "all of Ray; the hosts' memory stays"
OWN_DIRECTORY = "a directory of the drill's own"
OWN_NETWORK = "hosts of the drill's own, in network namespaces"
ERROR_SHOWN = f"{GOES_ON_WELL}, commits go on meanwhile, the status names the error, a durable step follows once"
OWN: dict[str, Any] = {"runs_on": (EMBEDDED,), "is_standard": False}
OWN_RANKS = "processes of the drill's own"
SAME_TRAINING = "every loss equals a training without a fault, bit for bit, and each sample is committed once"
OTHERS_STAY = f"0 steps lost, the other ranks keep their processes, {SAME_TRAINING}"
AND_THE_MEMORY = "as well the memory of every host with a copy of its shard"
NO_ZOMBIES = Promise(f"{OTHERS_STAY}; the zombies take part in nothing", ANYWHERE)
REPLACED: dict[str, Any] = {
    "promise": Promise(OTHERS_STAY, ANYWHERE),
    "flow": IN_PLACE,
    "runs_on": (EMBEDDED,),
    "is_standard": False,
}
ON_NETWORK: dict[str, Any] = {"flow": GOES_ON, "runs_on": (NAMESPACES,), "beyond_runs_on": (NAMESPACES,)}


def from_peer(words: str) -> Promise:
    """Return the promise of a drill that loses memory: bytes must come from a peer."""
    return Promise(f"0 steps lost, from {words}", frozenset({"peer", "mixed"}), needs="peer")


def meanwhile(words: str) -> Promise:
    """Return the promise of a drill during whose fault steps must be committed."""
    return Promise(words, has_commits_meanwhile=True)


_DRILLS = (
    Drill(
        "kill-rank", "ranks",
        "one rank, with SIGKILL in the middle of its puts",
        "one process of the drill's own", LOCAL_ONLY,
        "a rank, and the memory of every host with a copy of its shard",
    ),
    Drill(
        "kill-rank-mid-put", "ranks",
        "one rank, with SIGKILL while a put of its is under way",
        "one process of the drill's own", LOCAL_ONLY, is_standard=False,
    ),
    Drill(
        "hang-rank", "ranks",
        "one rank stops in the middle of its puts (SIGSTOP) until its launcher gives it up and kills it",
        "one process of the drill's own", LOCAL_ONLY,
    ),
    Drill(
        "kill-holder", "holders",
        "the process that owns one host's arena; the arena stays",
        "one holder, which the store replaces: puts on its host wait or skip for some seconds", LOCAL_ONLY,
        "the holder with its arena, and the memory of every host with a copy of the same shard", needs_victim=True,
    ),
    Drill(
        "freeze-holder", "holders",
        "the process that owns one host's arena stops for some seconds (SIGSTOP) and goes on, while all ranks put",
        "one holder: puts on its host wait or skip while it is frozen", Promise(COPIES_AGAIN),
        flow=GOES_ON, needs_victim=True,
    ),
    Drill(
        "kill-host", "hosts",
        "every process of one host, and its memory",
        "one host: on a running cluster only its holder, its arena of this store and the drill's own ranks",
        from_peer("peer RAM, durable untouched"),
        "that host and every other host with a copy of its ranks' shards", needs_victim=True,
    ),
    Drill(
        "preempt-host", "hosts",
        "one host, with its memory, some time after notice was given; its ranks go on putting until then",
        "one host",
        Promise("every shard it held is on enough other hosts before the moment; 0 steps lost, durable untouched",
                ANYWHERE),
        runs_on=(EMBEDDED,),
    ),
    Drill(
        "kill-rack", "hosts",
        "every process of every host of one rack at once, and their memory",
        "the hosts of one rack", from_peer("peer RAM of another rack, durable untouched"),
        "the rack and every other host with a copy of one of its shards", **OWN,
    ),
    Drill(
        "kill-rack-staggered", "hosts",
        "the hosts of one rack one after the other, each while the copies of the last are missing",
        "the hosts of one rack", from_peer("peer RAM of another rack, durable untouched"), **OWN,
    ),
    Drill(
        "second-failure", "hosts",
        "one host, and a second one with a copy of the same shard during the restore, with three copies",
        "two hosts", from_peer("the third copy in peer RAM, durable untouched"),
        "the third host with a copy as well", **OWN,
    ),
    Drill(
        "lose-host-parity", "hosts",
        "one host, with its memory, of a job that keeps parity in place of copies",
        "one host", from_peer("chunks that its peers decode from their parity, durable untouched"),
        "that host and another one of its parity set",
        runs_on=(APART,), beyond_runs_on=(APART,), is_standard=False,
    ),
    Drill(
        "lose-two-hosts-parity", "hosts",
        "two hosts, with their memory, of a job that keeps parity in place of three copies",
        "two hosts", from_peer("chunks that its peers decode from two rows, durable untouched"),
        "those hosts and a third one of their parity set",
        runs_on=(APART,), beyond_runs_on=(APART,), is_standard=False,
    ),
    Drill(
        "kill-raylet", "hosts",
        "the raylet of one host, with it its holder and its ranks; the memory stays and Ray is started again",
        "every process of one host", LOCAL_ONLY, **OWN,
    ),
    Drill(
        "freeze-raylet", "hosts",
        "every process of one host stops until it counts as dead and training has gone on, then wakes (a zombie)",
        "one host", from_peer("peer RAM; the zombie ends, serves nothing stale, and its host takes part again"), **OWN,
    ),
    Drill(
        "flap-host", "hosts",
        "one host's holder dies and comes back three times, while all ranks put",
        "one holder, and its host is on probation for ten minutes",
        meanwhile(f"{GOES_ON_WELL}, commits go on, the host is on probation"), flow=GOES_ON, **OWN,
    ),
    Drill(
        "memory-pressure", "hosts",
        "a task of another job on one host takes memory until Ray's memory monitor kills it, while all ranks put",
        "a task of the drill's own, which takes 1.5 to 4 GiB of this machine",
        meanwhile(f"the holder and its arena stay, {GOES_ON_WELL}, commits go on"),
        flow=GOES_ON, runs_on=(TIGHT,), is_standard=False,
    ),
    Drill(
        "kill-controller", "control plane",
        "the process that decides commits, while ranks put", CONTROLLER, LOCAL_ONLY,
        "the controller, and the memory of every host with a copy of one shard",
    ),
    Drill(
        "kill-controller-restore", "control plane",
        "one rank, and the controller while the ranks of the next attempt wait in get()", CONTROLLER, LOCAL_ONLY,
        is_standard=False,
    ),
    Drill(
        "kill-controller-persist", "control plane",
        "the controller while a durable step is half written, and all ranks put", CONTROLLER,
        Promise(f"{GOES_ON_WELL}, commits resume, a newer durable step follows"),
        flow=GOES_ON, needs_durable=True, is_standard=False,
    ),
    Drill(
        "head-node", "control plane",
        "every process of Ray's head, for good: every raylet ends for want of it, then Ray is started again",
        ALL_OF_RAY, LOCAL_ONLY, **OWN,
    ),
    Drill(
        "lose-head", "control plane",
        "every process of Ray's head, which keeps its tables on disk and is started again, while all ranks put",
        "Ray's head; the hosts' memory stays",
        meanwhile(f"the others' raylets, holders and ranks live on, commits too, {COPIES_AGAIN} once the head is back"),
        flow=GOES_ON, runs_on=(KEPT_HEAD,), is_standard=False,
    ),
    Drill(
        "restart-ray", "control plane",
        "every process of Ray and of the store on every host at once; Ray is started again, one host late",
        ALL_OF_RAY, Promise("0 steps lost, from RAM that new holders adopt, durable untouched", ANYWHERE),
        runs_on=(EMBEDDED,),
    ),
    Drill(
        "corrupt-chunk", "storage",
        "bytes of one chunk in one copy, in the arena file",
        "one chunk of the drill's own job",
        Promise("found by verify, never served, repaired from a peer, 0 steps lost", ANYWHERE),
        "the same chunk in every copy", beyond_runs_on=(EMBEDDED, RUNNING),
    ),
    Drill(
        "torn-manifest", "storage",
        "the manifest file of one copy is cut short, and its holder killed so that it is read again",
        "one manifest of the drill's own job, and one holder, which the store replaces",
        Promise("the torn copy is dropped, never served, repaired from a peer; 0 steps lost", ANYWHERE),
        "the manifest of every copy of the same shard", needs_victim=True,
    ),
    Drill(
        "arena-full", "storage",
        "a second job wants more room than an arena has, while all ranks put",
        "two processes of the drill's own",
        meanwhile("CapacityError at the second job's first put, on all its ranks; the first job's puts and commits go "
                  "on"),
        flow=GOES_ON, runs_on=(EMBEDDED,),
    ),
    Drill(
        "tmpfs-full", "storage",
        "the file system of the arenas: no page of it is left, for manifest or journal, while all ranks put",
        "a file system of the drill's own, for the arenas of its own hosts",
        Promise(f"{GOES_ON_WELL}, nothing stored is lost, steps are committed all the while: holders keep pages for "
                "manifests and journal in reserve"),
        flow=GOES_ON, needs_root=True, runs_on=(TIGHT,), is_standard=False,
    ),
    Drill(
        "durable-error", "storage",
        "the durable directory of the scratch job: every write to it fails until it is fixed, while all ranks put",
        OWN_DIRECTORY, meanwhile(f"{ERROR_SHOWN} it is fixed"), flow=GOES_ON, needs_durable=True,
    ),
    Drill(
        "durable-full", "storage",
        "the durable directory of the scratch job: a full file system in its place until it is taken away",
        f"{OWN_DIRECTORY}, on the machine that the hosts share", meanwhile(f"{ERROR_SHOWN} there is room"),
        flow=GOES_ON, needs_durable=True, needs_root=True, **OWN,
    ),
    Drill(
        "durable-slow", "storage",
        "the durable directory of the scratch job: every write to it waits a second or more, while all ranks put",
        f"{OWN_DIRECTORY}, on the machine that the hosts share",
        meanwhile(f"{GOES_ON_WELL}, commits go on meanwhile, a newer durable step follows once it is fast again"),
        flow=GOES_ON, needs_durable=True, needs_root=True, **OWN,
    ),
    Drill(
        "durable-torn", "storage",
        "one part of the newest durable step is cut short, and every copy of that shard in RAM is lost",
        f"{OWN_DIRECTORY}, and every host with a copy of one shard",
        Promise("an older durable step, whole and the same on every rank; the torn one never",
                frozenset({"durable", "mixed"}), frozenset({"local", "peer", "durable"}), "durable", is_lossless=False),
        needs_durable=True, **OWN,
    ),
    Drill(
        "partition-half", "network",
        "the network splits in halves, the controller on the side that cannot reach what elects controllers",
        OWN_NETWORK,
        Promise("that side commits nothing, the other elects a controller and commits; healed, no step was committed "
                "twice with other bytes, commits go on and copies are complete again"),
        "every copy of a shard is on the side that stays cut off", **ON_NETWORK,
    ),
    Drill(
        "partition-one-way", "network",
        "packets from one host to the host with its copies vanish, the other way they arrive; both reach the "
        "controller",
        OWN_NETWORK, Promise(f"{GOES_ON_WELL}, no host is taken for dead, commits go on once healed"),
        is_standard=False, **ON_NETWORK,
    ),
    Drill(
        "slow-link", "network",
        "one host's link has 10 Mbit/s while all ranks put",
        OWN_NETWORK, meanwhile(f"{GOES_ON_WELL}, a step put over the slow link is committed within 60 s"),
        is_standard=False, **ON_NETWORK,
    ),
    Drill(
        "swizzle-clog", "network",
        "links of a random part of the hosts are cut one by one, and come back in another order",
        OWN_NETWORK, Promise(COPIES_AGAIN), is_standard=False, **ON_NETWORK,
    ),
    Drill(
        "flip-in-transit", "network",
        "bits of chunks flip between a host and the host with its copies",
        OWN_NETWORK,
        meanwhile("every damaged chunk is counted and sent again, none is stored, commits go on meanwhile"),
        **ON_NETWORK,
    ),
    Drill(
        "cable-pulled", "network",
        "the link of one host goes down while a shard of its rank is half across",
        OWN_NETWORK, Promise(COPIES_AGAIN), **ON_NETWORK,
    ),
    Drill(
        "in-place-kill-rank", "in place", "one rank, with SIGKILL while all train", OWN_RANKS, beyond=AND_THE_MEMORY,
        **REPLACED,
    ),
    Drill(
        "in-place-kill-host", "in place", "every process of one host with its ranks, and its memory", "one host",
        beyond="that host and every other host with a copy of its ranks' shards", **REPLACED,
    ),
    Drill(
        "in-place-freeze-rank", "in place", "one rank stops (SIGSTOP) until its watchdog kills it", OWN_RANKS,
        beyond=AND_THE_MEMORY, **REPLACED,
    ),
    Drill(
        "in-place-pause", "in place",
        "one rank stops for 2 s (SIGSTOP, SIGCONT), less than its watchdog allows; in-place-freeze-rank is beyond that",
        OWN_RANKS,
        **{**REPLACED, "promise": Promise(f"no rank is taken for lost, all keep their processes, {SAME_TRAINING}")},
    ),
    Drill(
        "in-place-kill-spare", "in place", "a spare, with SIGKILL, and then a rank, which needs a new process",
        OWN_RANKS, beyond=AND_THE_MEMORY, **REPLACED,
    ),
    Drill(
        "in-place-kill-replacement", "in place",
        "one rank, and its replacement while the other ranks wait for that in get()", OWN_RANKS,
        beyond=AND_THE_MEMORY, **REPLACED,
    ),
    Drill(
        "in-place-kill-two-hosts", "in place", "two hosts with a copy of the same shard at once, with three copies",
        "two hosts", beyond="the third host with a copy as well", **REPLACED,
    ),
    Drill(
        "in-place-kill-controller", "in place",
        "one rank, and the controller while the other ranks wait for the replacement in get()", CONTROLLER,
        beyond=AND_THE_MEMORY, **REPLACED,
    ),
    Drill(
        "in-place-freeze-host", "in place",
        "every process of one host with its ranks stops (SIGSTOP) until others train in its place, then wakes",
        "one host", beyond=AND_THE_MEMORY,
        **{**REPLACED, "promise": NO_ZOMBIES},
    ),
    Drill(
        "in-place-cut-link", "in place",
        "the link of one host with its ranks: no packet goes in or out until others train in its place",
        OWN_NETWORK, beyond=AND_THE_MEMORY,
        **{**REPLACED, "promise": NO_ZOMBIES, "runs_on": (RAY_NAMESPACES,), "beyond_runs_on": (RAY_NAMESPACES,)},
    ),
)  # fmt: skip
DRILLS = {drill.name: drill for drill in _DRILLS}


def find(name: str) -> Drill:
    """Return a drill by its name; if no drill has it, raise a ConfigError that lists all names."""
    if name not in DRILLS:
        raise ConfigError(f"there is no drill {name!r}: use one of {', '.join(DRILLS)}", field="drill", value=name)
    return DRILLS[name]


def suites_of(drill: Drill) -> list[str]:
    """Return the suites that have a drill."""
    return [*(["standard"] if drill.is_standard else []), "full", *([IN_PLACE] if drill.flow == IN_PLACE else [])]


def rows() -> list[dict[str, Any]]:
    """Return the rows that `drill list --json` prints."""
    return [
        {
            "drill": d.name,
            "family": d.family,
            "breaks": d.breaks,
            "touches": d.touches,
            "promised": d.promise.words,
            "beyond": d.beyond,
            "ranks": AFTERWARDS[d.flow],
            "runs_on": list(d.runs_on),
            "beyond_runs_on": list(d.beyond_runs_on) if d.beyond else [],
            "needs_victim": d.needs_victim,
            "needs_root": d.needs_root,
            "suites": suites_of(d),
        }
        for d in DRILLS.values()
    ]


# -- options ------------------------------------------------------------------------------------------
# The options of one drill, and the command that plays it again.


DURABLE_EVERY = (
    1_000_000_000  # in steps; so only the first committed step becomes durable, and a durable restore is an older step
)


@dataclass(frozen=True)
class Options:
    """The choices of a person for one drill. Sizes are per rank and step."""

    seed: int = 0
    is_beyond: bool = False
    ranks_count: int = 4
    nbytes: int = 8 * MIB
    config: Config = field(default_factory=Config)  # its job fields are used for the scratch job
    victim: str | None = None
    allows_data_loss: bool = False
    is_altered: bool = False  # for tests: flip one restored bit, so that the comparison fails


def replay(name: str, options: Options, *, store: str | None, durable: str | None) -> str:
    """Return the command that plays the same drill again.

    Args:
        store: Name of the running store; None for an embedded cluster.
        durable: The directory that the person named; None if there was none or the drill made one.
    """
    usual = Options()
    words = ["memstore drill", name, f"--seed {options.seed}"]
    words += ["--embedded"] if store is None else []
    words += ["--beyond"] if options.is_beyond else []
    values = (
        ("hosts", options.ranks_count, usual.ranks_count),
        ("replicas", options.config.replicas, usual.config.replicas),
        ("mbytes", options.nbytes // MIB, usual.nbytes // MIB),
        ("durable", durable, None),
        ("victim", options.victim, None),
        ("store", store, None if store is None else Config.store),
    )
    return " ".join([*words, *(f"--{key} {value}" for key, value, default in values if value != default)])
