"""What one simulation tries: a cluster and a list of faults. It is plain data drawn from a seed, so it can be shrunk.

A strict scenario stays within the promise. A fault that destroys memory, or lasts longer than `recovery_grace_s`,
happens only while every copy that the store claims is there and every other host answers; then nothing committed may
be lost. A wild scenario does anything at any time. It must not mix steps, return torn bytes or report a false commit,
and commits must go on once the faults stop.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from memstore.testing.faults.catalogue import Fault, weights

DURATION_S = 40.0


@dataclass(frozen=True)
class Scenario:
    """Everything that a run depends on."""

    seed: int
    hosts: int = 3
    racks: int = 0  # 0: no label
    replicas: int = 2
    scatter: int = 1
    parity: int = 0  # shards in a row of parity, at most; 0: copies
    chunks: tuple[int, ...] = ()  # of the shards of ranks in turn, the last one short; empty: three whole ones each
    keep_steps: int = 1
    in_flight: int = 1
    world_size: int = 3
    step_s: float = 0.4
    has_durable: bool = False
    durable_every: int = 3
    durable_s: float = 0.05  # that each operation on durable storage takes
    is_strict: bool = True
    reads_ranges: bool = False  # ranks read ranges of one another's shards
    reads_shards: bool = False  # ranks read one another's shards whole
    reads_every: int = 7  # after one in so many steps
    is_paced: bool = False  # the job caps what a host writes to durable storage
    shards: int = 0  # each rank names one of so many shards (R34); 0: none does
    is_blocked: bool = False  # shards are dealt in blocks of neighbours, else in turn
    sizes: tuple[int, ...] = ()  # world sizes, drawn for each launch; empty: always world_size
    is_in_place: bool = False  # a lost rank is replaced, the others keep their processes and enter again
    has_spares: bool = False  # the replacement may be a process of another host
    groups: int = 0  # ranks name one of so many groups, those of neighbouring hosts the same (R18.8); 0: none does
    duration_s: float = DURATION_S
    faults: tuple[Fault, ...] = field(default=())
    job: str = "train"

    @property
    def racks_wanted(self) -> int:
        """In how many racks the copies of a shard must lie."""
        return self.replicas if self.racks >= self.replicas else 1

    def groups_of(self, rank: int) -> dict[str, int]:
        """Return the groups that a rank names."""
        return {"pp": rank % self.hosts * self.groups // self.hosts} if self.groups else {}

    def text(self) -> str:
        """Return a page for people: seed, cluster, faults in order."""
        kind = "strict" if self.is_strict else "wild"
        rows = [
            f"seed {self.seed} ({kind}): {self.hosts} hosts, {self.racks or 'no'} racks, {self.world_size} ranks, "
            f"replicas={self.replicas}, scatter={self.scatter}, keep_steps={self.keep_steps}, "
            f"{f'in_flight={self.in_flight}, ' if self.in_flight > 1 else ''}"
            f"a step every {self.step_s:.2f} s, durable storage {'on' if self.has_durable else 'off'}"
            f"{f', of {self.durable_s} s, each {self.durable_every} steps' if self.has_durable else ''}"
            f"{', in place' if self.is_in_place else ''}"
            f"{f', parity={self.parity}' if self.parity else ''}"
            f"{f', shards of {list(self.chunks)} chunks' if self.chunks else ''}"
            f"{self._shared_shards_text()}{f', {self.groups} groups' if self.groups else ''}"
        ]
        return "\n".join([*rows, *(fault.text() for fault in self.faults)])

    def _shared_shards_text(self) -> str:
        sizes = f", world sizes {list(self.sizes)}" if self.sizes else ""
        if not self.shards:
            return sizes
        return f", {self.shards} shards {'in blocks' if self.is_blocked else 'in turn'}{sizes}"

    def to_json(self) -> str:
        """Return the scenario as one line of JSON, without the fields that have their defaults."""
        usual = {each.name: each.default for each in fields(self)}
        found = {name: value for name, value in asdict(self).items() if value != usual[name]}
        found["faults"] = [[f.at_s, f.kind, f.hosts, f.rank, f.for_s, f.count] for f in self.faults]
        return json.dumps(found)

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """Return the scenario that `to_json` wrote; raise ValueError or TypeError if the text is none."""
        found = json.loads(text)
        found |= {name: tuple(found.get(name, ())) for name in ("chunks", "sizes")}
        found["faults"] = tuple(
            Fault(at_s, kind, tuple(hosts), rank, for_s, count)
            for at_s, kind, hosts, rank, for_s, count in found.get("faults", ())
        )
        return cls(**found)


@dataclass(frozen=True)
class Theme:
    """What a share of the seeds has besides: some faults that belong together, or another cluster."""

    share: float
    kinds: Mapping[str, int] = field(default_factory=dict)  # with their weights
    count: tuple[int, int] = (1, 1)  # at least, at most
    for_s: tuple[float, ...] = ()  # one of these; empty: as any fault
    cluster: Mapping[str, Any] = field(default_factory=dict)


IN_PLACE = {
    "kill-rank": 3,
    "freeze-rank": 2,
    "leave-rank": 2,
    "zombie-rank": 3,
    "lose-two": 2,
    "kill-host": 1,
    "lose-both": 3,
    "die-in-recovery": 5,
    "controller-in-recovery": 3,
    "holder-in-recovery": 3,
    "late-launch": 2,
}
# Some host has no copy of a shard that two of its ranks read at once.
DISTANT = {"hosts": 3, "racks": 0, "replicas": 2, "world_size": 6}
THEMES = (
    Theme(0.4, cluster={"reads_ranges": True}),
    Theme(0.12, cluster={"reads_shards": True}),
    Theme(0.08, cluster={"has_durable": True, "is_paced": True}),
    Theme(0.1, cluster={"scatter": 2}),
    Theme(0.17, {"preempt": 1}, for_s=(2.0, 5.0, 9.0)),
    Theme(0.11, {"rotate-key": 1}),
    Theme(0.12, {"replace-arena": 1, "remove-files": 1}, (1, 3)),
    Theme(0.12, {"rot-manifest": 1}, (1, 3)),
    Theme(0.1, {"pin-step": 4, "unpin-step": 1}, (2, 7), (0.0,)),
    Theme(0.1, {"lease-step": 1}, (1, 6), (0.0, 0.3, 2.0, 6.0)),
    Theme(0.15, {"step-clock": 3, "lose-number": 1, "days-pass": 1}, (1, 4)),
    Theme(0.1, {"break-link": 1}, (1, 7)),
    Theme(0.08, {"put-raises": 1}, (1, 3)),
    Theme(0.08, {"load-fails": 1}, (1, 3)),
    Theme(0.08, {"late-hello": 1}, (1, 5)),
    Theme(0.08, {"silent-peers": 1}, (1, 2), (12.0, 16.0, 36.0), DISTANT),
    Theme(0.08, IN_PLACE, (3, 8), cluster={"is_in_place": True}),
    Theme(0.08, IN_PLACE, (3, 8), cluster={"is_in_place": True, "has_spares": True}),
)
ENDING_SHARE, SHARED_SHARDS_SHARE = 0.1, 0.15
TWO_LOSSES_SHARE = 0.5  # of those with parity on four hosts or more
PARITY_SHARE = 0.25  # of the seeds whose ranks name no shards
UNEVEN_CHUNKS = (3, 1, 5, 2, 4)
WIDE_SHARE = 0.5  # of those with parity and uneven shards: some have ten times as many chunks as others
LOST_HOSTS_SHARE = 0.3  # of those with parity: hosts are lost for good, and some ranks have parity, others copies
TRUST_SHARE = 0.15
GROUPS_SHARE = 0.3
IN_FLIGHT = (1, 1, 1, 2, 3)


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    hosts = rng.choice([2, 3, 3, 4, 5])
    usual = weights("simulator")
    faults = [_fault(rng, usual) for _ in range(rng.randrange(1, 9))]
    drawn = Scenario(
        seed=seed,
        hosts=hosts,
        racks=rng.choice([0, 0, 2]) if hosts >= 4 else 0,
        replicas=min(hosts, rng.choice([2, 2, 2, 3])),
        keep_steps=rng.choice([1, 1, 2]),
        world_size=rng.choice([hosts, hosts, 2 * hosts]) if hosts < 4 else hosts,
        step_s=rng.choice([0.15, 0.4, 0.8]),
        has_durable=rng.random() < 0.3,
        is_strict=rng.random() < 0.65,
    )
    for theme in THEMES:
        if rng.random() < theme.share:
            drawn = replace(drawn, **theme.cluster)
            count = rng.randint(*theme.count) if theme.kinds else 0
            more = [_fault(rng, theme.kinds) for _ in range(count)]
            faults += [replace(each, for_s=rng.choice(theme.for_s)) for each in more] if theme.for_s else more
    if drawn.scatter > 1:  # more hosts than copies, and ranks of one host whose copies go different ways
        hosts = max(3, drawn.hosts)
        drawn = replace(drawn, hosts=hosts, world_size=2 * hosts)
    if rng.random() < ENDING_SHARE:
        faults += _ending(rng)
    if rng.random() < SHARED_SHARDS_SHARE and not drawn.is_in_place:
        drawn, more = _with_shared_shards(rng, drawn)
        faults += more
    # What follows is drawn apart, so that the other seeds stay as they were.
    has_parity = random.Random(f"has parity {seed}").random() < PARITY_SHARE and not drawn.shards
    trust = random.Random(f"trust {seed}")
    if trust.random() < TRUST_SHARE:
        faults += [replace(_fault(trust, {"trust-step": 1}), for_s=0.0) for _ in range(trust.randint(2, 6))]
    in_flight = random.Random(f"in flight {seed}").choice(IN_FLIGHT)
    drawn = replace(drawn, in_flight=in_flight, faults=tuple(sorted(faults)))
    drawn = with_overlap(drawn) if drawn.has_durable else drawn
    drawn = with_parity(drawn) if has_parity else drawn
    groups = random.Random(f"groups {seed}")
    is_grouped, count = groups.random() < GROUPS_SHARE, groups.choice([1, 2, 2, 3, drawn.hosts])
    return replace(drawn, groups=min(count, drawn.hosts)) if is_grouped else drawn


def with_overlap(drawn: Scenario) -> Scenario:
    """Return a scenario that, half of the time, writes each step to storage that takes longer than a step (R31)."""
    rng = random.Random(f"overlap {drawn.seed}")
    if rng.random() < 0.5:
        return drawn
    times = rng.choice([0.3, 0.5, 0.8])  # a write is about four operations
    keep_steps = rng.choice([drawn.keep_steps, 2, 3])
    return replace(drawn, durable_every=1, durable_s=round(times * drawn.step_s, 3), keep_steps=keep_steps)


def with_parity(drawn: Scenario) -> Scenario:
    """Return a scenario with parity in place of copies, drawn from its own stream: other seeds stay as they are."""
    rng = random.Random(f"parity {drawn.seed}")
    hosts = rng.choice([max(3, drawn.hosts), 3, 4, 5, 6])
    with_one = replace(
        drawn,
        hosts=hosts,
        racks=rng.choice([0, 3]) if hosts == 6 else 0,
        replicas=2,
        scatter=1,
        parity=rng.choice([2, 2, 3, 4]),
        chunks=UNEVEN_CHUNKS if rng.random() < 0.5 else (),
        world_size=rng.choice([hosts, hosts, hosts + 1, 2 * hosts]) if hosts < 6 else hosts,
        shards=0,
        sizes=(),
    )
    rng = random.Random(f"two losses {drawn.seed}")
    has_two = hosts >= 4 and rng.random() < TWO_LOSSES_SHARE
    with_one = replace(with_one, replicas=3, racks=0) if has_two else with_one
    rng = random.Random(f"chunks {drawn.seed}")
    if with_one.chunks and rng.random() < WIDE_SHARE:
        sizes = [rng.choice((1, rng.randint(2, 5), rng.randint(6, 14))) for _ in range(hosts)]
        with_one = replace(with_one, chunks=tuple(sizes))
    rng = random.Random(f"lost hosts {drawn.seed}")
    if drawn.is_in_place or rng.random() > LOST_HOSTS_SHARE:
        return with_one
    lost = [_fault(rng, {"lose-host": 1}) for _ in range(rng.randint(1, 3))]
    return replace(with_one, faults=tuple(sorted([*with_one.faults, *lost])))


def _fault(rng: random.Random, kinds: Mapping[str, int]) -> Fault:
    return Fault(
        at_s=round(rng.uniform(1.0, DURATION_S - 6.0), 2),
        kind=rng.choices(list(kinds), weights=list(kinds.values()))[0],
        hosts=tuple(rng.sample(range(5), rng.choice([1, 1, 2]))),
        rank=rng.randrange(8),
        for_s=round(rng.choice([0.3, 1.0, 2.5, 4.0, 9.0]), 1),
        count=rng.choice([1, 1, 2, 4, 8, 16]),
    )


def _ending(rng: random.Random) -> list[Fault]:
    """Draw the end of the job, most often soon after a rack was lost host by host."""
    worn = replace(_fault(rng, {"wear-rack": 1}), for_s=rng.choice([0.3, 1.2, 2.5]))
    end = replace(_fault(rng, {"end-job": 1}), at_s=round(worn.at_s + rng.uniform(0.1, 6.0), 2))
    return [worn, end] if rng.random() < 0.8 else [end]


def _with_shared_shards(rng: random.Random, drawn: Scenario) -> tuple[Scenario, list[Fault]]:
    """Return a scenario whose ranks name shards, and its faults; in one of four the ranks name none."""
    size = rng.choice([drawn.hosts, drawn.hosts, drawn.hosts + 1, 2 * drawn.hosts])
    if rng.random() < 0.25:
        return replace(drawn, world_size=size), []
    sizes = tuple(max(2, size + n) for n in (0, 1, rng.choice([-1, 2]))) if rng.random() < 0.6 else ()
    faults = [_fault(rng, {"differ": 1}) for _ in range(rng.choice([0, 0, 1, 2]))]
    named = replace(
        drawn,
        world_size=size,
        sizes=sizes,
        shards=min(*sizes, size, rng.choice([1, 1, 1, 2, 2, 3])),
        is_blocked=rng.random() < 0.4,
    )
    return named, faults
