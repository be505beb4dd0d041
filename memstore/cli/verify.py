"""`memstore verify`: every host digests its replicas again and compares with the digests of the put (R30)."""

from __future__ import annotations

import contextlib
import sys
import threading
from dataclasses import dataclass

import click

from memstore.cli.offline import offline_option, show_offline
from memstore.cli.options import Where, where_options
from memstore.cli.output import ExitCode, data_console, plain_table, plural, print_json, progress_bar
from memstore.core.report.cells import outcome
from memstore.core.wire.calls import AskPlan, VerifyStore
from memstore.core.wire.codec import fields_of
from memstore.core.wire.replies import HostVerified, Plan, Status, VerifyResult

VERIFY_S = 330.0  # above the 300 s that the controller waits for its hosts
LOOK_S = 1.0  # between two looks at how far they are


NOTHING = HostVerified(shards=0, chunks=0, damaged=0, damaged_manifests=0)


@dataclass(frozen=True)
class HostAnswer:
    """What a host found, or why it found nothing."""

    found: HostVerified = NOTHING
    error: str = ""


@click.command(short_help="Re-digest everything that is stored.")
@click.argument("job", required=False)
@offline_option
@where_options
@click.pass_context
def verify(ctx: click.Context, where: Where, job: str | None, offline: bool, as_json: bool) -> None:
    """Re-digest every stored chunk and manifest, of JOB or of all jobs; damaged ones are rebuilt from a copy.

    Exits with 0 if every byte is right, 4 if some were damaged or a host did not answer but every committed step
    can still be restored, 3 if one cannot.
    """
    if offline:
        ctx.exit(show_offline(where.config, job, as_json, has_digests=True))
    status = where.status(job)
    names = [job] if job is not None else [row.job for row in status.jobs]
    answer = _ask_hosts(where, job, status)
    plans = [where.ask(AskPlan(job=row.job)) for row in status.jobs if row.job in names and row.attempt is not None]
    lost = [plan.job for plan in plans if outcome(plan) in ("lost", "older")]
    rows = {host: HostAnswer(found) for host, found in answer.found.items()}
    rows |= {host: HostAnswer(error=why) for host, why in answer.failed.items()}
    rows |= {host: HostAnswer(error="no answer") for host in answer.silent}
    damaged = sum(row.found.damaged + row.found.damaged_manifests for row in rows.values())
    is_whole_answer = all(not row.error for row in rows.values())
    code = ExitCode.FINE if not damaged and is_whole_answer else ExitCode.DEGRADED
    code = ExitCode.UNRECOVERABLE if lost else code
    if as_json:
        hosts = {host: {**fields_of(row.found), "error": row.error} for host, row in rows.items()}
        print_json({"job": job, "hosts": hosts, "damaged": damaged, "unrecoverable": lost, "ok": code == ExitCode.FINE})
    else:
        _show(rows, plans, lost)
    ctx.exit(code)


def _ask_hosts(where: Where, job: str | None, before: Status) -> VerifyResult:
    """Ask all hosts; a bar on stderr shows how much they have digested by now, of all that lies there at most."""
    context, began, over = click.get_current_context(), _verified_bytes(before), threading.Event()
    used_bytes = sum(row.stats.used_bytes for row in before.hosts if row.stats is not None and row.status != "dead")

    def follow() -> None:
        while not over.wait(LOOK_S):
            with context.scope(cleanup=False), contextlib.suppress(Exception):  # the answer itself says what failed
                now = _verified_bytes(where.status())
                tell(done=sum(max(0, nbytes - began.get(host, 0)) for host, nbytes in now.items()))

    with progress_bar(f"digesting on {plural(len(before.hosts), 'host')}", used_bytes) as tell:
        if sys.stderr.isatty():
            threading.Thread(target=follow, daemon=True).start()
        try:
            return where.ask(VerifyStore(job=job), VERIFY_S)
        finally:
            over.set()


def _verified_bytes(status: Status) -> dict[str, int]:
    return {row.host: row.stats.verified_bytes for row in status.hosts if row.stats is not None}


def _show(rows: dict[str, HostAnswer], plans: list[Plan], lost: list[str]) -> None:
    console = data_console()
    table = plain_table("HOST", ">SHARDS", ">CHUNKS", ">DAMAGED", "RESULT")
    for host, row in sorted(rows.items()):
        found, result = row.found, row.error or damage_text(row.found) or "all of it ok"
        table.add_row(host, f"{found.shards:,}", f"{found.chunks:,}", f"{found.damaged:,}", result)
    console.print(table)
    for plan in plans:
        if plan.job in lost:
            back = f"a restart would get step {plan.step:,}" if plan.step is not None else "nothing can be restored"
            console.print(f"! {plan.job}: committed step {plan.committed_step:,} is lost: {back}. {plan.why}")
    chunks = sum(row.found.damaged for row in rows.values())
    manifests = sum(row.found.damaged_manifests for row in rows.values())
    if not lost and (chunks or manifests):
        counts = [plural(n, what) for n, what in ((chunks, "chunk"), (manifests, "manifest")) if n]
        console.print(f"every committed step is still whole; {' and '.join(counts)} rebuilt from other copies")


def damage_text(found: HostVerified) -> str:
    """Return a text of the damaged chunks and manifests that a host took out; "" if there are none."""
    kinds = ["chunks"] if found.damaged else []
    kinds += ["manifests"] if found.damaged_manifests else []
    return f"damaged {' and '.join(kinds)} taken out" if kinds else ""


VERBS = (verify,)
