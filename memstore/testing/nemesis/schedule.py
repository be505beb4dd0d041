"""The schedule of a round, drawn from its seed alone: hosts, job, and the faults with their times. Pure.

Some schedules are composed: an order of ordinary faults that found a defect which no single one of them shows.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from memstore.testing.faults.catalogue import Fault, weights

KILLS = (
    "kill-holder",
    "freeze-holder",
    "kill-controller",
    "second-controller",
    "kill-rank",
    "freeze-rank",
    "read",
    "ask-cli",
)
OF_LINKS = ("partition", "one-way", "slow-link", "flip-in-transit", "reset-in-transit")
COMPOSED = ("folder_then_train", "days_then_restart", "rack_then_host", "clock_back", "live_folder", "memory_lost")
COMPOSED_SHARE = 0.45
PARITY, PARITY_SHARE = "parity", 0.3  # of the rounds of other shapes
TWO_LOSSES_SHARE = 0.4  # of those with parity on four hosts or more
STORAGES = ("", "", "directory", "s3", "gs")


@dataclass(frozen=True)
class NemesisScenario:
    """The hosts, the job and the faults of one round."""

    seed: int
    shape: str  # "random", "kills" (of processes alone), "ray" (on raylets), or one of COMPOSED
    hosts: dict[str, dict[str, str]]  # labels by host id
    replicas: int
    keep_steps: int
    world_size: int
    kib: int
    has_key: bool
    step_s: float
    stall_budget_s: float
    notice_s: float  # how long the other ranks do not know that one is gone
    restart_delay_s: float
    shuffle_share: float
    leaves_hosts_without_ranks: bool
    has_proxies: bool
    storage: str
    job_ttl_s: float
    faults: tuple[Fault, ...]
    ending: str  # "running", "dead", "closed": what becomes of the job before copies must be complete
    parity: int = 0  # shards in a row of parity, at most; 0: copies
    store_fields: dict[str, Any] = field(default_factory=dict)
    job_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def racks(self) -> bool:
        """Return whether copies are spread over racks."""
        return len({labels.get("rack") for labels in self.hosts.values()} - {None}) >= self.replicas

    def domains(self) -> dict[str, str]:
        """The failure domain of each host."""
        return {host: labels["rack"] if self.racks else host for host, labels in self.hosts.items()}

    def text(self) -> str:
        """Return a line for the story."""
        place = ", ".join(f"{host}({labels.get('rack', '-')})" for host, labels in self.hosts.items())
        days = f"job_ttl {self.job_ttl_s:g} s"
        return (
            f"seed {self.seed}: {self.shape}; hosts {place}; {self.world_size} ranks of {self.kib} KiB, replicas "
            f"{self.replicas}, parity {self.parity}, keep_steps {self.keep_steps}, in_flight "
            f"{self.job_fields.get('in_flight', 1)}, storage "
            f"{self.storage or 'none'}, {days}, step {self.step_s:g} s, ending {self.ending}"
        )


def draw(seed: int, *, shape: str = "", is_short: bool = False) -> NemesisScenario:
    """Return the round of a seed; `shape` limits it to one shape, `is_short` to some seconds."""
    rng = random.Random(seed)
    is_parity = shape == PARITY
    shape = "random" if is_parity else shape
    if not shape:
        shape = rng.choice(COMPOSED) if rng.random() < COMPOSED_SHARE else "random"
    replicas = rng.choice((1, 2, 2, 2, 3)) if shape == "random" else 2
    racks = 0 if shape == "random" and rng.random() < 0.4 else max(2, replicas)
    if shape == "rack_then_host":
        hosts = {f"h{i}": {"rack": "a" if i < 3 else "b", "memstore": "replica"} for i in range(1, 5)}
    else:
        count = rng.randint(max(2, replicas), 5)
        hosts = {
            f"h{i}": {"memstore": "replica", **({"rack": f"r{i % racks}"} if racks else {})}
            for i in range(1, count + 1)
        }
    world_size = rng.randint(2, 5) if shape != "rack_then_host" else 4
    storage = rng.choice(STORAGES) if shape == "random" and not is_short else ""
    if shape == "memory_lost":
        storage = rng.choice(("directory", "s3", "gs"))
    has_days = shape == "days_then_restart" or (shape == "random" and rng.random() < 0.15)
    is_short_lived = has_days or (bool(storage) and rng.random() < 0.3)
    job_ttl_s = rng.uniform(13.0, 16.0) if is_short_lived else 86_400.0  # a holder notes the time every 10 s
    is_tight = shape == "rack_then_host"  # little memory, and a launcher that notices late
    replay = NemesisScenario(
        seed=seed,
        shape=shape,
        hosts=hosts,
        replicas=replicas,
        keep_steps=1 if is_tight else rng.choice((1, 1, 2, 3)),
        world_size=world_size,
        kib=rng.choice((64, 128, 320, 512)),
        has_key=rng.random() < 0.3,
        step_s=rng.choice((0.05, 0.1, 0.2)),
        stall_budget_s=rng.choice((1.0, 2.0, 5.0)),
        notice_s=rng.choice((1.5, 4.0) if is_tight else (0.0, 0.3, 1.5)),
        restart_delay_s=rng.choice((0.0, 0.5, 2.0)),
        shuffle_share=rng.choice((0.0, 0.5)),
        leaves_hosts_without_ranks=rng.random() < 0.3,
        has_proxies=shape == "random" and rng.random() < 0.4,
        storage=storage,
        job_ttl_s=job_ttl_s,
        faults=(),
        ending=rng.choice(("running", "running", "dead", "closed")),
    )
    has_parity = shape in ("random", "kills") and random.Random(f"has parity {seed}").random() < PARITY_SHARE
    if is_parity or has_parity:
        replay = with_parity(replay)
    if shape in ("random", "kills", "ray"):
        faults = _random_faults(rng, replay, 6.0 if is_short else rng.uniform(15.0, 35.0))
    else:
        faults = globals()[f"_{shape}"](rng, replay)
    ending = "dead" if shape in ("rack_then_host", "days_then_restart") else replay.ending
    return _with(replay, faults, ending)


def with_parity(drawn: NemesisScenario) -> NemesisScenario:
    """Return a round with parity in place of copies, drawn from a stream of its own: other seeds stay as they are."""
    rng = random.Random(f"parity {drawn.seed}")
    count = rng.choice((max(3, len(drawn.hosts)), 4, 5))
    hosts = {f"h{i}": {"memstore": "replica", "rack": f"r{i}"} for i in range(1, count + 1)}
    world_size = rng.choice((count, count, count, count + 1))
    parity, replicas = rng.choice((2, 3, 4)), 3 if count >= 4 and rng.random() < TWO_LOSSES_SHARE else 2
    return replace(drawn, hosts=hosts, replicas=replicas, parity=parity, world_size=world_size)


def without(scenario: NemesisScenario, kinds: Collection[str]) -> NemesisScenario:
    """Return the round without the faults of some kinds; the rest is as it was drawn."""
    return replace(scenario, faults=tuple(fault for fault in scenario.faults if fault.kind not in kinds))


def _with(scenario: NemesisScenario, faults: list[Fault], ending: str) -> NemesisScenario:
    fields = {"recovery_grace_s": 10.0, "detect": 3.0}
    job_fields = {
        "replicas": scenario.replicas,
        "parity": scenario.parity,
        "keep_steps": scenario.keep_steps,
        "in_flight": random.Random(f"in flight {scenario.seed}").choice((1, 1, 2)),  # apart: the rest stays as it was
        "stall_budget_s": scenario.stall_budget_s,
        "job_ttl_s": scenario.job_ttl_s,
    }
    return replace(scenario, faults=tuple(sorted(faults)), ending=ending, store_fields=fields, job_fields=job_fields)


def _random_faults(rng: random.Random, scenario: NemesisScenario, seconds: float) -> list[Fault]:
    kinds = weights("ray" if scenario.shape == "ray" else "processes")
    if scenario.shape == "kills":
        kinds = {kind: kinds[kind] for kind in KILLS}
    if not scenario.has_proxies:
        kinds = {kind: weight for kind, weight in kinds.items() if kind not in OF_LINKS}
    if not scenario.storage:
        kinds.pop("durable-broken", None)
    found, at_s = [], rng.uniform(0.5, 3.0)
    while at_s < seconds:
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        found.append(_fault(rng, at_s, kind, rng.choice((0.0, 0.3, 1.0, 2.5, 6.0))))
        at_s += rng.choice((0.2, 0.7, 1.5, 4.0))
    return found


def _fault(rng: random.Random, at_s: float, kind: str, for_s: float = 0.0, **chosen: Any) -> Fault:
    drawn = {"hosts": (rng.randrange(5),), "rank": rng.randrange(8), "count": rng.choice((1, 2))}
    return Fault(at_s, kind, for_s=for_s, **{**drawn, **chosen})


def _folder_then_train(rng: random.Random, scenario: NemesisScenario) -> list[Fault]:
    """Kill a holder, remove its arena file or folder, and start a new one while its rank trains."""
    at_s = rng.uniform(2.0, 4.0)
    return [_fault(rng, at_s, "replace-arena", rng.choice((0.0, 0.5, 2.0))), _fault(rng, at_s + 6.0, "read")]


def _days_then_restart(rng: random.Random, scenario: NemesisScenario) -> list[Fault]:
    """Train for longer than job_ttl_s, then kill everything and start it again."""
    at_s = scenario.job_ttl_s + rng.uniform(2.0, 4.0)
    return [_fault(rng, at_s, rng.choice(("reboot-all", "reboot-all", "kill-holder")), rng.uniform(0.0, 1.0))]


def _rack_then_host(rng: random.Random, scenario: NemesisScenario) -> list[Fault]:
    """Replace a rack host by host and end the job; the round's ending then loses a host of the other rack."""
    at_s, gap_s = rng.uniform(2.0, 4.0), rng.choice((0.3, 0.6, 1.2))
    of_rack = rng.sample([0, 1], 2)
    return [
        _fault(rng, at_s + n * gap_s, "kill-host", rng.choice((0.0, 0.3)), hosts=(index,))
        for n, index in enumerate(of_rack)
    ]


def _clock_back(rng: random.Random, scenario: NemesisScenario) -> list[Fault]:
    """Restart a holder or the controller with a clock that was set back or forth."""
    return [_fault(rng, rng.uniform(2.0, 4.0), "step-clock", rng.choice((0.0, 1.0)))]


def _memory_lost(rng: random.Random, scenario: NemesisScenario) -> list[Fault]:
    """Let storage fail for a while and work again, then lose the memory of all hosts."""
    at_s = rng.uniform(1.0, 2.0)
    broken = _fault(rng, at_s, "durable-broken", rng.choice((0.3, 1.5)))
    return [broken, _fault(rng, at_s + rng.uniform(6.0, 9.0), "lose-everything", rng.choice((0.0, 1.0)))]


def _live_folder(rng: random.Random, scenario: NemesisScenario) -> list[Fault]:
    """Remove files of a live holder's folder; in half of the rounds replace the controller then."""
    at_s = rng.uniform(2.0, 4.0)
    found = [_fault(rng, at_s, "remove-files")]
    if rng.random() < 0.5:
        found.append(_fault(rng, at_s + rng.uniform(0.5, 3.0), "kill-controller", 0.5))
    return found
