"""What a person should know about a store, worst first: each with a cause, a time and a remedy. Pure.

Reads nothing but the body of a status answer (queries.py), so that the text, `--json` and `--check` cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memstore.config import Config
from memstore.core.attempts.launches import come_text
from memstore.core.cluster.text import listed, plural
from memstore.core.wire.messages import Body

#: Severities, worst first: the newest committed step of some job cannot be restored; barely can be;
#: and facts worth knowing although every promise holds.
UNRECOVERABLE, DEGRADED, NOTE = "unrecoverable", "degraded", "note"
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


def problems(status: Body) -> list[Body]:
    """Return rows {severity, about, cause, since_s, remedy}; `since_s` is None if unknown."""
    found: list[Body] = []
    for host in status["hosts"]:
        found += _host_problems(host, status["jobs"])
    for launch in status["launches"]:
        found += _launch_problems(launch)
    for job in status["jobs"]:
        if job["attempt"] is not None:
            found += _copy_problems(job, status["hosts"])
            found += _job_problems(job)
            found += _durable_problems(job)
    return sorted(found, key=lambda row: SEVERITIES.index(row["severity"]))


def name_commands(rows: list[Body], config: Config) -> None:
    """Name the store in the `memstore` commands that problems tell to run."""
    for row in rows:
        row.update({part: config.commands(row[part]) for part in ("cause", "remedy")})


def is_running(job: Body) -> bool:
    """Return whether an attempt of the job is open."""
    return job["attempt"] is not None and job["phase"] != "closed"


def _row(severity: str, about: str, cause: str, since_s: float | None, remedy: str) -> Body:
    return {"severity": severity, "about": about, "cause": cause, "since_s": since_s, "remedy": remedy}


def _host_problems(host: Body, jobs: list[Body]) -> Iterator[Body]:
    name, status = host["host"], host["status"]
    if status != "live":
        ranks = sum(is_running(job) and name in job["rank_hosts"].values() for job in jobs)
        is_needed = ranks > 0 or status == "suspect"
        remedy = (
            "nothing to do yet: new work avoids it; silence for longer counts as its death"
            if status == "suspect"
            else "its copies are rebuilt on the other hosts; a replacement that joins gets its share by itself"
        )
        yield _row(DEGRADED if is_needed else NOTE, name, f"{status}: {host['why']}", host["status_s"], remedy)
    if host["drains_s"] is not None and status != "dead":
        cause = f"is to go in {host['drains_s']:.0f} s: {drain_text(host)}"
        remedy = f"`memstore drain {name} --cancel` if it stays"
        if host["drain_short"] and not host["drain_may_come"]:
            remedy = f"add a host, or durable=, before it goes; {remedy}"
        yield _row(DEGRADED if host["drain_short"] else NOTE, name, cause, None, remedy)
    short = host["stats"].get("short_of_room")
    if short:
        yield _row(
            DEGRADED, name, f"cannot write beside its arena, so nothing new is stored there: {short}", None,
            "remove what else lies in that file system, or enlarge it (mount -o remount,size=...); what waits is "
            "written by itself",
        )  # fmt: skip
    short = host["stats"].get("short_of_idle")
    if short:
        yield _row(
            NOTE, name, f"the network is idle for too short between collectives to carry the copies: {short}", None,
            "put less often or less (bf16 states, shared shards), or accept that the rest travels beside them",
        )  # fmt: skip
    yield from _limit_problems(host)
    yield from _descriptor_problems(host)
    lost = host["stats"].get("files_lost")
    if lost:
        is_now, problem = host["stats"].get("files_lost_now"), host["stats"].get("files_problem")
        after = "its holder wrote them again and was replaced"
        if is_now:
            after = f"they cannot be written again: {problem}" if problem else "they are being written again"
        yield _row(
            DEGRADED if is_now else NOTE, name, f"files of its arena's folder were removed ({lost}); {after}",
            host["up_s"], REMOVED_REMEDY,
        )  # fmt: skip
    damaged = int(host["stats"].get("scrub", 0))
    if damaged:
        yield _row(
            NOTE, name,
            f"{damaged} damaged chunks or manifests found since its holder started, to be replaced from a copy",
            host["up_s"], f"`memstore verify` checks the rest; if it happens again, test the memory of {name}",
        )  # fmt: skip


def is_over_limit(host: Body) -> bool:
    """Return whether jobs have reserved more on a host than its arena may have."""
    stats = host["stats"]
    return bool(max(stats.get("reserved_bytes", 0), stats.get("claimed_bytes", 0)) > stats.get("limit_bytes", 1 << 62))


def _limit_problems(host: Body) -> Iterator[Body]:
    stats = host["stats"]
    if is_over_limit(host):
        sizes = [f"{stats[f'{key}_bytes'] / 2**20:,.1f} MiB" for key in ("reserved", "claimed", "limit")]
        yield _row(
            DEGRADED, host["host"], f"its arena has {sizes[0]} reserved and {sizes[1]} claimed, over the limit of "
            f"{sizes[2]} ({stats.get('limit_why', 'arena_bytes')}): nothing more is admitted", None,
            "`memstore rm` a job that is not needed, or `memstore down` and `memstore up` with a larger --arena-bytes",
        )  # fmt: skip
    if stats.get("limit_warning"):
        yield _row(NOTE, host["host"], stats["limit_warning"], None, "")


def _descriptor_problems(host: Body) -> Iterator[Body]:
    stats = host["stats"]
    used, limit = int(stats.get("descriptors", 0)), int(stats.get("descriptors_limit", 0))
    if not limit or used < DESCRIPTORS_SHORT * limit:
        return
    good, at_once = max(DESCRIPTORS_GOOD, 4 * limit), min(DESCRIPTORS_GOOD, int(stats["descriptors_hard"]))
    remedy = (
        f"`ulimit -n {good}`, LimitNOFILE={good} in the systemd unit or `docker run --ulimit nofile={good}` for what "
        "starts it (with Ray its raylet)"
    )
    if at_once > limit:
        remedy = f"`prlimit --nofile={at_once}: --pid {stats['pid']}` there, at once; for its next start {remedy}"
    yield _row(
        DEGRADED, host["host"], f"its holder has {used} of {limit} file descriptors open: at the limit it accepts no "
        "rank and no other host, and writes no file", None, remedy,
    )  # fmt: skip


def drain_text(host: Body) -> str:
    """Return what would be lost with a leaving host, as "train step 9: 1 of 2 copies elsewhere", or that it can go."""
    short, durable = host["drain_short"], host["drain_durable"]
    if short:
        return _few([_short_text(row) for row in short])
    parts = [f"step {row['step']} of {row['job']} is durable" for row in durable]
    return f"all it holds is on enough others{f', or in durable storage: {_few(parts)}' if parts else ''}"


def _short_text(row: Body) -> str:
    text = f"{row['job']} step {row['step']}: {row['copies']} of {row['replicas']} copies elsewhere"
    return f"{text}, not durable yet: {row['durable_problem']}" if row["durable_problem"] else text


def _few(parts: list[str]) -> str:
    """Return at most three of them, and how many more there are."""
    return ", ".join(parts[:3]) + (f" and {len(parts) - 3} more" if len(parts) > 3 else "")


def _launch_problems(launch: Body) -> Iterator[Body]:
    """Yield a problem for each launch that is incomplete after a while."""
    if launch["since_s"] < LAUNCH_IS_SLOW_S:
        return
    what, call = ("a rewind", "rewind()") if launch["is_rewind"] else ("a launch", "connect()")
    does = "gathers" if launch["phase"] == "gathering" else "is under way"
    cause = f"{what} {does}: {come_text(launch)} after {launch['since_s']:.0f} s, waiting for {launch['awaited']}"
    remedy = "nothing to do yet: it goes on without what does not answer within seconds"
    if launch["missing"]:
        late = f"{'rank' if len(launch['missing']) == 1 else 'ranks'} {listed(launch['missing'])}"
        remedy = f"start {late}, or see in their logs why {call} was not called; the others give up in "
        remedy += f"{launch['left_s']:.0f} s"
    yield _row(NOTE, launch["job"], cause, None, remedy)


def _copy_problems(job: Body, hosts: list[Body]) -> Iterator[Body]:
    """Yield a problem if there are fewer or nearer copies than asked, or none."""
    step, name = job["committed_step"], job["job"]
    if step is None:
        return
    by_level = {row["level"]: row for row in job["survives"]}
    if by_level["host"]["tolerated"] < 0:
        severity = UNRECOVERABLE if job["durable_step"] is None else DEGRADED
        yield _row(
            severity, name, f"committed step {step} is not whole in RAM any more{short_text(job)}", job["committed_s"],
            f"`memstore plan {name}` shows what a restart would get; bring back a host that holds the rest",
        )  # fmt: skip
        return
    if job["retired"]:
        way = f"`memstore verify {name}` lifts it" if not job["is_torn"] else "the next commit takes its place"
        cause = f"committed step {step} is retired, a get passes it over: {job['retired']}"
        yield _row(DEGRADED, name, cause, job["committed_s"], way)
    cause = f"committed degraded: {job['degraded']}" if job["degraded"] else ""
    if job["copies"] < job["replicas"]:
        cause = cause or f"step {step} has {job['copies']} of {job['replicas']} copies"
        cause += short_text(job)
        refusing = [text for text in job["refusals"] if text not in cause]
        cause += f"; refused by {'; '.join(refusing)}" if refusing else ""
    if cause:
        yield _row(DEGRADED, name, cause, job["committed_s"], _copies_remedy(job, hosts))


def short_text(job: Body) -> str:
    """Return ": ranks 0, 1 on h2 only, to be rebuilt on h3" for the ranks that lack copies, "" if none is known."""
    rows = job["short"][:SHORT_ROWS_MAX]
    parts = []
    for row in rows:
        head = "rank" if len(row["ranks"]) == 1 else "ranks"
        left = f"on {', '.join(row['hosts'])} only" if row["hosts"] else "on no host whole"
        way = f"to be rebuilt on {', '.join(row['targets'])}" if row["targets"] else "not rebuilt"
        why = row["why_not"]
        way += (f" ({why})" if row["targets"] else f": {why}") if why else ""
        parts.append(f"{head} {listed(row['ranks'])} {left}, {way}")
    more = job["short_shards"] - sum(len(row["ranks"]) for row in rows)
    parts += [plural(more, "more rank")] if parts and more > 0 else []
    return f": {'; '.join(parts)}" if parts else ""


def _copies_remedy(job: Body, hosts: list[Body]) -> str:
    sending = sum(host["pushes"] for host in hosts)
    if job["missing_copies"] and sending:
        return (
            f"none needed: repair is under way, {plural(job['missing_copies'], 'copy')} missing, {sending} being sent"
        )
    placed = len(job["targets"])
    if placed < job["replicas"]:
        return (
            f"{plural(placed, 'host')} may hold its copies, replicas={job['replicas']} needs {job['replicas']}: add "
            "hosts with ranks of the job, or label spare ones memstore=replica"
        )
    if job["is_level_finer"]:
        return f"it recovers when hosts in another {job['level_asked']} are back"
    if job["refusals"]:
        return "make room where it was refused (memstore rm, a larger arena_bytes); repair tries again by itself"
    return "none needed: repair begins by itself"


def _job_problems(job: Body) -> Iterator[Body]:
    name = job["job"]
    gone = job["world_size"] - job["ranks_alive"]
    if is_running(job) and gone:
        yield _row(
            NOTE, name, f"{gone} of {plural(job['world_size'], 'rank')} gone without closing the store; newest commit",
            job["committed_s"],
            "their launcher has to restart them; steps already committed wait for them",
        )  # fmt: skip
    if job["skipped"]:
        why = job["skip_why"] or "the controller that got the reason is gone, the log of its rank has it"
        yield _row(
            NOTE, name, f"{plural(job['skipped'], 'step')} skipped; the newest: {why}", job["committed_s"],
            "put less often, raise arena_bytes, or find the slow peer above"
            if job["is_skip_for_room"]
            else f"if it goes on, fix that; `memstore events {name} --level problem` shows each skipped step",
        )  # fmt: skip
    for pair in job.get("replicas_differ", ()):
        first, second = pair["ranks"]
        where = ", ".join(pair["names"][:3]) or "bytes of unknown tensors"
        yield _row(
            NOTE, name, f"ranks {first} and {second} name one shard and differ since step {pair['step']} in {where}",
            pair["since_s"], "a missing all-reduce, state that is a rank's own (put it with rank_state=), or a broken "
            "device",
        )  # fmt: skip
    is_said = job["committed_step"] is not None and job["copies"] < job["replicas"]  # with its remedy
    for text in () if is_said else (*job["warnings"], *job["unmet"]):
        way = "add hosts, or labels for the failure domains they lie in; or ask for fewer replicas"
        yield _row(NOTE, name, text, None, way)


def _durable_problems(job: Body) -> Iterator[Body]:
    name = job["job"]
    if job["durable"] is None:
        host = next((row for row in job["survives"] if row["level"] == "host"), None)
        if job["committed_step"] is None or host is None or host["tolerated"] < 0:
            return
        fatal = ", ".join(host["fatal"][:10])
        more = f" and {len(host['fatal']) - 10} more" if len(host["fatal"]) > 10 else ""
        loses = f"losing {fatal}{more} now" if fatal else f"losing {host['tolerated'] + 1} hosts at once"
        can = "loses" if fatal else "can lose"
        yield _row(
            NOTE, name, f"durable off: {loses} {can} the run", None,
            'connect with Config(durable="/a/shared/directory")',
        )  # fmt: skip
    elif job["durable_keys"]:
        yield _row(
            DEGRADED, name, f"durable {job['durable']}: {job['durable_keys']}", job["durable_s"],
            "put one file on every host; the next durable write asks again",
        )  # fmt: skip
    elif job["durable_problem"]:
        yield _row(
            DEGRADED, name, f"durable {job['durable']}: {job['durable_problem']}", job["durable_s"],
            "fix that, on every host where it is so; the next write is tried by itself",
        )  # fmt: skip
    elif job["durable_unseen"]:
        yield _row(
            DEGRADED, name, f"durable {job['durable']}: {job['durable_unseen']}", job["durable_seen_s"],
            "find what removes files there, or keeps it from being read; what is in RAM is written again by itself, "
            "and it is looked at every minute until all is there",
        )  # fmt: skip
    elif job["durable_abandoned"]:
        yield _row(
            NOTE, name, f"{job['durable_abandoned']} durable writes were abandoned for a newer one", job["durable_s"],
            "faster storage, or a larger durable_every",
        )  # fmt: skip


def worst(rows: list[dict[str, Any]]) -> str | None:
    """Return the worst severity among rows, None if there is none."""
    return min((row["severity"] for row in rows), key=SEVERITIES.index, default=None)
