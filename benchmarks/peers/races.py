"""The races: which contestants run in one interleaved run, what is shown of it, and what is promised.

Everything else on the machine waits while one of them moves its bytes; their processes stay, with warm memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.peers.children import PeerFailed, Team
from benchmarks.report import targets
from benchmarks.report.harness import GIB, MIB, Options, Record, Rounds, Target, Took, interleave, require
from benchmarks.rigs import rig

PUT = "memstore put"
THREAD, PROCESS = "DCP async_save, thread", "DCP async_save, process"
DLROVER = "DLRover save to memory"
LMR, NVRX = "lm-resiliency save + finalize_replication", "NVRx local save, replicated"
TORCHFT = "torchft HTTP, one stream", "torchft HTTP, 2 chunks", "torchft HTTP, 4 chunks"
HYPERPOD = "HyperPod's client, before a stand-in for its daemon"
GET, MOONCAKE, MOONCAKE_GET = "memstore get, local", "Mooncake Store put", "Mooncake Store get"
STALL, DONE = "stall", "until done"


@dataclass(frozen=True)
class Entry:
    """One contender: a contestant's way."""

    label: str
    contestant: str
    way: str = ""


@dataclass(frozen=True)
class Race:
    """What runs together.

    Args:
        entries: The contenders, memstore's first.
        ranks: Of every contestant; torchft has always two, one that sends and one that receives.
        shows: A record for each: STALL, how long training was blocked; DONE, until all ranks were through.
        promises: (record, ratio's name, the contender over it, those under it of which the quickest counts, target).
        size_share: Of the bytes asked for: what fits into memory beside the others.
        nbytes_max: A rank's state is no larger, whatever is asked for.
        saves: Of a contender in a round; their median is its value.
        fresh: Processes and store are started again for every round, and their first save is timed.
    """

    entries: list[Entry]
    shows: tuple[str, ...]
    promises: list[tuple[str, str, str, tuple[str, ...], Target | None]]
    ranks: int = 1
    size_share: float = 1.0
    nbytes_max: int = GIB
    saves: int = 1
    fresh: bool = False
    notes: list[str] = field(default_factory=list)


