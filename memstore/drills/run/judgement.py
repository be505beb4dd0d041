"""What the ranks brought back, told and held against the promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.drills.model.promises import REFUSED
from memstore.drills.model.report import gib
from memstore.drills.ranks.ranks import Restored

if TYPE_CHECKING:
    from memstore.drills.run.runner import DrillRun


def tell_restore(run: DrillRun, results: list[Restored]) -> None:
    """Put a restore into the report: its step, verdict, bytes by tier, seconds; or the refusal."""
    report, first = run.report, results[0]
    if any(r.error for r in results):
        report.error, report.message = first.error or None, first.message
        if {r.error for r in results} == {"RecoveryError"}:
            report.verdict = REFUSED
            run.timeline.line("refused", f"RecoveryError on {len(results)} of {len(results)} ranks, no byte given out")
        return
    report.verdict, report.step_restored = first.verdict, first.step
    report.bytes_by_tier.update(first.bytes_by_tier)
    tiers = " · ".join(f"{gib(n)} {tier}" for tier, n in report.bytes_by_tier.items())
    moved = f" · {len(first.ranks_moved)} ranks moved" if first.ranks_moved else ""
    plan_s = first.seconds_by_phase["gather"]
    transfer_s, load_s = first.seconds_by_phase["transfer"], max(r.seconds_by_phase["load"] for r in results)
    report.seconds.update(plan=round(plan_s, 3), transfer=round(transfer_s, 3), load=round(load_s, 3))
    run.timeline.line("planned", f"step {first.step} · {first.verdict}{moved}", f"{plan_s:.3f} s")
    run.timeline.line("restored", tiers, f"{transfer_s + load_s:.2f} s")
    tell_compared(run, results)


def tell_compared(run: DrillRun, results: list[Restored]) -> None:
    """Put the comparison with fresh states into the report; a difference breaks the promise, whatever was promised."""
    run.report.bytes_compared = whole = sum(r.nbytes for r in results)
    equal = sum(r.bytes_equal for r in results)
    right = sum(not r.error and not r.differences and r.bytes_equal == r.nbytes > 0 for r in results)
    run.report.is_verified = right == len(results)
    note = "verified" if run.report.is_verified else "DIFFERENT"
    run.timeline.line("compared", f"{equal:,} of {whole:,} bytes equal in {right} of {len(results)} shards", note)


def judge_bytes(run: DrillRun, results: list[Restored]) -> None:
    """Every byte must be what a state made anew has, in every shard."""
    if not run.report.is_verified:
        found = [f"rank {r.rank}: {d}" for r in results for d in r.differences]
        run.broken.append(f"restored state differs from the one made anew: {'; '.join(found[:3])}")


def judge_restore(run: DrillRun, results: list[Restored]) -> None:
    """One step, whole, the same on every rank, from where it was promised."""
    report, first, promise = run.report, results[0], run.promise
    judge_bytes(run, results)
    if len({(r.step, r.verdict) for r in results}) != 1:
        run.broken.append(f"ranks got different steps: {sorted({str(r.step) for r in results})}")
    if first.verdict not in promise.verdicts:
        allowed = " or ".join(sorted(promise.verdicts))
        run.broken.append(f"the verdict is {first.verdict}, promised was {allowed}: {first.reason}")
    if promise.is_lossless and report.rpo_steps:
        run.broken.append(f"{report.rpo_steps} committed steps were lost, promised were 0: {first.reason}")
    for tier, nbytes in report.bytes_by_tier.items():
        if nbytes and tier not in promise.tiers:
            run.broken.append(f"{gib(nbytes)} came from {tier}, promised were 0")
    if promise.needs is not None and not report.bytes_by_tier[promise.needs]:
        run.broken.append(f"no byte came from {promise.needs}: the fault took nothing away")


def judge_refusal(run: DrillRun, results: list[Restored]) -> None:
    """A refusal is a promise too: typed, alike on every rank, and it names what is lost and where it was."""
    first = results[0]
    kinds = {r.error or f"step {r.step}" for r in results}
    if kinds != {"RecoveryError"}:
        run.broken.append(f"ranks ended differently or wrongly: {', '.join(sorted(kinds))}: {first.message}")
        return
    if REFUSED not in run.promise.verdicts:
        run.broken.append(f"get() refused, promised was {run.promise.words}: {first.message}")
    unnamed = [host for host in run.scene.holders if host not in first.message]
    if unnamed or str(run.scene.rank) not in first.message:
        run.broken.append(f"the refusal does not name rank {run.scene.rank} and {', '.join(unnamed)}: {first.message}")
