"""I27: with parity any one host, or any two, may be lost at any moment: the newest step comes back from the others.

The bytes are added up here again, from what lies in sealed slots at that moment. None of the product's code for parity
has a part in that, so that a mistake there is not repeated here; which chunks add up to a row is said once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations

import msgspec

from memstore.core.cluster.facts import StepCommitted
from memstore.core.cluster.job import Job
from memstore.core.format.manifest import Manifest, decode_manifest, shard_digest
from memstore.testing.simulator.checks.observed import Observed, Replica
from memstore.testing.simulator.world.memory import Memory
from memstore.testing.simulator.world.world import AnyController, Violation, World
from recovery.inventory import ShardId, StepId

# -- sets ---------------------------------------------------------------------------------------------
# What hosts have of one step, and what they can give.


Named = Mapping[int, tuple[str, int]]  # the shards in parity, by rank: digest, number of chunks


@dataclass(frozen=True)
class Kept:
    """What one host has of one step, whole."""

    shards: set[tuple[int, str]] = field(default_factory=set)  # rank, digest
    parity: dict[int, tuple[str, int, Named]] = field(
        default_factory=dict
    )  # by the rank whose host is to keep it: digest, in how many rows each chunk is, ..


@dataclass(frozen=True)
class SumPart:
    """A row or a chunk that something is added up from."""

    host: str
    rank: int
    digest: str
    index: int
    factor: int
    is_row: bool = False


@dataclass(frozen=True)
class Sum:
    """A chunk that comes back from rows, and from the others' chunks that are in these rows too."""

    chunk: int
    parts: tuple[SumPart, ...]


def times(factor: int, value: int) -> int:
    """Return a number of any length each byte of which is multiplied by an element of the field of 256 elements."""
    count = (value.bit_length() + 7) // 8
    ones, found = int.from_bytes(b"\1" * count, "little"), 0
    while factor:
        found ^= value * (factor & 1)
        value = ((value & (ones * 0x7F)) << 1) ^ (((value >> 7) & ones) * 0x1D)
        factor >>= 1
    return found


@lru_cache(maxsize=256)
def inverse(factor: int) -> int:
    """Return the element that makes 1 of another one."""
    return next(each for each in range(1, 256) if times(each, factor) == 1)


def sums_of(kept: Mapping[str, Kept], rank: int, digest: str) -> list[Sum] | None:
    """Return how hosts together give a shard that none of them has; None if they cannot.

    Of a set of n ranks, chunk c goes to the rank that is 1 + c % (n - 1) places further, into row c // (n - 1). Where
    each is in two rows it goes to that of 1 + c % (n - 2), into row 2 (c // (n - 2)), and to the next rank, multiplied
    by 2 to the power of its place, into the row after that.
    """
    sets = {
        (tuple(sorted((owner, *named))), spare)
        for each in kept.values()
        for owner, (_, spare, named) in each.parity.items()
        if named.get(rank, ("", 0))[0] == digest
    }
    for members, spare in sorted(sets, key=lambda each: len(each[0]), reverse=True):
        found = _sums_in(kept, members, spare, rank, digest)
        if found is not None:
            return found
    return None


def _sums_in(
    kept: Mapping[str, Kept], members: tuple[int, ...], spare: int, rank: int, digest: str
) -> list[Sum] | None:
    place = {member: number for number, member in enumerate(members)}
    count = max(named[rank][1] for each in kept.values() for _, _, named in each.parity.values() if rank in named)
    found: list[Sum] = []
    for chunk in range(count):
        row, turn = divmod(chunk, len(members) - spare)
        owner = members[(place[rank] + 1 + turn) % len(members)]
        plain = _rows(kept, members, owner, spare * row, rank, digest)
        second = _rows(kept, members, members[(place[owner] + 1) % len(members)], 2 * row + 1, rank, digest)
        named = next(iter([*plain.values(), *second.values()] if spare == 2 else plain.values()), {})
        there, gone = list[SumPart](), list[int]()
        for other in named.keys() - {rank}:
            at = (place[owner] - place[other] - 1) % len(members)
            added = row * (len(members) - spare) + at
            if at < len(members) - spare and added < named[other][1]:
                having = [h for h, k in sorted(kept.items()) if (other, named[other][0]) in k.shards]
                there += [SumPart(having[0], other, named[other][0], added, 1)] if having else []
                gone += [] if having else [other]
        powers = {member: _power(place[member]) for member in members}
        parts = _parts([*plain], [*second] if spare == 2 else [], there, gone, powers, rank)
        if parts is None:
            return None
        found.append(Sum(chunk, parts))
    return found


