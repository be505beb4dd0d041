"""What one simulation tries: a cluster and a list of faults. It is plain data drawn from a seed, so it can be shrunk.

A strict scenario stays within the promise. A fault that destroys memory, or lasts longer than `recovery_grace_s`,
happens only while every copy that the store claims is there and every other host answers; then nothing committed may
be lost. A wild scenario does anything at any time. It must not mix steps, return torn bytes or report a false commit,
and commits must go on once the faults stop.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

DURATION_S = 40.0


@dataclass(frozen=True, order=True)
class Fault:
    """One fault: when, what, on which hosts or rank, how long, how much.

    `hosts` and `rank` are taken modulo what there is.
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
class Scenario:
    """Everything that a run depends on."""

    seed: int
    hosts: int = 3
    racks: int = 0  # 0: no label
    replicas: int = 2
    scatter: int = 1
    keep_steps: int = 1
    world_size: int = 3
    step_s: float = 0.4
    has_durable: bool = False
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
    duration_s: float = DURATION_S
    faults: tuple[Fault, ...] = field(default=())
    job: str = "train"

    @property
    def racks_wanted(self) -> int:
        """In how many racks the copies of a shard must lie."""
        return self.replicas if self.racks >= self.replicas else 1

    def text(self) -> str:
        """Return a page for people: seed, cluster, faults in order."""
        kind = "strict" if self.is_strict else "wild"
        rows = [
            f"seed {self.seed} ({kind}): {self.hosts} hosts, {self.racks or 'no'} racks, {self.world_size} ranks, "
            f"replicas={self.replicas}, scatter={self.scatter}, keep_steps={self.keep_steps}, "
            f"a step every {self.step_s:.2f} s, durable storage {'on' if self.has_durable else 'off'}"
            f"{', in place' if self.is_in_place else ''}"
            f"{self._shared_shards_text()}"
        ]
        return "\n".join([*rows, *(fault.text() for fault in self.faults)])

    def _shared_shards_text(self) -> str:
        sizes = f", world sizes {list(self.sizes)}" if self.sizes else ""
        if not self.shards:
            return sizes
        return f", {self.shards} shards {'in blocks' if self.is_blocked else 'in turn'}{sizes}"


WEIGHTS = {
    "kill-rank": 4, "freeze-rank": 4, "kill-holder": 4, "crash-holder-at": 8, "freeze-holder": 4,
    "replace-holder": 3, "kill-host": 6, "kill-rack": 2, "flap-host": 1, "reboot-all": 2, "partition": 3,
    "one-way": 3, "slow-link": 2, "flip-in-transit": 3, "reset-in-transit": 3, "flip-at-rest": 4, "double-reports": 2,
    "kill-controller": 5, "freeze-controller": 3, "second-controller": 3, "kv-away": 2, "memory-full": 3,
    "durable-broken": 2, "durable-slow": 1, "durable-torn": 1, "add-host": 1,
}  # fmt: skip

