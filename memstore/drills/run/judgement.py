"""Record what the ranks brought back in the report, and compare it with the promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memstore.cli.output import size_text
from memstore.drills.model.catalogue import REFUSED
from memstore.drills.ranks.in_place import ENTERED, TRAINED, Note, RankEnd
from memstore.drills.sites.scratch import DrillContext
from memstore.testing.ranks.rank import Restored

if TYPE_CHECKING:
    from memstore.drills.ranks.in_place_model import Unbroken


def record_restore(context: DrillContext, results: Sequence[Restored]) -> None:
    """Record a restore in the report: its step, verdict, bytes by tier and seconds; or the refusal."""
    report, first = context.report, results[0]
    if any(r.error for r in results):
        report.error, report.message = first.error or None, first.message
        if {r.error for r in results} == {"RecoveryError"}:
            report.verdict = REFUSED
            context.timeline.line(
                "refused", f"RecoveryError on {len(results)} of {len(results)} ranks, no byte given out"
            )
        return
    report.verdict, report.step_restored = first.verdict, first.step
    report.bytes_by_tier.update(first.bytes_by_tier)
    tiers = " · ".join(f"{size_text(n)} {tier}" for tier, n in report.bytes_by_tier.items())
    moved = f" · {len(first.ranks_moved)} ranks moved" if first.ranks_moved else ""
    plan_s = first.seconds_by_phase["gather"]
    transfer_s, load_s = first.seconds_by_phase["transfer"], max(r.seconds_by_phase["load"] for r in results)
    report.seconds.update(plan=round(plan_s, 3), transfer=round(transfer_s, 3), load=round(load_s, 3))
    context.timeline.line("planned", f"step {first.step} · {first.verdict}{moved}", f"{plan_s:.3f} s")
    context.timeline.line("restored", tiers, f"{transfer_s + load_s:.2f} s")
    record_comparison(context, results)


def record_comparison(context: DrillContext, results: Sequence[Restored]) -> None:
    """Record in the report how many bytes were equal to those of fresh states, and whether all were."""
    report = context.report
    report.bytes_compared = whole = sum(r.nbytes for r in results)
    equal = sum(r.bytes_equal for r in results)
    right = sum(not r.problem for r in results)
    report.is_verified = right == len(results)
    note = "verified" if report.is_verified else "DIFFERENT"
    context.timeline.line("compared", f"{equal:,} of {whole:,} bytes equal in {right} of {len(results)} shards", note)


def judge_bytes(context: DrillContext, results: Sequence[Restored]) -> None:
    """Require that every byte of every shard equals that of a fresh state; every drill promises this."""
    if not context.report.is_verified:
        found = [f"rank {r.rank}: {d}" for r in results for d in r.differences]
        context.broken_promises.append(f"restored state differs from the one made again: {'; '.join(found[:3])}")


def judge_restore(context: DrillContext, results: Sequence[Restored], read: Sequence[Restored] = ()) -> None:
    """Require one whole step, the same on every rank, with its bytes from the promised tiers.

    Args:
        context: Of the drill.
        results: What the ranks restored.
        read: What they read besides, such as the step with which the training ended.
    """
    report, first, promise, broken = context.report, results[0], context.promise, context.broken_promises
    judge_bytes(context, [*results, *read])
    if len({(r.step, r.verdict) for r in results}) != 1:
        broken.append(f"ranks got different steps: {sorted({str(r.step) for r in results})}")
    if first.verdict not in promise.verdicts:
        allowed = " or ".join(sorted(promise.verdicts))
        broken.append(f"the verdict is {first.verdict}, promised was {allowed}: {first.reason}")
    if promise.is_lossless and report.rpo_steps:
        broken.append(f"{report.rpo_steps} committed steps were lost, promised were 0: {first.reason}")
    for tier, nbytes in report.bytes_by_tier.items():
        if nbytes and tier not in promise.tiers:
            broken.append(f"{size_text(nbytes)} came from {tier}, promised were 0")
    if promise.needs is not None and not report.bytes_by_tier[promise.needs]:
        broken.append(f"no byte came from {promise.needs}: the fault took nothing away")


def judge_refusal(context: DrillContext, results: Sequence[Restored], *, rank: int, holders: Sequence[str]) -> None:
    """Require a RecoveryError on every rank that names the lost rank and the hosts that held its copies."""
    first, broken = results[0], context.broken_promises
    kinds = {r.error or f"step {r.step}" for r in results}
    if kinds != {"RecoveryError"}:
        broken.append(f"ranks ended differently or wrongly: {', '.join(sorted(kinds))}: {first.message}")
        return
    if REFUSED not in context.promise.verdicts:
        broken.append(f"get() refused, promised was {context.promise.words}: {first.message}")
    unnamed = [host for host in holders if host not in first.message]
    if unnamed or str(rank) not in first.message:
        broken.append(f"the refusal does not name rank {rank} and {', '.join(unnamed)}: {first.message}")


# -- judgement in place -------------------------------------------------------------------------------
# Compare what ranks that recover in place noted with a training without a fault. Pure.


SHOWN = 3


@dataclass(frozen=True)
class Played:
    """What is known of a training with a fault.

    Attributes:
        notes: Of all processes that were ranks.
        ends: What the ranks returned, by rank; empty if an error ended the training.
        pids: By rank, its process before the fault.
        lost: The ranks that the fault took.
        last_step: Up to which was to be trained.
    """

    notes: Sequence[Note]
    ends: Sequence[RankEnd]
    last_step: int
    pids: Mapping[int, int] = field(default_factory=dict)
    lost: Collection[int] = ()

    @property
    def steps_count(self) -> int:
        """Return how many steps some rank has trained."""
        return 1 + max((note.step for note in self.notes if note.what == TRAINED), default=-1)


def broken_in_place(played: Played, oracle: Unbroken) -> list[str]:
    """Return the promises of recovery in place that are broken, as text."""
    broken = [*_other_processes(played), *_other_losses(played, oracle)]
    if played.ends:
        broken += [*_steps_not_trained(played), *_other_samples(played, oracle)]
    return broken


def _other_processes(played: Played) -> Iterator[str]:
    """Require new processes for the ranks that were lost, and the same ones as before for all others."""
    for rank, before in played.pids.items():
        pids = [note.pid for note in played.notes if note.what == ENTERED and note.rank == rank]
        if rank not in played.lost and set(pids) != {before}:
            yield f"rank {rank} was not lost, and has changed its process: {before} before, then {pids}"
        if rank in played.lost and pids[-1:] == [before]:
            yield f"rank {rank} was lost, and nothing has taken the place of its process {before}"
    generation = max((note.generation for note in played.notes), default=0)
    if not played.lost and generation:
        yield f"no rank was lost, and all were brought into generation {generation}"


def _other_losses(played: Played, oracle: Unbroken) -> Iterator[str]:
    """Require that whatever was trained, also what broke off, has the loss of the training without a fault."""
    trained = [note for note in played.notes if note.what == TRAINED]
    wrong = [note for note in trained if note.loss != oracle.losses[note.rank][note.step]]
    for note in wrong[:SHOWN]:
        where = f"rank {note.rank}, step {note.step}, generation {note.generation}"
        yield f"{where}: the loss is {note.loss}, without a fault {oracle.losses[note.rank][note.step]}"


def _steps_not_trained(played: Played) -> Iterator[str]:
    for rank in range(len(played.ends)):
        trained = {note.step for note in played.notes if note.what == TRAINED and note.rank == rank}
        absent = sorted(set(range(played.last_step + 1)) - trained)
        if absent:
            yield f"rank {rank} never trained the steps {absent[:SHOWN]}"


def _other_samples(played: Played, oracle: Unbroken) -> Iterator[str]:
    """Require that the committed history has each sample of the data's order once."""
    for rank, end in enumerate(played.ends):
        if len(end.history) != played.last_step + 1:
            yield f"what rank {rank} read was committed with {len(end.history)} steps, not {played.last_step + 1}"
        for step, (found, wanted) in enumerate(zip(end.history, oracle.batches, strict=False)):
            if found != wanted:
                doubled, absent = Counter(found) - Counter(wanted), Counter(wanted) - Counter(found)
                yield (
                    f"what rank {rank} read has other samples in step {step}: too many {sorted(doubled.elements())}, "
                    f"missing {sorted(absent.elements())}"
                )
                break
