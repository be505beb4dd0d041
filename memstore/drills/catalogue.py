"""What each drill breaks, what it touches, and what is promised; its twin loses more than the store tolerates."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.errors import ConfigError

REFUSED = "refused"  # a verdict of ours: get() raised RecoveryError on every rank


@dataclass(frozen=True)
class Promise:
    """The outcome a drill must end in.

    `verdicts` are the restore's allowed verdicts; `tiers` the tiers whose bytes may be above zero, `needs` the one
    whose bytes must be.
    """

    words: str
    verdicts: frozenset[str]
    tiers: frozenset[str] = frozenset({"local", "peer"})
    needs: str | None = None
    is_lossless: bool = True


@dataclass(frozen=True)
class Drill:
    """One entry of `memstore drill list`."""

    name: str
    breaks: str
    touches: str
    promise: Promise
    beyond: str  # what the must-fail twin loses


LOCAL_ONLY = Promise(
    "0 steps lost, every rank from its own host's RAM, 0 bytes from peers", frozenset({"local"}), frozenset({"local"})
)
BEYOND_REFUSED = Promise(
    "a refusal that names ranks and hosts, on every rank alike", frozenset({REFUSED}), frozenset(), is_lossless=False
)
BEYOND_DURABLE = Promise(
    "the durable step, older, on every rank alike",
    frozenset({"durable", "mixed"}), frozenset({"local", "peer", "durable"}), "durable", is_lossless=False,
)  # fmt: skip

DRILLS = {
    drill.name: drill
    for drill in (
        Drill(
            "kill-host",
            "every process of one host, and its memory",
            "one host: on a running cluster only its holder, its arena of this store and the drill's own ranks",
            Promise("0 steps lost, from peer RAM, durable untouched", frozenset({"peer", "mixed"}), needs="peer"),
            "that host and every other host with a copy of its ranks' shards",
        ),
        Drill(
            "kill-rank",
            "one rank, with SIGKILL in the middle of its puts",
            "one process of the drill's own",
            LOCAL_ONLY,
            "a rank, and the memory of every host with a copy of its shard",
        ),
        Drill(
            "kill-holder",
            "the process that owns one host's arena; the arena stays",
            "one holder, which the store replaces: puts on its host wait or skip for some seconds",
            LOCAL_ONLY,
            "the holder with its arena, and the memory of every host with a copy of the same shard",
        ),
        Drill(
            "kill-controller",
            "the process that decides commits, while ranks put",
            "the controller, which Ray restarts: commits of every job of the store stop for some seconds",
            LOCAL_ONLY,
            "the controller, and the memory of every host with a copy of one shard",
        ),
        Drill(
            "corrupt-chunk",
            "bytes of one chunk in one copy, in the arena file",
            "one chunk of the drill's own job",
            Promise(
                "found by verify, never served, repaired from a peer, 0 steps lost",
                frozenset({"local", "peer", "mixed"}),
            ),
            "the same chunk in every copy",
        ),
    )
}


def find(name: str) -> Drill:
    """Return a drill by name; ConfigError that lists them all if there is none."""
    if name not in DRILLS:
        raise ConfigError(f"there is no drill {name!r}: use one of {', '.join(DRILLS)}", field="drill", value=name)
    return DRILLS[name]


def promised(drill: Drill, *, is_beyond: bool, has_durable: bool) -> Promise:
    """Return what a run must end in."""
    if not is_beyond:
        return drill.promise
    return BEYOND_DURABLE if has_durable else BEYOND_REFUSED
