"""What the ranks of a generation of recovery in place report as they join, put together. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from memstore.core.attempts.gathering import Entrant
from memstore.core.cluster.facts import AttemptOpened
from memstore.core.cluster.job import Attempt, Job, Recovery
from memstore.core.wire.calls import InPlace, RankLoss
from memstore.core.wire.status_rows import ReplacedRow

# -- generation key -----------------------------------------------------------------------------------
# The launch key of a generation of recovery in place: its run and its number. Pure (R20).


_PREFIX = "in-place:"


def generation_key(run: str, number: int) -> str:
    """Return the launch key of a generation; `run` names the start of the whole worker group."""
    return f"{_PREFIX}{run}:{number}"


def run_of(key: str | None) -> str | None:
    """Return the run that a launch key names; None if it is of no generation of recovery in place."""
    parsed = _parsed(key)
    return parsed and parsed[0]


def newer_number(key: str | None, other: str | None) -> int | None:
    """Return the number of the generation that `other` names if it is a newer one of the same run than `key`'s."""
    mine, theirs = _parsed(key), _parsed(other)
    if mine is None or theirs is None or mine[0] != theirs[0] or mine[1] >= theirs[1]:
        return None
    return theirs[1]


def _parsed(key: str | None) -> tuple[str, int] | None:
    run, _, number = (key or "").removeprefix(_PREFIX).rpartition(":")
    is_one = key is not None and key.startswith(_PREFIX) and number.isascii() and number.isdigit()
    return (run, int(number)) if is_one else None


# -- in place -----------------------------------------------------------------------------------------


Arrival = tuple[float, Entrant, InPlace]  # when its join reached the controller


def recovery_before(fact: AttemptOpened, job: Job, joined: Mapping[str, Entrant]) -> Recovery | None:
    """Return the recovery that an attempt begins with; None for an ordinary launch, or one that another controller saw.

    The phases are those of the rank that joined last. If that process is new, it has none before the meeting: then
    they are those of the rank that tore down longest, for which the others waited.

    Args:
        fact: Of the attempt, which is not in the job yet.
        job: Of the attempt.
        joined: The processes that wait for it, by nonce.
    """
    entrants = [joined[nonce] for nonce in fact.nonces if nonce in joined]
    arrivals = [(each.call.since_s, each, each.in_place) for each in entrants if each.in_place is not None]
    if not arrivals:
        return None
    since_s, last, own = max(arrivals, key=lambda arrival: (arrival[0], arrival[2].build_s))
    slowest = max((each for *_, each in arrivals), key=lambda each: each.abort_s or 0.0)
    stayed = own if own.abort_s is not None else slowest
    losses = _losses_since(job, fact.key or "", arrivals)
    silent_s = losses[0].silent_s if losses else 0.0
    measured = {
        "detect": max(silent_s, stayed.detect_s or 0.0),
        "abort": stayed.abort_s,
        "replace": stayed.replace_s,
        "meet": own.meet_s,
        "rebuild": own.build_s,
    }
    return Recovery(
        _replaced(losses, job.newest, fact),
        last.rank,
        last.call.host_id,
        since_s,
        {phase: took_s for phase, took_s in measured.items() if took_s is not None},
    )


def _losses_since(job: Job, key: str, arrivals: list[Arrival]) -> list[RankLoss]:
    """Return the losses since the last generation that opened an attempt: one may break before its ranks connect."""
    run = run_of(key)
    attempts = [each for each in job.attempts.values() if run is not None and run_of(each.key) == run]
    before = max((each.generation for each in attempts), default=0)
    return [loss for _, _, each in arrivals for loss in each.losses if loss.generation > before]


def _replaced(losses: list[RankLoss], former: Attempt | None, fact: AttemptOpened) -> tuple[ReplacedRow, ...]:
    """Return one row for each rank: why it was lost first, and who has its place now."""
    firsts = {loss.rank: loss for loss in reversed(losses)}
    lasts = {loss.rank: loss for loss in losses}
    hosts = {member.rank: member.host_id for member in former.members.values()} if former else {}
    return tuple(
        ReplacedRow(
            rank=rank,
            host=hosts.get(rank, ""),
            to_host=fact.hosts[rank],
            cause=firsts[rank].cause,
            is_spare=lasts[rank].is_spare,
        )
        for rank in sorted(firsts)
        if rank < len(fact.hosts)
    )
