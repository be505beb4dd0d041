"""The network family of the catalogue: drills on hosts in network namespaces."""

from __future__ import annotations

from memstore.drills.model.promises import GOES_ON, NAMESPACES, Drill, Promise

TOUCHES = "hosts of the drill's own, in network namespaces"
NETWORK_DRILLS = tuple(
    Drill(
        name, "network", breaks, TOUCHES, promise, beyond, flow=GOES_ON, runs_on=(NAMESPACES,),
        beyond_runs_on=(NAMESPACES,), is_standard=is_standard,
    )
    for name, breaks, promise, beyond, is_standard in (
        (
            "partition-half",
            "the network splits in halves, the controller on the side that cannot reach what elects controllers",
            Promise(
                "that side commits nothing, the other elects a controller and commits; healed, no step was committed "
                "twice with other bytes, commits go on and copies are complete again"
            ),
            "every copy of a shard is on the side that stays cut off",
            True,
        ),
        (
            "partition-one-way",
            "packets from one host to the host with its copies vanish, the other way they arrive; both reach the "
            "controller",
            Promise(
                "no put raises, every stall within its budget, no host counts as dead, commits go on once healed"
            ),
            None,
            False,
        ),
        (
            "slow-link",
            "one host's link has 10 Mbit/s while all ranks put",
            Promise(
                "no put raises, every stall within its budget, a step put over the slow link is committed within 60 s",
                has_commits_meanwhile=True,
            ),
            None,
            False,
        ),
        (
            "swizzle-clog",
            "links of a random part of the hosts are cut one by one, and come back in another order",
            Promise("no put raises, every stall within its budget, commits go on and copies are complete again"),
            None,
            False,
        ),
        (
            "flip-in-transit",
            "bits of chunks flip between a host and the host with its copies",
            Promise(
                "every damaged chunk is counted and sent again, none is stored, commits go on meanwhile",
                has_commits_meanwhile=True,
            ),
            None,
            True,
        ),
        (
            "cable-pulled",
            "the link of one host goes down while a shard of its rank is half across",
            Promise("no put raises, every stall within its budget, commits go on and copies are complete again"),
            None,
            True,
        ),
    )
)  # fmt: skip
