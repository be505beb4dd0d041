"""What `memstore status`, `plan` and `page` say of jobs, hosts, problems and losses: the texts of their cells. Pure."""

from __future__ import annotations

import math

from msgspec.structs import replace

from memstore.core.cluster.text import age_text, lost_text, plural, size_text
from memstore.core.cluster.text import ranks_text as named_ranks
from memstore.core.report.problems import drain_text, is_over_limit
from memstore.core.report.redundancy import beyond_text
from memstore.core.wire.codec import fields_of
from memstore.core.wire.replies import Plan
from memstore.core.wire.status_rows import (
    AttemptStatus,
    GoodputRow,
    HostRow,
    JobRow,
    LaunchRow,
    ProblemRow,
    SurvivalRow,
)

STARTS_MAX = 8  # hosts named on which ranks of lost hosts would start
JOB_HEADS = ("JOB", ">ATT", ">RANKS", ">TRAINING", "NEWEST COMMITTED", "AT RISK NOW", "COPIES", "SURVIVES", "DURABLE")


def job_cells(jobs: list[JobRow], launches: list[LaunchRow]) -> list[tuple[str, ...]]:
    """Return a row under JOB_HEADS for each job, which answers: what do I lose if something dies now?"""
    begun = {row.job: f"{row.phase} {row.ranks}/{row.world_size}" for row in launches}
    found = [(name, "-", begun[name], *["-"] * 6) for name in sorted(begun.keys() - {job.job for job in jobs})]
    for job in jobs:
        newest, ranks = job.newest, begun.get(job.job)
        if newest is None:
            found.append((job.job, "-", ranks or "-", *["-"] * 6))
            continue
        is_open, step = newest.phase != "closed", newest.committed_step
        found.append(
            (
                job.job,
                str(job.attempt),
                ranks or ranks_text(newest),
                f"{newest.training_step:,}" if newest.training_step >= 0 else "-",
                "nothing yet" if step is None else f"{step:,} ({age_text(newest.committed_s)} ago)",
                at_risk(newest) if is_open else "-",
                "-" if step is None else copies_text(newest),
                "-" if step is None else survives_text(newest.survives) + beyond_text(newest.odds),
                durable_text(newest),
            )
        )
    return found


def goodput_text(row: GoodputRow | None) -> str:
    """Return "96.1 % of 7 d trained and kept; 14 outages: 19 min down (...), at least 31 steps (62 s) lost", or ""."""
    if row is None or row.total_s <= 0:
        return ""
    since = "" if row.is_whole else f" since {age_text(row.since_s)} ago, when this controller began"
    percent = math.floor(1000 * row.kept_s / row.total_s) / 10
    parts = [f"{percent:.1f} % of {age_text(row.total_s)} trained and kept{since}"]
    down = ", ".join(f"{phase.replace('_', ' ')} {age_text(took_s)}" for phase, took_s in row.down_s.items())
    down = f"{age_text(sum(row.down_s.values()))} down ({down})" if down else "never down"
    parts.append(f"{plural(row.outages, 'outage')}: {down}" if row.outages else f"no outage, {down}")
    if row.lost_steps:
        parts[-1] += f", at least {plural(row.lost_steps, 'step')} ({age_text(row.lost_s)}) trained and lost"
    if row.taken_back_steps:
        parts.append(f"{plural(row.taken_back_steps, 'step')} ({age_text(row.taken_back_s)}) taken back by choice")
    return "; ".join(parts)


def ranks_text(newest: AttemptStatus) -> str:
    """Return "4/4", "3/4 !" where the job does not train, "ended !" by an exception, or "closed"."""
    training = newest.training
    if training is None or newest.phase == "closed":
        return "ended !" if newest.ended_by else newest.phase
    return f"{newest.ranks_alive}/{newest.world_size}{' !' if training.stopped_s else ''}"


def at_risk(newest: AttemptStatus) -> str:
    """Return the cost of a death of every rank now, in steps put and in time."""
    if newest.committed_step is None:
        return "everything so far"
    steps = max(0, newest.training_step - newest.committed_step)
    return f"{plural(steps, 'step')} / {age_text(newest.committed_s)}"


def copies_text(newest: AttemptStatus) -> str:
    """Return "2 of 2", "parity 4+1" by the sets that there are, or "parity 4+1, 1 of 2 !" where something lacks."""
    spare, is_short = newest.replicas - 1, newest.copies < newest.replicas
    found = [f"parity {size - spare}+{spare}" if size else "copies" for size in newest.set_sizes]
    if is_short or not found:
        found.append(f"{newest.copies} of {newest.replicas}{' !' if is_short else ''}")
    return ", ".join(found)


def survives_text(rows: list[SurvivalRow]) -> str:
    """Return "any 1 rack, any 1 host", from the copies that are there."""
    held = [f"any {plural(row.tolerated, row.level)}" for row in rows if row.tolerated > 0]
    if held:
        return ", ".join(held)
    return "the processes only" if rows[-1].tolerated == 0 else "not whole in RAM !"


def durable_text(newest: AttemptStatus) -> str:
    """Return the newest durable step and when it was last seen there, "off" or "none yet"; "!" needs attention."""
    if newest.durable is None:
        return "off !"
    text, seen_s = "none yet", newest.durable_seen_s
    if newest.durable_step is not None:
        text = f"{newest.durable_step:,} ({f'seen {age_text(seen_s)} ago' if seen_s is not None else 'not seen yet'})"
    return f"{text} !" if newest.durable_problem or newest.durable_unseen else text