# Seeds with further faults. When a kind of fault was added, it got seeds of which none was in the corpus yet, and a
# random stream of its own. So every seed of the corpus still draws the scenario that failed once.
HISTORY_SEEDS = (4,)  # modulo 10
CLOCK_SEEDS = (0, 1, 4)  # modulo 20
SHARED_SHARD_SEEDS = (3, 9, 18)  # modulo 20
ENDING_SEEDS = (0, 1)  # modulo 20
FILE_SEEDS = (7, 21, 33, 36, 39)  # modulo 40
RANGE_SEEDS = (0, 2)  # modulo 5
SHARD_SEEDS = (4, 8, 24, 34, 37)  # modulo 40
LINK_SEEDS = (0, 32, 34, 39)  # modulo 40
RAISE_SEEDS = (2, 8, 35)  # modulo 40
LOAD_SEEDS = (1, 9, 25, 38, 53, 57)  # modulo 80
PACE_SEEDS = (0, 35, 37)  # modulo 40
MANIFEST_SEEDS = (2, 8, 10, 24, 32)  # modulo 40
HELLO_SEEDS = (0, 5, 39)  # modulo 40
SILENT_SEEDS = (4, 24, 37)  # modulo 40
IN_PLACE_SEEDS = (0, 4, 24, 35, 37, 39)  # modulo 40
SCATTER_SEEDS = (0, 6, 11, 16, 25, 45, 50, 62)  # modulo 80
LEASE_SEEDS = (1, 9, 19, 35, 53, 55, 57, 73)  # modulo 80
IN_PLACE_WEIGHTS = {
    "kill-rank": 3, "freeze-rank": 2, "leave-rank": 2, "zombie-rank": 3, "lose-two": 2, "kill-host": 1, "lose-both": 3,
    "die-in-recovery": 5, "controller-in-recovery": 3, "holder-in-recovery": 3, "late-launch": 2,
}  # fmt: skip


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    hosts = rng.choice([2, 3, 3, 4, 5])
    replicas = min(hosts, rng.choice([2, 2, 2, 3]))
    faults = [_fault(rng) for _ in range(rng.randrange(1, 9))]
    drawn = Scenario(
        seed=seed,
        hosts=hosts,
        racks=rng.choice([0, 0, 2]) if hosts >= 4 else 0,
        replicas=replicas,
        keep_steps=rng.choice([1, 1, 2]),
        world_size=rng.choice([hosts, hosts, 2 * hosts]) if hosts < 4 else hosts,
        step_s=rng.choice([0.15, 0.4, 0.8]),
        has_durable=rng.random() < 0.3 or seed % 40 in PACE_SEEDS,
        is_strict=rng.random() < 0.65,
        reads_ranges=seed % 5 in RANGE_SEEDS,
        reads_shards=seed % 40 in SHARD_SEEDS,
        is_paced=seed % 40 in PACE_SEEDS,
        faults=tuple(sorted([*faults, *(fault for draw_more in MORE for fault in draw_more(seed))])),
    )
    if seed % 40 in SILENT_SEEDS:  # some host has no copy of a shard that two of its ranks read at once
        drawn = replace(drawn, hosts=3, racks=0, replicas=2, world_size=6)
    if seed % 40 in IN_PLACE_SEEDS:
        drawn = replace(drawn, is_in_place=True, has_spares=random.Random(f"spares {seed}").random() < 0.5)
    if seed % 80 in SCATTER_SEEDS:
        drawn = replace(drawn, hosts=max(3, hosts), world_size=2 * max(3, hosts), scatter=2)
    return _with_shared_shards(drawn) if seed % 20 in SHARED_SHARD_SEEDS else drawn


def _with_shared_shards(drawn: Scenario) -> Scenario:
    """Return a scenario whose ranks name shards; in one of four they name none."""
    rng = random.Random(f"twins {drawn.seed}")
    size = rng.choice([drawn.hosts, drawn.hosts, drawn.hosts + 1, 2 * drawn.hosts])
    if rng.random() < 0.25:
        return replace(drawn, world_size=size)
    sizes = tuple(max(2, size + n) for n in (0, 1, rng.choice([-1, 2]))) if rng.random() < 0.6 else ()
    faults = [replace(_fault(rng), kind="differ") for _ in range(rng.choice([0, 0, 1, 2]))]
    people = [replace(_fault(rng), kind="pin-step", for_s=0.0)] if rng.random() < 0.2 else []
    return replace(
        drawn, world_size=size, sizes=sizes, shards=min(*sizes, size, rng.choice([1, 1, 1, 2, 2, 3])),
        is_blocked=rng.random() < 0.4,
        faults=tuple(sorted([*drawn.faults, *faults, *people])),
    )  # fmt: skip


def _notice(seed: int) -> list[Fault]:
    """Draw a preemption for one scenario of six."""
    rng = random.Random(f"notice {seed}")
    return [replace(_fault(rng), kind="preempt", for_s=rng.choice([2.0, 5.0, 9.0]))] if rng.random() < 1 / 6 else []


def _rotation(seed: int) -> list[Fault]:
    """Draw a key file that is replaced host by host for one scenario of nine."""
    rng = random.Random(f"rotation {seed}")
    return [replace(_fault(rng), kind="rotate-key")] if rng.random() < 1 / 9 else []


def _ending(seed: int) -> list[Fault]:
    """Draw the end of the job, most often soon after a rack was lost host by host."""
    rng = random.Random(f"ending {seed}")
    if seed % 20 not in ENDING_SEEDS:
        return []
    worn = replace(_fault(rng), kind="wear-rack", for_s=rng.choice([0.3, 1.2, 2.5]))
    end = replace(_fault(rng), kind="end-job", at_s=round(worn.at_s + rng.uniform(0.1, 6.0), 2))
    return [worn, end] if rng.random() < 0.8 else [end]


def _files(seed: int) -> list[Fault]:
    """Draw files that go while processes live."""
    rng = random.Random(f"files {seed}")
    if seed % 40 not in FILE_SEEDS:
        return []
    kinds = rng.choices(["replace-arena", "remove-files"], k=rng.randrange(1, 4))
    return [replace(_fault(rng), kind=kind) for kind in kinds]


