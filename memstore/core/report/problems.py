"""What a person should know about a store, worst first: each with a cause, a time and a remedy. Pure.

Reads nothing but the rows of a status answer, so that the text, `--json` and `--check` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from msgspec.structs import replace

from memstore.config import Config
from memstore.core.attempts.launches import come_text
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
    ShortStep,
)

#: Severities, worst first: the newest committed step of some job cannot be restored; barely can be;
#: and facts worth knowing although every promise holds.
UNRECOVERABLE: Final = "unrecoverable"
DEGRADED: Final = "degraded"
NOTE: Final = "note"
Severity = Literal["unrecoverable", "degraded", "note"]
REMOVED_REMEDY = (
    "find what removes files there: systemd does when its user's last session ends (RemoveIPC=no in logind.conf, a "
    "system user, or `loginctl enable-linger USER`), cleaners of temporary files do (exclude arena_dir: `x "
    "/dev/shm/memstore-*` in tmpfiles.d)"
)
SHORT_ROWS_MAX = 3
DESCRIPTORS_SHORT = 0.95  # of the limit
DESCRIPTORS_GOOD = 65536
LAUNCH_IS_SLOW_S = 5.0  # ranks of one launch come within this of each other where nothing is wrong
SEVERITIES = (UNRECOVERABLE, DEGRADED, NOTE)


def problems(hosts: list[HostRow], launches: list[LaunchRow], jobs: list[JobRow]) -> list[ProblemRow]:
    """Return what a person should know about these, worst first."""
    found: list[ProblemRow] = []
    for host in hosts:
        found += _host_problems(host, jobs)
    for launch in launches:
        found += _launch_problems(launch)
    for job in jobs:
        if job.newest is not None:
            found += _copy_problems(job.job, job.newest, hosts)
            found += _job_problems(job.job, job.newest)
            found += _durable_problems(job.job, job.newest)
    return sorted(found, key=lambda row: SEVERITIES.index(row.severity))


def with_commands(status: Status, config: Config) -> Status:
    """Return the status with the store named in the `memstore` commands that its problems tell to run."""
    rows = [
        replace(row, cause=config.commands(row.cause), remedy=config.commands(row.remedy)) for row in status.problems
    ]
    return replace(status, problems=rows)


def _row(severity: Severity, about: str, cause: str, since_s: float | None, remedy: str) -> ProblemRow:
    return ProblemRow(severity=severity, about=about, cause=cause, since_s=since_s, remedy=remedy)


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
        yield _row(DEGRADED if is_needed else NOTE, name, f"{status}: {host.why}", host.status_s, remedy)
    if host.drains_s is not None and status != "dead":
        cause = f"is to go in {host.drains_s:.0f} s: {drain_text(host.drain_short, host.drain_durable)}"
        remedy = f"`memstore drain {name} --cancel` if it stays"
        if host.drain_short and not host.drain_may_come:
            remedy = f"add a host, or durable=, before it goes; {remedy}"
        yield _row(DEGRADED if host.drain_short else NOTE, name, cause, None, remedy)
    if host.stats is not None:
        yield from _stats_problems(name, host.stats, host.up_s)


def _stats_problems(name: str, stats: HostStats, up_s: float) -> Iterator[ProblemRow]:
    """Yield the problems that a holder names, or counts, in its heartbeat."""
    if stats.short_of_room:
        yield _row(
            DEGRADED, name,
            f"cannot write beside its arena, so nothing new is stored there: {stats.short_of_room}", None,
            "remove what else lies in that file system, or enlarge it (mount -o remount,size=...); what waits is "
            "written by itself",
        )  # fmt: skip
    if stats.short_of_idle:
        yield _row(
            NOTE, name,
            f"the network is idle for too short between collectives to carry the copies: {stats.short_of_idle}", None,
            "put less often or less (bf16 states, shared shards), or accept that the rest travels beside them",
        )  # fmt: skip
    if stats.behind_ranks:
        yield _row(
            NOTE, name,
            f"its holder stands behind training for a core ({stats.behind_ranks}), so where all cores compute a put is "
            "committed many times later", None,
            "start Ray with RAY_worker_niceness=0 in its environment, or start training with the holder's nice value "
            "(`nice -n`)",
        )  # fmt: skip
    yield from _limit_problems(name, stats)
    yield from _descriptor_problems(name, stats)
    lost = stats.files_lost
    if lost:
        is_now, problem = stats.files_lost_now, stats.files_problem
        after = "its holder wrote them again and was replaced"
        if is_now:
            after = f"they cannot be written again: {problem}" if problem else "they are being written again"
        yield _row(
            DEGRADED if is_now else NOTE, name, f"files of its arena's folder were removed ({lost}); {after}",
            up_s, REMOVED_REMEDY,
        )  # fmt: skip
    if stats.scrub:
        yield _row(
            NOTE, name,
            f"{stats.scrub} damaged chunks or manifests found since its holder started, to be replaced from a copy",
            up_s, f"`memstore verify` checks the rest; if it happens again, test the memory of {name}",
        )  # fmt: skip


def is_over_limit(stats: HostStats | None) -> bool:
    """Return whether jobs have reserved more on a host than its arena may have."""
    return stats is not None and max(stats.reserved_bytes, stats.claimed_bytes) > stats.limit_bytes


def _limit_problems(name: str, stats: HostStats) -> Iterator[ProblemRow]:
    if is_over_limit(stats):
        sizes = [
            f"{nbytes / 2**20:,.1f} MiB" for nbytes in (stats.reserved_bytes, stats.claimed_bytes, stats.limit_bytes)
        ]
        yield _row(
            DEGRADED, name, f"its arena has {sizes[0]} reserved and {sizes[1]} claimed, over the limit of "
            f"{sizes[2]} ({stats.limit_why}): nothing more is admitted", None,
            "`memstore rm` a job that is not needed, or `memstore down` and `memstore up` with a larger --arena-bytes",
        )  # fmt: skip
    if stats.limit_warning:
        yield _row(NOTE, name, stats.limit_warning, None, "")


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
        DEGRADED, name, f"its holder has {used} of {limit} file descriptors open: at the limit it accepts no "
        "rank and no other host, and writes no file", None, remedy,
    )  # fmt: skip


def drain_text(short: Sequence[ShortStep], durable: Sequence[DurableStep]) -> str:
    """Return what would be lost with a leaving host, as "train step 9: 1 of 2 copies elsewhere", or that it can go."""
    if short:
        return _few([_short_text(row) for row in short])
    parts = [f"step {row.step} of {row.job} is durable" for row in durable]
    return f"all it holds is on enough others{f', or in durable storage: {_few(parts)}' if parts else ''}"


def _short_text(row: ShortStep) -> str:
    text = f"{row.job} step {row.step}: {row.copies} of {row.replicas} copies elsewhere"
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
    yield _row(NOTE, launch.job, cause, None, remedy)


def _copy_problems(name: str, newest: AttemptStatus, hosts: list[HostRow]) -> Iterator[ProblemRow]:
    """Yield a problem if there are fewer or nearer copies than asked, or none."""
    step = newest.committed_step
    if step is None:
        return
    by_level = {row.level: row for row in newest.survives}
    if by_level["host"].tolerated < 0:
        severity: Severity = UNRECOVERABLE if newest.durable_step is None else DEGRADED
        yield _row(
            severity, name,
            f"committed step {step} is not whole in RAM any more{short_text(newest)}", newest.committed_s,
            f"`memstore plan {name}` shows what a restart would get; bring back a host that holds the rest",
        )  # fmt: skip
        return
    if newest.retired:
        way = f"`memstore verify {name}` lifts it" if not newest.is_torn else "the next commit takes its place"
        cause = f"committed step {step} is retired, a get passes it over: {newest.retired}"
        yield _row(DEGRADED, name, cause, newest.committed_s, way)
    cause = f"committed degraded: {newest.degraded}" if newest.degraded else ""
    if newest.copies < newest.replicas:
        cause = cause or f"step {step} has {newest.copies} of {newest.replicas} copies"
        cause += short_text(newest)
        refusing = [text for text in newest.refusals if text not in cause]
        cause += f"; refused by {'; '.join(refusing)}" if refusing else ""
    if cause:
        yield _row(DEGRADED, name, cause, newest.committed_s, _copies_remedy(newest, hosts))


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
        return "make room where it was refused (memstore rm, a larger arena_bytes); repair tries again by itself"
    return "none needed: repair begins by itself"


def _job_problems(name: str, newest: AttemptStatus) -> Iterator[ProblemRow]:
    gone = newest.world_size - newest.ranks_alive
    if newest.phase != "closed" and gone:
        yield _row(
            NOTE, name, f"{gone} of {plural(newest.world_size, 'rank')} gone without closing the store; newest commit",
            newest.committed_s,
            "their launcher has to restart them; steps already committed wait for them",
        )  # fmt: skip
    if newest.skipped:
        why = newest.skip_why or "the controller that got the reason is gone, the log of its rank has it"
        yield _row(
            NOTE, name, f"{plural(newest.skipped, 'step')} skipped; the newest: {why}", newest.committed_s,
            "put less often, raise arena_bytes, or find the slow peer above"
            if newest.is_skip_for_room
            else f"if it goes on, fix that; `memstore events {name} --level problem` shows each skipped step",
        )  # fmt: skip
    for pair in newest.replicas_differ:
        first, second = pair.ranks
        where = ", ".join(pair.names[:3]) or "bytes of unknown tensors"
        yield _row(
            NOTE, name, f"ranks {first} and {second} name one shard and differ since step {pair.step} in {where}",
            pair.since_s, "a missing all-reduce, state that is a rank's own (put it with rank_state=), or a broken "
            "device",
        )  # fmt: skip
    is_said = newest.committed_step is not None and newest.copies < newest.replicas  # with its remedy
    for text in () if is_said else (*newest.warnings, *newest.unmet):
        way = "add hosts, or labels for the failure domains they lie in; or ask for fewer replicas"
        yield _row(NOTE, name, text, None, way)


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
            NOTE, name, f"durable off: {loses} {can} the run", None,
            'connect with Config(durable="/a/shared/directory")',
        )  # fmt: skip
    elif newest.durable_keys:
        yield _row(
            DEGRADED, name, f"durable {newest.durable}: {newest.durable_keys}", newest.durable_s,
            "put one file on every host; the next durable write asks again",
        )  # fmt: skip
    elif newest.durable_problem:
        yield _row(
            DEGRADED, name, f"durable {newest.durable}: {newest.durable_problem}", newest.durable_s,
            "fix that, on every host where it is so; the next write is tried by itself",
        )  # fmt: skip
    elif newest.durable_unseen:
        yield _row(
            DEGRADED, name, f"durable {newest.durable}: {newest.durable_unseen}", newest.durable_seen_s,
            "find what removes files there, or keeps it from being read; what is in RAM is written again by itself, "
            "and it is looked at every minute until all is there",
        )  # fmt: skip
    elif newest.durable_abandoned:
        yield _row(
            NOTE, name, f"{newest.durable_abandoned} durable writes were abandoned for a newer one", newest.durable_s,
            "faster storage, or a larger durable_every",
        )  # fmt: skip


def worst(rows: list[ProblemRow]) -> str | None:
    """Return the worst severity among rows, None if there is none."""
    return min((row.severity for row in rows), key=SEVERITIES.index, default=None)