def _rows(
    kept: Mapping[str, Kept], members: tuple[int, ...], owner: int, row: int, rank: int, digest: str
) -> dict[SumPart, Named]:
    """Return a row where hosts have it, and what else is in that parity."""
    found: dict[SumPart, Named] = {}
    for host, each in sorted(kept.items()):
        parity, _, named = each.parity.get(owner, ("", 0, {}))
        if {owner, *named} == {*members} and rank in named and named[rank][0] == digest:
            found[SumPart(host, owner, parity, row, 1, is_row=True)] = named
    return found


@lru_cache(maxsize=256)
def _power(number: int) -> int:
    return 1 if not number else times(2, _power(number - 1))


def _parts(
    plain: list[SumPart],
    second: list[SumPart],
    there: list[SumPart],
    gone: list[int],
    powers: Mapping[int, int],
    rank: int,
) -> tuple[SumPart, ...] | None:
    """Return what adds up to a chunk; None if too much is gone."""
    if plain and not gone:
        return plain[0], *there
    if second and not gone:
        first = inverse(powers[rank])
        return tuple(
            replace(each, factor=first if each.is_row else times(first, powers[each.rank]))
            for each in (second[0], *there)
        )
    if not plain or not second or len(gone) > 1:
        return None
    divisor = inverse(powers[rank] ^ powers[gone[0]])
    return (
        replace(plain[0], factor=times(divisor, powers[gone[0]])),
        replace(second[0], factor=divisor),
        *(replace(each, factor=times(divisor, powers[each.rank] ^ powers[gone[0]])) for each in there),
    )


def short_of(kept: Mapping[str, Kept], digests: Iterable[str], gone: Collection[str] = ()) -> list[int]:
    """Return the ranks whose shards the hosts that are not gone cannot give."""
    left = {host: each for host, each in kept.items() if host not in gone}
    return [
        rank
        for rank, digest in enumerate(digests)
        if not any((rank, digest) in each.shards for each in left.values()) and sums_of(left, rank, digest) is None
    ]


