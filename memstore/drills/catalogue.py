"""Every drill: what it breaks, what it touches, what is promised. To add one: an entry here and its scene.

The scene is a class of the same name in the `scenes_*.py` of its family.
"""

from __future__ import annotations

from typing import Any

from memstore.drills.catalogue_network import NETWORK_DRILLS
from memstore.drills.promises import GOES_ON, LOCAL_ONLY, RUNNING, Drill, Promise
from memstore.errors import ConfigError

DRILLS = {
    drill.name: drill
    for drill in (
        Drill(
            "kill-rank", "ranks",
            "one rank, with SIGKILL in the middle of its puts",
            "one process of the drill's own",
            LOCAL_ONLY,
            "a rank, and the memory of every host with a copy of its shard",
        ),
        Drill(
            "kill-holder", "holders",
            "the process that owns one host's arena; the arena stays",
            "one holder, which the store replaces: puts on its host wait or skip for some seconds",
            LOCAL_ONLY,
            "the holder with its arena, and the memory of every host with a copy of the same shard",
            needs_victim=True,
        ),
        Drill(
            "freeze-holder", "holders",
            "the process that owns one host's arena stops for some seconds (SIGSTOP) and goes on, while all ranks put",
            "one holder: puts on its host wait or skip while it is frozen",
            Promise("no put raises, every stall within its budget, commits go on and copies are complete again"),
            flow=GOES_ON, needs_victim=True,
        ),
        Drill(
            "kill-host", "hosts",
            "every process of one host, and its memory",
            "one host: on a running cluster only its holder, its arena of this store and the drill's own ranks",
            Promise("0 steps lost, from peer RAM, durable untouched", frozenset({"peer", "mixed"}), needs="peer"),
            "that host and every other host with a copy of its ranks' shards",
            needs_victim=True,
        ),
        Drill(
            "kill-controller", "control plane",
            "the process that decides commits, while ranks put",
            "the controller, which Ray restarts: commits of every job of the store stop for some seconds",
            LOCAL_ONLY,
            "the controller, and the memory of every host with a copy of one shard",
        ),
        Drill(
            "corrupt-chunk", "storage",
            "bytes of one chunk in one copy, in the arena file",
            "one chunk of the drill's own job",
            Promise(
                "found by verify, never served, repaired from a peer, 0 steps lost",
                frozenset({"local", "peer", "mixed"}),
            ),
            "the same chunk in every copy",
            beyond_runs_on=("embedded", RUNNING),
        ),
        Drill(
            "durable-error", "storage",
            "the durable directory of the scratch job: every write to it fails until it is mended, while all ranks put",
            "a directory of the drill's own",
            Promise(
                "no put raises, every stall within its budget, commits go on meanwhile, the status names the error, "
                "a durable step follows once it is mended",
                has_commits_meanwhile=True,
            ),
            flow=GOES_ON, needs_durable=True,
        ),
        *NETWORK_DRILLS,
    )
}  # fmt: skip


def find(name: str) -> Drill:
    """Return a drill by name; ConfigError that lists them all if there is none."""
    if name not in DRILLS:
        raise ConfigError(f"there is no drill {name!r}: use one of {', '.join(DRILLS)}", field="drill", value=name)
    return DRILLS[name]


def rows() -> list[dict[str, Any]]:
    """Return what `drill list --json` prints."""
    return [
        {
            "drill": d.name, "family": d.family, "breaks": d.breaks, "touches": d.touches, "promised": d.promise.words,
            "beyond": d.beyond, "ranks": "restarted" if d.flow != GOES_ON else "go on", "runs_on": list(d.runs_on),
            "beyond_runs_on": list(d.beyond_runs_on) if d.beyond else [], "needs_victim": d.needs_victim,
            "suites": ["standard", "full"] if d.is_standard else ["full"],
        }
        for d in DRILLS.values()
    ]  # fmt: skip
