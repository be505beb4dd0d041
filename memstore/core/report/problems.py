"""What a person should know about a store, worst first: each with a cause, a time and a remedy. Pure (D283).

Reads nothing but the rows of a status answer, so that the text, `--json` and `--check` cannot disagree. A closed job
raises no alarm: its rows are notes, for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, get_args

from msgspec.structs import replace

from memstore.config import Config
from memstore.core.attempts.join import come_text
from memstore.core.cluster.text import listed, plural
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import (
    AttemptStatus,
    DurableStep,
    HostRow,
    HostStats,
    JobRow,
    LaunchRow,
    ProblemRow,
    RankGroup,
    RankPlace,
    ShortStep,
    TrainingStatus,
)

#: Severities, worst first: the newest committed step of a running job cannot be restored; a running job does not train;
#: the step barely can be restored; and facts worth knowing although every promise holds.
UNRECOVERABLE: Final = "unrecoverable"
STOPPED: Final = "stopped"
DEGRADED: Final = "degraded"
NOTE: Final = "note"
Severity = Literal["unrecoverable", "stopped", "degraded", "note"]
REMOVED_REMEDY = (
    "find what removes files there: systemd does when its user's last session ends (RemoveIPC=no in logind.conf, a "
    "system user, or `loginctl enable-linger USER`), cleaners of temporary files do (exclude arena_dir: `x "
    "/dev/shm/memstore-*` in tmpfiles.d)"
)
SHORT_ROWS_MAX = 3
DESCRIPTORS_SHORT = 0.95  # of the limit
DESCRIPTORS_GOOD = 65536
LAUNCH_IS_SLOW_S = 5.0  # ranks of one launch come within this of each other where nothing is wrong
CLOSED_SHOWN_S = 3600.0  # after it was closed; no longer than until another job runs
SEVERITIES = (UNRECOVERABLE, STOPPED, DEGRADED, NOTE)
Kind = Literal[
    "host_suspect", "host_dead", "host_drains", "host_full", "holder_nice", "over_limit",
    "host_warning", "descriptors", "files_removed", "damage_found", "launch_waits", "not_whole", "step_retired",
    "few_copies", "job_ended", "ranks_ended", "ranks_unseen", "rank_late", "training_quiet", "nothing_committed",
    "steps_skipped", "in_flight", "replicas_differ", "nonfinite", "placement", "durable_off", "durable_failed",
    "durable_missing", "durable_abandoned"
]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


def problems(hosts: list[HostRow], launches: list[LaunchRow], jobs: list[JobRow]) -> list[ProblemRow]:
    """Return what a person should know about these, worst first."""
    found: list[ProblemRow] = []
    for host in hosts:
        found += _host_problems(host, jobs)
    for launch in launches:
        found += _launch_problems(launch)
    is_any_open = any(job.newest is not None and job.newest.phase != "closed" for job in jobs)
    launching = {launch.job for launch in launches}
    for job in jobs:
        if job.newest is None:
            continue
        rows = [
            *_copy_problems(job.job, job.newest, hosts),
            *_training_problems(job.job, job.newest, hosts, is_launching=job.job in launching),
            *_job_problems(job.job, job.newest, hosts),
            *_durable_problems(job.job, job.newest),
        ]
        if job.newest.closed_s is None:
            found += rows
        elif job.newest.closed_s < CLOSED_SHOWN_S and not is_any_open:
            found += [replace(row, severity=NOTE) for row in rows]
    return sorted(found, key=lambda row: SEVERITIES.index(row.severity))


def with_commands(status: Status, config: Config) -> Status:
    """Return the status with the store named in the `memstore` commands that its problems tell to run."""
    rows = [
        replace(row, cause=config.commands(row.cause), remedy=config.commands(row.remedy)) for row in status.problems
    ]
    return replace(status, problems=rows)


def _row(kind: Kind, severity: Severity, about: str, cause: str, since_s: float | None, remedy: str) -> ProblemRow:
    return ProblemRow(kind=kind, severity=severity, about=about, cause=cause, since_s=since_s, remedy=remedy)


def _host_problems(host: HostRow, jobs: list[JobRow]) -> Iterator[ProblemRow]:
    name, status = host.host, host.status
    if status != "live":
        running = [job.newest for job in jobs if job.newest is not None and job.newest.phase != "closed"]
        is_needed = status == "suspect" or any(name in newest.rank_hosts.values() for newest in running)
        remedy = (
            "nothing to do yet: new work avoids it; silence for longer counts as its death"
            if status == "suspect"
            else "its copies are rebuilt on the other hosts; a replacement that joins gets its share by itself"
        )
        severity: Severity = DEGRADED if is_needed else NOTE
        kind: Kind = "host_suspect" if status == "suspect" else "host_dead"
        yield _row(kind, severity, name, f"{status}: {host.why}", host.status_s, remedy)
    if host.drains_s is not None and status != "dead":
        due_s = host.drains_s
        when = f"is to go in {due_s:.0f} s" if due_s > 0 else f"was to be gone {-due_s:.0f} s ago"
        cause = f"{when}: {drain_text(host.drain_short, host.drain_durable)}"
        remedy = f"`memstore drain {name} --cancel` if it stays"
        if host.drain_short:
            remedy = "; ".join([*drain_remedies(host), remedy])
        yield _row("host_drains", DEGRADED if host.drain_short else NOTE, name, cause, None, remedy)
    if host.stats is not None:
        yield from _stats_problems(name, host.stats, host.up_s)


def _stats_problems(name: str, stats: HostStats, up_s: float) -> Iterator[ProblemRow]:
    """Yield the problems that a holder names, or counts, in its heartbeat."""
    if stats.short_of_room:
        yield _row(
            "host_full",
            DEGRADED,
            name,
            f"cannot write beside its arena, so nothing new is stored there: {stats.short_of_room}",
            None,
            "remove what else lies in that file system, or enlarge it (mount -o remount,size=...); what waits is "
            "written by itself",
        )
    if stats.behind_ranks:
        yield _row(
            "holder_nice",
            NOTE,
            name,
            f"its holder stands behind training for a core ({stats.behind_ranks}), so where all cores compute a put is "
            "committed many times later",
            None,
            "start Ray with RAY_worker_niceness=0 in its environment, or start training with the holder's nice value "
            "(`nice -n`)",
        )
    yield from _limit_problems(name, stats)
    yield from _descriptor_problems(name, stats)
    lost = stats.files_lost
    if lost:
        is_now, problem = stats.files_lost_now, stats.files_problem
        after = "its holder wrote them again and was replaced"
        if is_now:
            after = f"they cannot be written again: {problem}" if problem else "they are being written again"
        yield _row(
            "files_removed",
            DEGRADED if is_now else NOTE,
            name,
            f"files of its arena's folder were removed ({lost}); {after}",
            up_s,
            REMOVED_REMEDY,
        )
    if stats.scrub:
        yield _row(
            "damage_found",
            NOTE,
            name,
            f"{stats.scrub} damaged chunks or manifests found since its holder started, to be replaced from a copy",
            up_s,
            f"`memstore verify` checks the rest; if it happens again, test the memory of {name}",
        )


def is_over_limit(stats: HostStats | None) -> bool:
    """Return whether jobs have reserved more on a host than its arena may have."""
    return stats is not None and max(stats.reserved_bytes, stats.claimed_bytes) > stats.limit_bytes


def _limit_problems(name: str, stats: HostStats) -> Iterator[ProblemRow]:
    if is_over_limit(stats):
        sizes = [
            f"{nbytes / 2**20:,.1f} MiB" for nbytes in (stats.reserved_bytes, stats.claimed_bytes, stats.limit_bytes)
        ]
        yield _row(
            "over_limit",
            DEGRADED,
            name,
            f"its arena has {sizes[0]} reserved and {sizes[1]} claimed, over the limit of "
            f"{sizes[2]} ({stats.limit_why}): nothing more is admitted",
            None,
            "`memstore rm` a job that is not needed, or `memstore down` and `memstore up` with a larger --arena-bytes",
        )
    if stats.limit_warning:
        yield _row("host_warning", NOTE, name, stats.limit_warning, None, "")


def _descriptor_problems(name: str, stats: HostStats) -> Iterator[ProblemRow]:
    used, limit = stats.descriptors, stats.descriptors_limit
    if not limit or used < DESCRIPTORS_SHORT * limit:
        return
    good, at_once = max(DESCRIPTORS_GOOD, 4 * limit), min(DESCRIPTORS_GOOD, stats.descriptors_hard)
    remedy = (
        f"`ulimit -n {good}`, LimitNOFILE={good} in the systemd unit or `docker run --ulimit nofile={good}` for what "
        "starts it (with Ray its raylet)"
    )
    if at_once > limit:
        remedy = f"`prlimit --nofile={at_once}: --pid {stats.pid}` there, at once; for its next start {remedy}"
    yield _row(
        "descriptors",
        DEGRADED,
        name,
        f"its holder has {used} of {limit} file descriptors open: at the limit it accepts no rank and no other host, "
        "and writes no file",
        None,
        remedy,
    )


def drain_remedies(host: HostRow) -> list[str]:
    """Return what lets a leaving host go that does not come about by itself."""
    remedies = [] if host.drain_may_come else ["add a host, or durable=, before it goes"]
    if jobs := sorted({row.job for row in host.drain_short if row.in_parity}):
        remedies = [f"start {_few(jobs)} again on other hosts: {host.host} can go after the next commit"]
        remedies += [
            f"or `memstore persist {job}`, if no rank puts any more" for job in jobs[:1] if host.drain_may_come
        ]
    return remedies


def drain_text(short: Sequence[ShortStep], durable: Sequence[DurableStep]) -> str:
    """Return what would be lost with a leaving host, as "train step 9: 1 of 2 copies elsewhere", or that it can go."""
    if short:
        return _few([_short_text(row) for row in short])
    parts = [f"step {row.step} of {row.job} is durable" for row in durable]
    return f"all it holds is on enough others{f', or in durable storage: {_few(parts)}' if parts else ''}"


def _short_text(row: ShortStep) -> str:
    text = f"{row.job} step {row.step}: {row.copies} of {row.replicas} copies elsewhere"
    if row.in_parity:
        text += f", since it keeps parity of {plural(row.shards, 'shard')}, which has no other place"
    return f"{text}, not durable yet: {row.durable_problem}" if row.durable_problem else text


def _few(parts: list[str]) -> str:
    """Return at most three of them, and how many more there are."""
    return ", ".join(parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _launch_problems(launch: LaunchRow) -> Iterator[ProblemRow]:
    """Yield a problem for each launch that is incomplete after a while."""
    if launch.since_s < LAUNCH_IS_SLOW_S:
        return
    what, call = ("a rewind", "rewind()") if launch.is_rewind else ("a launch", "connect()")
    does = "gathers" if launch.phase == "gathering" else "is under way"
    come = come_text(launch.ranks, launch.world_size, launch.missing)
    cause = f"{what} {does}: {come} after {launch.since_s:.0f} s, waiting for {launch.awaited}"
    remedy = "nothing to do yet: it goes on without what does not answer within seconds"
    if launch.missing:
        late = f"{'rank' if len(launch.missing) == 1 else 'ranks'} {listed(launch.missing)}"
        remedy = f"start {late}, or see in their logs why {call} was not called; the others give up in "
        remedy += f"{launch.left_s:.0f} s"
    yield _row("launch_waits", NOTE, launch.job, cause, None, remedy)


def _is_lost(newest: AttemptStatus) -> bool:
    """Return whether the newest committed step is not whole in RAM any more."""
    return any(row.level == "host" and row.tolerated < 0 for row in newest.survives)


def _copy_problems(name: str, newest: AttemptStatus, hosts: list[HostRow]) -> Iterator[ProblemRow]:
    """Yield a problem if there are fewer or nearer copies than asked, or none."""
    step = newest.committed_step
    if step is None:
        return
    if _is_lost(newest):
        severity: Severity = UNRECOVERABLE if newest.durable_step is None else DEGRADED
        yield _row(
            "not_whole",
            severity,
            name,
            f"committed step {step} is not whole in RAM any more{short_text(newest)}",
            newest.committed_s,
            f"`memstore plan {name}` shows what a restart would get; bring back a host that holds the rest",
        )
        return
    if newest.retired:
        way = f"`memstore verify {name}` lifts it" if not newest.is_torn else "the next commit takes its place"
        cause = f"committed step {step} is retired, a get passes it over: {newest.retired}"
        yield _row("step_retired", DEGRADED, name, cause, newest.committed_s, way)
    cause = f"committed degraded: {newest.degraded}" if newest.degraded else ""
    if newest.copies < newest.replicas:
        cause = cause or f"step {step} has {newest.copies} of {newest.replicas} copies"
        cause += short_text(newest)
        refusing = [text for text in newest.refusals if text not in cause]
        cause += f"; refused by {'; '.join(refusing)}" if refusing else ""
    if cause:
        yield _row("few_copies", DEGRADED, name, cause, newest.committed_s, _copies_remedy(newest, hosts))


def short_text(newest: AttemptStatus) -> str:
    """Return ": ranks 0, 1 on h2 only, to be rebuilt on h3" for the ranks that lack copies, "" if none is known."""
    rows = newest.short[:SHORT_ROWS_MAX]
    parts = []
    for row in rows:
        head = "rank" if len(row.ranks) == 1 else "ranks"
        left = f"on {', '.join(row.hosts)} only" if row.hosts else "on no host whole"
        way = f"to be rebuilt on {', '.join(row.targets)}" if row.targets else "not rebuilt"
        why = row.why_not
        way += (f" ({why})" if row.targets else f": {why}") if why else ""
        parts.append(f"{head} {listed(row.ranks)} {left}, {way}")
    more = newest.short_shards - sum(len(row.ranks) for row in rows)
    parts += [plural(more, "more rank")] if parts and more > 0 else []
    return f": {'; '.join(parts)}" if parts else ""


def _copies_remedy(newest: AttemptStatus, hosts: list[HostRow]) -> str:
    sending = sum(host.pushes for host in hosts)
    if newest.missing_copies and sending:
        return (
            f"none needed: repair is under way, {plural(newest.missing_copies, 'copy')} missing, {sending} being sent"
        )
    placed = len(newest.targets)
    if placed < newest.replicas:
        return (
            f"{plural(placed, 'host')} may hold its copies, replicas={newest.replicas} needs {newest.replicas}: add "
            "hosts with ranks of the job, or label spare ones memstore=replica"
        )
    if newest.is_level_finer:
        return f"it recovers when hosts in another {newest.level_asked} are back"
    if newest.refusals:
        return "make room where it was refused (`memstore rm`, a larger arena_bytes); repair tries again by itself"
    if newest.set_sizes and newest.short and not any(row.targets for row in newest.short):
        return "the next commit: its parity sets are of hosts that are there"
    return "none needed: repair begins by itself"


# -- training ------------------------------------------------------------------------------------------


def _training_problems(
    name: str, newest: AttemptStatus, hosts: list[HostRow], *, is_launching: bool
) -> Iterator[ProblemRow]:
    """Yield why a job that is not closed does not train, or commits nothing; each cause alone, the nearest first."""
    training = newest.training
    if training is None:
        return
    waits = "" if newest.committed_step is None else f"; committed step {newest.committed_step} waits for it"
    if waits and _is_lost(newest):
        waits = f" (`memstore plan {name}` shows what it would get)"
    if newest.ended_by:
        yield _row(
            "job_ended",
            NOTE if is_launching else STOPPED,
            name,
            f"ended by {newest.ended_by}",
            training.stopped_s,
            f"none needed: it is being started again{waits}"
            if is_launching
            else f"correct what that says, then start the job again{waits}; `memstore rm {name}` if it is over",
        )
        return
    if training.ended.count:
        cause, since_s = _ranks_text(training.ended, newest.world_size, "ended without closing the store")
        rest = "" if training.ended.count == newest.world_size else ", once the others have ended, too"
        remedy = f"see their logs for why, then start the job again{rest}{waits}; `memstore rm {name}` if it is over"
        if is_launching:
            remedy = f"none needed: it is being started again{waits}"
        yield _row("ranks_ended", NOTE if is_launching else STOPPED, name, cause, since_s, remedy)
    if training.unseen.count:
        cause, _ = _ranks_text(training.unseen, newest.world_size, "out of sight: no holder there answers for them")
        away = next((row.status_s for row in hosts if row.host == training.unseen.first[0].host), None)
        yield _row(
            "ranks_unseen",
            DEGRADED,
            name,
            cause,
            away,
            "do not restart them for that: they may train on, and a "
            "holder that comes back, or its successor, finds them again; only if the machine itself is lost, start the "
            f"job again{waits}",
        )
    if training.late.count:
        yield _late_problem(name, newest, training, waits)
    elif training.quiet_s > training.quiet_limit_s and not training.ended.count:
        yield _quiet_problem(name, newest, training, waits)
    elif (training.uncommitted_s or 0.0) > training.uncommitted_limit_s and not training.ended.count:
        after = "yet" if newest.committed_step is None else f"after step {newest.committed_step}"
        cause = f"ranks put up to step {newest.training_step} and nothing is committed {after}"
        cause += f": {newest.skip_why}" if newest.skipped_s is not None and newest.skip_why else ""
        remedy = _commit_remedy(name, newest, hosts)
        yield _row("nothing_committed", STOPPED, name, cause, training.uncommitted_s, remedy)


def _late_problem(name: str, newest: AttemptStatus, training: TrainingStatus, waits: str) -> ProblemRow:
    first = training.late.first[0]
    after = f"since step {first.step}" if first.step >= 0 else "yet"
    others = f" and {plural(training.late.count - 1, 'other')}" if training.late.count > 1 else ""
    did = f"closed the store after step {first.step}" if first.has_closed else f"put nothing {after}"
    cause = f"ranks put up to step {newest.training_step}, but rank {first.rank} on {first.host}{others} has {did}"
    way = (
        "every rank has to put the same steps, to the end"
        if first.has_closed
        else f"look at {_process(first)}: if it is stopped (state T in `ps`) `kill -CONT`; if it hangs end it and all "
        "other ranks, and start the job again"
    )
    return _row("rank_late", STOPPED, name, cause, first.since_s, way + waits)


def _quiet_problem(name: str, newest: AttemptStatus, training: TrainingStatus, waits: str) -> ProblemRow:
    cause = "no rank has put anything" + ("" if newest.training_step < 0 else f" beyond step {newest.training_step}")
    usual = (
        "nothing is known of its pace" if training.interval_s is None else f"usually one in {training.interval_s:.2g} s"
    )
    where = f" ({_process(training.example)} for one)" if training.example is not None else ""
    remedy = (
        f"see where the ranks are{where}: an evaluation or a compilation that takes longer than the pauses before is "
        "no fault; if they hang, in a collective or in the data loader, end them all and start the job again"
    )
    return _row("training_quiet", STOPPED, name, f"{cause}, {usual}", training.quiet_s, remedy + waits)


def _process(place: RankPlace) -> str:
    """Return "rank 1 (`py-spy dump --pid 4711` on h2)"."""
    return f"rank {place.rank} (`py-spy dump --pid {place.pid}` on {place.host})" if place.pid else f"rank {place.rank}"


def _ranks_text(group: RankGroup, world_size: int, what: str) -> tuple[str, float | None]:
    """Return "rank 1 of 4 (on h2, pid 4711, put up to step 13) ...", and since when."""
    since_s = max((row.since_s for row in group.first if row.since_s is not None), default=None)
    texts = []
    for row in group.first[:SHORT_ROWS_MAX]:
        put = f"put up to step {row.step}" if row.step >= 0 else "put nothing"
        texts.append(f"rank {row.rank} on {row.host}{f', pid {row.pid}' if row.pid else ''}, {put}")
    more = f" and {group.count - len(texts)} more" if group.count > len(texts) else ""
    verb = f"{'are ' if group.count > 1 else 'is '}{what}" if what.startswith("out of") else what
    return f"{group.count} of {plural(world_size, 'rank')} {verb} ({'; '.join(texts)}{more})", since_s


def _commit_remedy(name: str, newest: AttemptStatus, hosts: list[HostRow]) -> str:
    """Return what brings commits back, by what keeps them away."""
    away = [host.host for host in hosts if host.status != "live"]
    if newest.training is not None and newest.training.puts_differ:
        return "have all ranks put the same steps: should_put() says so on all alike, a rank's own clock does not"
    if newest.training is not None and newest.training.unseen.count:
        return "none needed but for the ranks out of sight above"
    if away:
        return f"wait for {', '.join(away[:3])}, see above: it answers again, or its copies go elsewhere"
    if newest.is_skip_for_room:
        return (
            "put less often, or raise stall_budget_s if training may wait, or in_flight where memory is there: copies "
            "come slower than steps are put"
        )
    return f"`memstore events {name} --level problem` shows each skipped step and each host's trouble"


def _job_problems(name: str, newest: AttemptStatus, hosts: list[HostRow]) -> Iterator[ProblemRow]:
    if newest.skipped_s is not None:
        why = newest.skip_why or "the controller that got the reason is gone, the log of its rank has it"
        remedy = _commit_remedy(name, newest, hosts)
        if newest.training is not None and newest.training.stopped_s:
            remedy = "see above"
        yield _row(
            "steps_skipped",
            NOTE,
            name,
            f"{plural(newest.skipped, 'step')} skipped; the newest: {why}",
            newest.skipped_s,
            remedy,
        )
    if newest.in_flight_lack:
        way = "a larger arena_bytes, from the next launch on; or a lower in_flight"
        yield _row("in_flight", NOTE, name, newest.in_flight_lack, None, way)
    for pair in newest.replicas_differ:
        first, second = pair.ranks
        where = ", ".join(pair.names[:3]) or "bytes of unknown tensors"
        yield _row(
            "replicas_differ",
            NOTE,
            name,
            f"ranks {first} and {second} name one shard and differ since step {pair.step} in {where}",
            pair.since_s,
            "a missing all-reduce, state that is a rank's own (put it with rank_state=), or a broken device",
        )
    for rank in newest.nonfinite:
        text = f"rank {rank.rank} puts NaN or infinity since step {rank.step}, in {', '.join(rank.names[:3])}"
        way = 'go back to a good step, with get(trusted=True) or rewind(); on_nonfinite="skip" keeps it from now on'
        yield _row("nonfinite", NOTE, name, text, None, way)
    is_said = newest.committed_step is not None and newest.copies < newest.replicas  # with its remedy
    for text in () if is_said else (*newest.warnings, *newest.unmet):
        way = "add hosts, or labels for the failure domains they lie in; or ask for fewer replicas"
        yield _row("placement", NOTE, name, text, None, way)


def _durable_problems(name: str, newest: AttemptStatus) -> Iterator[ProblemRow]:
    if newest.durable is None:
        host = next((row for row in newest.survives if row.level == "host"), None)
        if newest.committed_step is None or host is None or host.tolerated < 0:
            return
        fatal = ", ".join(host.fatal[:10])
        more = f" and {len(host.fatal) - 10} more" if len(host.fatal) > 10 else ""
        loses = f"losing {fatal}{more} now" if fatal else f"losing {host.tolerated + 1} hosts at once"
        can = "loses" if fatal else "can lose"
        yield _row(
            "durable_off",
            NOTE,
            name,
            f"durable off: {loses} {can} the run",
            None,
            'connect with Config(durable="/a/shared/directory")',
        )
    elif newest.durable_problem:
        yield _row(
            "durable_failed",
            DEGRADED,
            name,
            f"durable {newest.durable}: {newest.durable_problem}",
            newest.durable_s,
            "fix that, on every host where it is so; the next write is tried by itself",
        )
    elif newest.durable_unseen:
        yield _row(
            "durable_missing",
            DEGRADED,
            name,
            f"durable {newest.durable}: {newest.durable_unseen}",
            newest.durable_seen_s,
            "find what removes files there, or keeps it from being read; what is in RAM is written again by itself, "
            "and it is looked at every minute until all is there",
        )
    elif newest.durable_abandoned:
        yield _row(
            "durable_abandoned",
            NOTE,
            name,
            f"{plural(newest.durable_abandoned, 'durable write')} abandoned for a newer one",
            newest.durable_s,
            "faster storage, or a larger durable_every",
        )


def worst(rows: list[ProblemRow]) -> str | None:
    """Return the worst severity among rows, None if there is none."""
    return min((row.severity for row in rows), key=SEVERITIES.index, default=None)