def claimed(controller: AnyController, job: Job, step: StepId) -> dict[str, Kept]:
    """Return what a controller takes live hosts to have of a step, whole."""
    live, kept = set(controller.machine.hosts.live_ids()), dict[str, Kept]()
    for rank, hosts in job.copies.get(step, {}).items():
        for host, copy in hosts.items():
            if host in live and not copy.missing:
                kept.setdefault(host, Kept()).shards.add((rank, copy.spec.digest))
    for rank, hosts in job.parity.get(step, {}).items():
        for host, copy in hosts.items():
            if host in live and not copy.missing:
                named = {s.rank: (s.digest, -(-s.nbytes // copy.spec.chunk_bytes)) for s in copy.spec.summands}
                kept.setdefault(host, Kept()).parity[rank] = copy.spec.digest, copy.spec.spare, named
    return kept


# -- losses -------------------------------------------------------------------------------------------


REPORT_S = 6.0  # within this what faults took is known, and what was ordered before is done
SEALED = 3


class LossCheck:
    """The steps that must come back after the loss of any one domain, or any two."""

    def __init__(self, world: World, observed: Observed) -> None:
        self.world, self.observed = world, observed
        self._manifests: dict[Replica, Manifest] = {}
        self._named: dict[
            Replica, tuple[int, dict[int, tuple[str, int]]]
        ] = {}  # parity -> rows of a chunk, what is in it
        self._sets: dict[StepId, dict[int, tuple[int, ...]]] = {}
        self._taken_s: dict[StepId, float] = {}  # when a fault last took something of it
        self._owed: dict[StepId, bool] = {}  # watched step -> any one domain may be lost; else none may
        self._seen: dict[StepId, object] = {}  # what hosts had of it at the last look
        #: Step, and whether of all losses -> what hosts had, and why it was short: it is asked after every event.
        self._said: dict[tuple[StepId, bool], tuple[object, str]] = {}

    # -- what is there ------------------------------------------------------------------------

    def stored(self, name: str, manifest: Manifest, digest: str) -> None:
        """Take note of a replica that a host has for the first time; of parity, which shards are in it."""
        shard, replica = manifest.shard, (manifest.shard, digest)
        self._manifests[replica] = manifest
        if not shard.is_parity:
            return
        if replica not in self._named:
            spare, rows = msgspec.msgpack.decode(manifest.layout, type=tuple[int, list[tuple[int, bytes]]])
            named = {rank: (shard_digest(data), len(decode_manifest(data).chunks)) for rank, data in rows}
            self._named[replica] = spare, named
            for rank, data in rows:
                added = ShardId(shard.job, shard.attempt, shard.step, rank), shard_digest(data)
                self._manifests.setdefault(added, decode_manifest(data))
        _, named = self._named[replica]
        members, sets = (
            tuple(sorted((shard.rank, *named))),
            self._sets.setdefault(StepId(shard.attempt, shard.step), {}),
        )
        for rank, (of, _) in named.items():
            sets[rank] = members
            added = ShardId(shard.job, shard.attempt, shard.step, rank), of
            self.observed.ever_added.setdefault(added, set()).add(name)

    def is_in_parity(self, shard: ShardId) -> bool:
        """Say whether a shard is parity, or was ever added into any."""
        return shard.is_parity or shard.rank in self._sets.get(StepId(shard.attempt, shard.step), {})

    def kept(self, step: StepId) -> dict[str, Kept]:
        """Return what every host has of a step, whole and right."""
        found: dict[str, Kept] = {}
        for host, replicas in self.observed.whole.items():
            found[host] = each = Kept()
            for shard, digest in replicas:
                if shard.job != self.world.scenario.job or StepId(shard.attempt, shard.step) != step:
                    continue
                if shard.is_parity:
                    each.parity[shard.rank] = digest, *self._named[shard, digest]
                else:
                    each.shards.add((shard.rank, digest))
        return found

    def domains(self) -> list[set[str]]:
        """Return the hosts by failure domain."""
        if self.world.scenario.racks_wanted == 1:
            return [{host} for host in sorted(self.world.holders)]
        racks: dict[str, set[str]] = {}
        for host, holder in sorted(self.world.holders.items()):
            racks.setdefault(holder.info.labels.get("rack", host), set()).add(host)
        return list(racks.values())

    def losses(self) -> list[set[str]]:
        """Return the hosts of every one domain, and of any two where two losses are to be survived."""
        domains, most = self.domains(), self.world.scenario.replicas - 1
        return [set().union(*lost) for count in range(1, most + 1) for lost in combinations(domains, count)]

    def why_short(self, step: StepId, *, of_all: bool = False) -> str:
        """Say which rank's shard of a step would be lost with which domains, "" if any one, or two, may be lost.

        Args:
            of_all: Say only what is lost already.
        """
        kept, losses = self.kept(step), [set[str]()] if of_all else [set[str](), *self.losses()]
        has_all = (
            (host, frozenset(each.shards), frozenset((owner, parity[0]) for owner, parity in each.parity.items()))
            for host, each in kept.items()
        )
        asked, known = (step, of_all), (frozenset(has_all), tuple(map(frozenset, losses)))
        if asked not in self._said or self._said[asked][0] != known:
            self._said[asked] = known, self._why_short(step, kept, losses)
        return self._said[asked][1]

    def _why_short(self, step: StepId, kept: Mapping[str, Kept], losses: Sequence[Collection[str]]) -> str:
        digests = self.observed.facts[step].digests
        for gone in losses:
            ranks = short_of(kept, digests, gone)
            if ranks:
                has = {host: (sorted(r for r, _ in each.shards), sorted(each.parity)) for host, each in kept.items()}
                return f"ranks {ranks} of {step} are lost without {sorted(gone) or 'any loss'}; copies, parity: {has}"
        return ""

    def is_lost(self, step: StepId) -> bool:
        """Say whether some rank's shard of a committed step lies whole on no host, and cannot be decoded."""
        return bool(short_of(self.kept(step), self.observed.facts[step].digests))

    def is_claimed(self, controller: AnyController, job: Job, step: StepId, digests: Iterable[str]) -> bool:
        """Say whether a controller takes any one domain to be one that may be lost."""
        kept = claimed(controller, job, step)
        return not any(short_of(kept, digests, gone) for gone in self.losses())

    def why_lacking(self, step: StepId) -> str:
        """Say what repair owes a step with parity and has not done, or "".

        Where ranks of a set share a domain, after a launch on fewer hosts or others, it owes only that all is there:
        until the next commit a loss may be one too many.
        """
        if step not in self._sets:
            return ""
        place = {host: number for number, hosts in enumerate(self.domains()) for host in hosts}
        if any(rank.host_id not in place for rank in self.world.ranks):
            return self.why_short(step, of_all=True)  # the next launch is on others
        own = {rank.rank: place[rank.host_id] for rank in self.world.ranks}
        newest = max((rank.attempt for rank in self.world.ranks), default=0)  # 0: a launch that no rank has joined yet
        sets = set(self._sets[step].values())
        apart = all(len({own.get(rank, -1 - rank) for rank in members}) == len(members) for members in sets)
        return self.why_short(step, of_all=not apart and (step.attempt < newest or not newest))

    # -- what must be there -------------------------------------------------------------------

    def taken_by_fault(self, shard: ShardId) -> None:
        """Record that a fault destroyed a copy, or parity."""
        self._taken_s[StepId(shard.attempt, shard.step)] = self.world.now

    def committed(self, step: StepId, fact: StepCommitted) -> None:
        """Look at a commit that a rank learns of: unless it is degraded, any one domain may be lost from now on."""
        if not self.world.scenario.parity or fact.is_degraded or step != max(self.observed.facts):
            return
        if step not in self._taken_s and (why := self.why_short(step)):
            raise Violation("I27", f"{step} says it is not degraded: {why}")

    def look(self, pinned: Collection[StepId]) -> None:
        """Look at the newest acknowledged step, and at pinned ones, where something of them has come or gone."""
        newest = max(self.observed.facts, default=None)
        if not self.world.scenario.parity or newest is None:
            return
        watched = {*pinned, *({newest} & self.observed.acked)}
        self._owed = {step: owed for step, owed in self._owed.items() if step in watched}
        for step in sorted(watched):
            had = {
                host: frozenset(r for r in replicas if (r[0].attempt, r[0].step) == (step.attempt, step.step))
                for host, replicas in self.observed.whole.items()
            }
            if step not in self._owed or self._seen.get(step) != had:
                self._seen[step] = had
                self._look_at(step)

    def _look_at(self, step: StepId) -> None:
        kept, digests = self.kept(step), self.observed.facts[step].digests
        for gone in [set[str](), *self.losses()]:
            self._decode(step, {host: each for host, each in kept.items() if host not in gone})
        is_owed, before = not self.why_short(step), self._owed.get(step)
        is_excused = self.world.now - self._taken_s.get(step, -REPORT_S) < REPORT_S or self.observed.cause
        if self.world.scenario.is_strict and not is_excused:
            if before and not is_owed:
                raise Violation("I27", f"no fault took anything of it, and {self.why_short(step)}")
            if short_of(kept, digests):
                raise Violation("I27", f"within the promise {self.why_short(step, of_all=True)}")
        self._owed[step] = is_owed

    def _decode(self, step: StepId, kept: Mapping[str, Kept]) -> None:
        """Add up from raw slots what these hosts have no copy of: it must be what the rank put."""
        job = self.world.scenario.job
        for rank, digest in enumerate(self.observed.facts[step].digests):
            shard = ShardId(job, step.attempt, step.step, rank)
            if any((rank, digest) in each.shards for each in kept.values()):
                continue
            for each in sums_of(kept, rank, digest) or ():
                wanted = self._manifests[shard, digest].chunks[each.chunk]
                total = 0
                for part in each.parts:
                    of = ShardId(job, step.attempt, step.step, part.rank, is_parity=part.is_row)
                    total ^= times(part.factor, self._raw(part.host, (of, part.digest), part.index))
                total &= (1 << 8 * wanted.nbytes) - 1
                put = {
                    int.from_bytes(c[each.chunk], "little")
                    for c in self.observed.contents[shard]
                    if each.chunk < len(c)
                }
                if total not in put:
                    raise Violation(
                        "I27",
                        f"chunk {each.chunk} of {shard}, {wanted.nbytes} bytes, is not what {each.parts} add up to",
                    )

    def _raw(self, host: str, replica: Replica, index: int) -> int:
        """Return a chunk, or a row, as it lies in a sealed slot of a host."""
        memory: Memory = self.world.memories[host]
        wanted = self._manifests[replica].chunks[index].digest
        for number, header in enumerate(memory.headers):
            if int(header.state) == SEALED and bytes(header.digest) == wanted and number not in memory.spoilt:
                return int.from_bytes(memory.slots[number][: header.nbytes], "little")
        raise Violation("I27", f"no sealed slot of {host} has part {index} of {replica[0]}")