RACES = {
    "stall": Race(
        [Entry(PUT, "memstore", "committed"), Entry(THREAD, "torch", "dcp thread"),
         Entry(PROCESS, "torch", "dcp process"), Entry(DLROVER, "dlrover")],
        (STALL, DONE),
        [(STALL, "put / DCP async_save, the quicker", PUT, (THREAD, PROCESS), targets.STALL_DCP),
         (STALL, "put / DLRover", PUT, (DLROVER,), targets.STALL_DLROVER)],
        notes=["Until done: memstore committed with a copy on the other host; DCP's files written to shared memory, "
               "one copy; DLRover's in shared memory, one copy."],
    ),
    "small": Race(
        [Entry(PUT, "memstore", "committed"), Entry(THREAD, "torch", "dcp thread"),
         Entry(PROCESS, "torch", "dcp process")],
        (STALL, DONE),
        [(STALL, "16 MiB: put / DCP async_save, the quicker", PUT, (THREAD, PROCESS), targets.SMALL_STALL_DCP),
         (DONE, "16 MiB: put to committed / DCP async_save until done, the quicker", PUT, (THREAD, PROCESS),
          targets.SMALL_DONE_DCP)],
        nbytes_max=16 * MIB, saves=5,
        notes=["Until done: memstore committed with a copy on the other host; DCP's files written to shared memory, "
               "one copy. A round's value is the median of five saves."],
    ),
    "stall-kept": Race(
        [Entry(PUT, "memstore", "committed"), Entry(THREAD, "torch", "dcp thread kept"),
         Entry(PROCESS, "torch", "dcp process kept")],
        (STALL,), [(STALL, "put / DCP async_save with a stager kept, the quicker", PUT, (THREAD, PROCESS), None)],
        size_share=0.5,
        notes=["One DefaultStager handed to every async_save, its buffers warm; by default (race stall) torch makes "
               "one for each save."],
    ),
    "files": Race(
        [Entry(PUT, "memstore", "committed"), Entry("torch.save, shared memory", "torch", "torch.save memory"),
         Entry("torch.save, disk, flushed", "torch", "torch.save disk"),
         Entry("safetensors, shared memory", "torch", "safetensors memory"),
         Entry("safetensors, disk, flushed", "torch", "safetensors disk"),
         Entry("DCP save, shared memory", "torch", "dcp save")],
        (DONE,),
        [(DONE, "put to committed / torch.save, shared memory", PUT, ("torch.save, shared memory",), None),
         (DONE, "put to committed / safetensors, shared memory", PUT, ("safetensors, shared memory",), None),
         (DONE, "put to committed / DCP save, shared memory", PUT, ("DCP save, shared memory",), None)],
        size_share=0.5,
        notes=["memstore is done when the step is committed: a copy on each of two hosts, digests checked. The others "
               "block training all that time and have one copy, without a digest."],
    ),
    "peer": Race(
        [Entry(PUT, "memstore", "replicated"),
         *(Entry(label, "torchft", way) for label, way in zip(TORCHFT, ("0", "2", "4"), strict=True))],
        (DONE,),
        [(DONE, "speed / torchft HTTP, the quickest", "", TORCHFT, targets.SEALED_TORCHFT)],
        notes=["memstore: put to sealed, digests on both ends; torchft: send_checkpoint until recv_checkpoint "
               "returned in another process, no digest. Ray's object store is measured in replicate."],
    ),
    "tiered": Race(
        [Entry(PUT, "memstore", "committed"), Entry(HYPERPOD, "hyperpod")],
        (STALL, DONE), [(STALL, "put / HyperPod's client", PUT, (HYPERPOD,), None)],
        size_share=0.25,
        notes=["HyperPod's client is DCP's async_save with its storage writer: a digest (xxh3) of the whole, which a "
               "load checks, and one HTTP POST. The daemon is a stand-in that keeps the bytes in another process of "
               "this machine and copies them nowhere: the stall is the client's, the end is not that of the service."],
    ),
    "mooncake": Race(
        [Entry(PUT, "memstore", "replicated"), Entry(GET, "memstore", "get"), Entry(MOONCAKE, "mooncake", "put"),
         Entry(MOONCAKE_GET, "mooncake", "get")],
        (DONE,),
        [(DONE, "put to sealed / Mooncake Store's put", PUT, (MOONCAKE,), None),
         (DONE, "local get / Mooncake Store's get from the other process", GET, (MOONCAKE_GET,), None)],
        size_share=0.5,
        notes=["Mooncake Store over TCP: batch_put_from into the memory of another process, one copy, no digest, and "
               "batch_get_into from there; all of the put blocks. memstore's put has two copies, its get is from this "
               "host's memory, digests checked. A get from a peer beside raw TCP is in restore."],
    ),
    "two-ways": Race(
        [Entry(PUT, "memstore", "replicated"), Entry(LMR, "lm-resiliency")],
        (STALL, DONE), [(DONE, f"put to both sealed / {LMR}", PUT, (LMR,), targets.TWO_WAYS)],
        ranks=2, size_share=0.75,
        notes=["Two ranks, each with a state of its own that the other one's host copies. 0.75 GiB each way: "
               "memstore's five versions a host and lm-resiliency's four a rank fill this machine's memory."],
    ),
    "two-ways-nvrx": Race(
        [Entry(PUT, "memstore", "replicated"), Entry(NVRX, "nvidia-resiliency-ext")],
        (DONE,), [(DONE, f"put to both sealed / {NVRX}", PUT, (NVRX,), None)],
        ranks=2, size_share=0.5,
        notes=["NVRx without a GPU: its BasicTensorAwareStateDict asserts CUDA tensors and its asynchronous save "
               "synchronises CUDA, so this is the synchronous one, with a TensorAwareStateDict of ours, "
               "into /dev/shm."],
    ),
    "first": Race(
        [Entry(PUT, "memstore", "replicated"), Entry(LMR, "lm-resiliency")],
        (DONE,), [(DONE, f"first put, prepared, to both sealed / first {LMR}", PUT, (LMR,), targets.FIRST_PUT_PEER)],
        ranks=2, size_share=0.5, fresh=True,
        notes=["New processes and a new store in every round. memstore's clock starts when store.prepare(state) is "
               "through; lm-resiliency has no such call and starts with its manager made."],
    ),
}  # fmt: skip


def run(name: str, options: Options) -> list[Record]:
    """Run one race; return a record for each thing shown of it."""
    race = RACES[name]
    nbytes = min(race.nbytes_max, int(options.nbytes * race.size_share))
    sized = Options(nbytes, options.rounds, options.warmups, options.chunk_bytes)
    return _run_fresh(name, race, sized) if race.fresh else _run_warm(name, race, sized)