def _manifests(seed: int) -> list[Fault]:
    """Draw files of manifests that rot."""
    rng = random.Random(f"manifests {seed}")
    count = rng.randrange(1, 4) if seed % 40 in MANIFEST_SEEDS else 0
    return [replace(_fault(rng), kind="rot-manifest") for _ in range(count)]


def _history(seed: int) -> list[Fault]:
    """Draw pins, and their ends."""
    rng = random.Random(f"history {seed}")
    if seed % 10 not in HISTORY_SEEDS:
        return []
    kinds = rng.choices(["pin-step", "unpin-step"], weights=[4, 1], k=rng.randrange(2, 8))
    return [replace(_fault(rng), kind=kind, for_s=0.0) for kind in kinds]


def _leases(seed: int) -> list[Fault]:
    """Draw readers that lease the newest step for a while, some of them until their process or link ends."""
    rng = random.Random(f"leases {seed}")
    count = rng.randrange(1, 7) if seed % 80 in LEASE_SEEDS else 0
    return [replace(_fault(rng), kind="lease-step", for_s=rng.choice([0.0, 0.3, 2.0, 6.0])) for _ in range(count)]


def _clocks(seed: int) -> list[Fault]:
    """Draw clocks that step, days that pass, and lost numbers of holders."""
    rng = random.Random(f"clocks {seed}")
    if seed % 20 not in CLOCK_SEEDS:
        return []
    kinds = rng.choices(["step-clock", "lose-number", "days-pass"], weights=[3, 1, 1], k=rng.randrange(1, 5))
    return [replace(_fault(rng), kind=kind) for kind in kinds]


def _links(seed: int) -> list[Fault]:
    """Draw links of ranks that break under a living holder, and puts that raise before their copy."""
    rng = random.Random(f"links {seed}")
    breaks = rng.randrange(1, 8) if seed % 40 in LINK_SEEDS else 0
    raises = rng.randrange(1, 4) if seed % 40 in RAISE_SEEDS else 0
    kinds = ["break-link"] * breaks + ["put-raises"] * raises
    return [replace(_fault(rng), kind=kind) for kind in kinds]


def _loads(seed: int) -> list[Fault]:
    """Draw launches in which a rank cannot load what its get brings."""
    rng = random.Random(f"loads {seed}")
    count = rng.randrange(1, 4) if seed % 80 in LOAD_SEEDS else 0
    return [replace(_fault(rng), kind="load-fails") for _ in range(count)]


def _hellos(seed: int) -> list[Fault]:
    """Draw links that are served after the process has connected again."""
    rng = random.Random(f"hellos {seed}")
    count = rng.randrange(1, 6) if seed % 40 in HELLO_SEEDS else 0
    return [replace(_fault(rng), kind="late-hello") for _ in range(count)]


def _silence(seed: int) -> list[Fault]:
    """Draw hosts whose peers wait for answers, longer than a read waits for another one."""
    rng = random.Random(f"silence {seed}")
    count = rng.randrange(1, 3) if seed % 40 in SILENT_SEEDS else 0
    return [replace(_fault(rng), kind="silent-peers", for_s=rng.choice([12.0, 16.0, 36.0])) for _ in range(count)]


def _in_place(seed: int) -> list[Fault]:
    """Draw lost ranks, and what happens while they are replaced."""
    rng = random.Random(f"in place {seed}")
    if seed % 40 not in IN_PLACE_SEEDS:
        return []
    kinds = rng.choices(list(IN_PLACE_WEIGHTS), weights=list(IN_PLACE_WEIGHTS.values()), k=rng.randrange(3, 9))
    return [replace(_fault(rng), kind=kind) for kind in kinds]


def _fault(rng: random.Random) -> Fault:
    return Fault(
        at_s=round(rng.uniform(1.0, DURATION_S - 6.0), 2),
        kind=rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0],
        hosts=tuple(rng.sample(range(5), rng.choice([1, 1, 2]))),
        rank=rng.randrange(8),
        for_s=round(rng.choice([0.3, 1.0, 2.5, 4.0, 9.0]), 1),
        count=rng.choice([1, 1, 2, 4, 8, 16]),
    )


# Each draws from a stream of its own.
MORE = (
    _notice, _history, _clocks, _rotation, _ending, _files, _manifests, _links, _hellos, _silence, _in_place,
    _loads,
    _leases,
)  # fmt: skip