def holds_text(host: HostRow) -> str:
    """Return whose newest committed shards lie there, or in parity: "own + h02", "own + parity of 4 hosts"."""
    found = ["own" if owner == host.host else owner for owner in host.holds]
    found += [f"parity of {plural(len(host.keeps_parity_of), 'host')}"] if host.keeps_parity_of else []
    return " + ".join(found) or "-"


def state_text(host: HostRow) -> str:
    """Return "ok", its present work, its notice, or since when and why it is not live."""
    if host.status != "live":
        return f"{host.status} {age_text(host.status_s)}: {host.why} !"
    if host.drains_s is not None:
        if host.drain_may_come:
            what = "make durable" if any(row.in_parity for row in host.drain_short) else "copy"
            return f"draining: {plural(host.drain_left, 'shard')} to {what}"
        return (
            f"draining: {drain_text(host.drain_short, host.drain_durable)} !" if host.drain_left else "draining: can go"
        )
    if host.pushes:
        return f"repairing: sending {plural(host.pushes, 'shard')}"
    if is_over_limit(host.stats):
        return "over its limit !"
    return "ok"


def by_cause(rows: list[ProblemRow]) -> list[ProblemRow]:
    """Return the rows with those of one cause and remedy as one, about all of them: "train, eval and 4 more"."""
    together: dict[tuple[str, str, str], list[ProblemRow]] = {}
    for row in rows:
        together.setdefault((row.severity, row.cause, row.remedy), []).append(row)
    found = []
    for same in together.values():
        about = [row.about for row in same]
        more = f" and {len(about) - 3} more" if len(about) > 3 else ""
        ages_s = [row.since_s for row in same if row.since_s is not None]
        found.append(replace(same[0], about=", ".join(about[:3]) + more, since_s=max(ages_s, default=None)))
    return found


def problem_line(row: ProblemRow) -> str:
    """Return one "!" line: about what, cause, time, remedy."""
    since = f" ({age_text(row.since_s)} ago)" if row.since_s is not None else ""
    return f"! {row.about}: {row.cause}{since}." + (f"  Remedy: {row.remedy}" if row.remedy else "")


def outcome(plan: Plan) -> str:
    """Return "whole", "older", "lost", "wait", or "nothing" for a job that has committed nothing."""
    if plan.verdict == "wait":
        return "wait"
    if plan.step is None:
        return "lost" if plan.committed_step is not None else "nothing"
    committed = plan.committed_step
    return "older" if committed is not None and plan.step < committed else "whole"


def verdict_line(plan: Plan) -> str:
    """Return the one line that answers the question."""
    lost, step, committed = ", ".join(plan.lost_hosts), plan.step, plan.committed_step
    head = f"{plan.job}: losing {lost} now" if lost else f"{plan.job}: get() now"
    kind = outcome(plan)
    if kind == "lost":
        return f"{head} loses the run: {plan.why}" if lost else f"{head} raises RecoveryError: {plan.why}"
    if kind == "nothing":
        loss = "loses everything" if lost else "returns None"
        return f"{head} {loss}: no step is committed yet"
    if kind == "wait":
        return f"{head}: not known yet: {plan.why}"
    committed_lost, steps_lost = (committed or 0) - (step or 0) if kind == "older" else 0, plan.steps_lost or 0
    words = f"{head} restores step {step:,} ({plan.verdict}), {plural(committed_lost, 'committed step')} lost"
    if steps_lost > committed_lost:
        words += f", {lost_text(steps_lost)} in all"
    ranks, asked = plan.step_world_size or plan.world_size, plan.world_size
    other = f"; it is of {plural(ranks, 'rank')}: a get() of the newest launch's {asked} raises WorldSizeError"
    return words + (other if ranks != asked else "")


def moved_text(plan: Plan) -> str:
    """Return how many ranks would start on a host without their copy, and the bytes they fetch (R27)."""
    ranks = plural(len(plan.ranks_moved), "rank")
    return f"{ranks} moved, {size_text(plan.moved_bytes)} for them" if plan.ranks_moved else f"{ranks} moved"


def plan_lines(plan: Plan) -> list[str]:
    """Return the answer, then from where the bytes come, where ranks would start, and which steps are passed over."""
    found = [verdict_line(plan)]
    if plan.unlisted:
        found.append(f"{plan.unlisted}: a get() lists them first, and may find a newer step there")
    if plan.step is not None:
        sizes = " · ".join(f"{size_text(nbytes)} {tier}" for tier, nbytes in fields_of(plan.bytes).items())
        fed = sum(sent.nbytes for sent in plan.transfers if sent.tier == "decoding")
        sizes += f" · {size_text(fed)} of it to hosts that decode" if fed else ""
        found.append(f"{sizes} · {moved_text(plan)}")
    starts = list(plan.starts_on.items()) if plan.step is not None else []
    for host, starting in starts[:STARTS_MAX]:
        who = f"{named_ranks(starting)} of the lost hosts {'is' if len(starting) == 1 else 'are'}"
        found.append(f"{who} taken to start on {host}: started on a new host, all their bytes come from peers")
    if len(starts) > STARTS_MAX:
        found.append(f"ranks of the lost hosts are taken to start on {plural(len(starts) - STARTS_MAX, 'more host')}")
    is_said = outcome(plan) == "lost"  # the newest one is the answer's reason already
    rejected = plan.rejected[int(is_said) : 3]
    return found + [f"not used: step {each.step:,} of attempt {each.attempt}: {each.reason}" for each in rejected]
