"""How long a rank took to leave a generation and to enter the next: for people, not for decisions. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from memstore.core.cluster.text import CAUSES, listed, phases_text
from memstore.core.wire.calls import InPlace, RankLoss


@dataclass(frozen=True, slots=True)
class Leaving:
    """When a process left a generation, on its monotonic clock."""

    failed_s: float  # an exception left the function; infinity: it returned, or never began
    over_s: float  # a loss was known
    end_s: float  # all was torn down

    @property
    def detect_s(self) -> float:
        """Return for how long it waited for word of a loss, which its exception came before."""
        return max(0.0, self.over_s - self.failed_s)


def in_place_of(
    generation: int, losses: tuple[RankLoss, ...], leaving: Leaving | None, met_s: float, made_s: float
) -> InPlace:
    """Return what a rank reports of a generation that it enters.

    Args:
        generation: Its number.
        losses: Of the run.
        leaving: How this process left the one before; None: it was in none.
        met_s: When all ranks had come, on the monotonic clock.
        made_s: When their process group was made.
    """
    return InPlace(
        generation=generation, losses=losses,
        detect_s=None if leaving is None else leaving.detect_s,
        abort_s=None if leaving is None else leaving.end_s - leaving.over_s,
        replace_s=None if leaving is None else met_s - leaving.end_s,
        meet_s=made_s - met_s, build_s=0.0,
    )  # fmt: skip


def met_text(entered: InPlace, before: int) -> str:
    """Return "generation 4: rank 3 was replaced (its process ended); all met: detect 0.40 s, ...".

    Args:
        entered: What this rank knows, with the losses of the run.
        before: The last generation that this process was in, or could have been in.
    """
    losses = [loss for loss in entered.losses if loss.generation > before]
    silent_s = losses[0].silent_s if losses else 0.0
    ranks = sorted({loss.rank for loss in losses})
    whys = ", ".join(sorted({CAUSES[loss.cause] for loss in losses}))
    who = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)} {'were' if len(ranks) > 1 else 'was'} replaced ({whys})"
    measured = {
        "detect": None if entered.detect_s is None else max(silent_s, entered.detect_s), "abort": entered.abort_s,
        "replace": entered.replace_s, "meet": entered.meet_s,
    }  # fmt: skip
    took_s = {phase: value_s for phase, value_s in measured.items() if value_s is not None}
    return f"generation {entered.generation}: {who if losses else 'it begins'}; all met: {phases_text(took_s)}"