def _run_warm(name: str, race: Race, options: Options) -> list[Record]:
    absent: dict[str, str] = {}
    stalls: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        contestants = dict.fromkeys(entry.contestant for entry in race.entries)
        teams = {one: _team(stack, one, race, options) for one in contestants}
        for entry in race.entries:  # who cannot run at all is left out of the rounds, with the reason
            team = teams.get(entry.contestant)
            if isinstance(team, PeerFailed):
                absent[entry.label] = str(team)
            elif team is not None:
                _try(entry, team, absent)
        able = [entry for entry in race.entries if entry.label not in absent]

        def contender(entry: Entry) -> Callable[[int], Took]:
            def timed(number: int) -> Took:
                team = teams[entry.contestant]
                assert isinstance(team, Team)  # the others are absent
                saves = []
                for _ in range(race.saves):
                    saves.append(team.round(entry.way))
                    require(team.is_same(entry.way), f"{entry.label}, round {number}")
                stalls.setdefault(entry.label, []).append(median(stall_s for stall_s, _ in saves))
                return Took(median(done.wall_s for _, done in saves), median(done.cpu_s or 0.0 for _, done in saves))

            return timed

        rounds = interleave({entry.label: contender(entry) for entry in able}, options, lambda _: None)
        nbytes = max(team.nbytes for team in teams.values() if isinstance(team, Team))
    stall = Rounds({label: values[options.warmups :] for label, values in stalls.items()}, rounds.cpu_seconds)
    return _records(name, race, nbytes, {DONE: rounds, STALL: stall}, absent)


def _try(entry: Entry, team: Team, absent: dict[str, str]) -> None:
    try:
        team.round(entry.way)
        require(team.is_same(entry.way), entry.label)
    except (PeerFailed, RuntimeError) as error:
        if entry.label == PUT:
            raise
        absent[entry.label] = str(error)


def _run_fresh(name: str, race: Race, options: Options) -> list[Record]:
    absent: dict[str, str] = {}
    nbytes = 0

    def contender(entry: Entry) -> Callable[[int], Took]:
        def timed(number: int) -> Took:
            nonlocal nbytes
            if entry.label in absent:
                return Took(0.0)
            with contextlib.ExitStack() as stack:
                team = _team(stack, entry.contestant, race, options)
                if isinstance(team, PeerFailed):
                    absent[entry.label] = str(team)
                    return Took(0.0)
                nbytes = team.nbytes
                _, done = team.round(entry.way)
                require(team.is_same(entry.way), f"{entry.label}, round {number}")
                return done

        return timed

    rounds = Options(options.nbytes, options.rounds, 0, options.chunk_bytes)
    took = interleave({entry.label: contender(entry) for entry in race.entries}, rounds, lambda _: None)
    for label in absent:
        del took.seconds[label]
    return _records(name, race, nbytes, {DONE: took}, absent)


def _team(stack: contextlib.ExitStack, contestant: str, race: Race, options: Options) -> Team | PeerFailed:
    told: dict[str, Any] = {"ways": [e.way for e in race.entries if e.contestant == contestant]}
    if contestant == "memstore":
        told |= {"prepare": race.fresh, **stack.enter_context(_store(race, options))}
    try:
        return stack.enter_context(
            Team(contestant, options.nbytes, 2 if contestant == "torchft" else race.ranks, **told)
        )
    except PeerFailed as error:
        if contestant == "memstore":
            raise
        return error


@contextlib.contextmanager
def _store(race: Race, options: Options) -> Iterator[dict[str, Any]]:
    # Every host has its own rank's versions, the other one's copies, and one for repair and staging (R10).
    versions = 3.5 if race.ranks == 1 else 5.3
    with rig.two_hosts(options, replicas=2, versions=versions) as cluster:
        config = {**cluster.config.store_fields(), **cluster.config.job_fields()}
        yield {"job": rig.JOB, "pids": rig.pids_of(cluster), "config": config}


def _records(name: str, race: Race, nbytes: int, took: dict[str, Rounds], absent: dict[str, str]) -> list[Record]:
    records = []
    for shown in race.shows:
        record = Record(
            f"{name}: {shown}",
            nbytes,
            took[shown].seconds,
            absent=absent,
            notes=list(race.notes),
            cpu_seconds=took[shown].cpu_seconds,
        )
        for where, what, over, under, target in race.promises:
            there = [label for label in under if label in record.seconds]
            if where == shown and there:
                _promise(record, what, over, there, target)
        records.append(record)
    return records


def _promise(record: Record, what: str, over: str, under: list[str], target: Target | None) -> None:
    """Add memstore against the quickest of `under`, by their medians; a speed where nothing is named over it."""
    quickest = min(under, key=lambda label: sorted(record.seconds[label])[len(record.seconds[label]) // 2])
    if over:
        record.ratio(what, over, quickest, target)
    else:
        record.ratio(what, quickest, PUT, target)
