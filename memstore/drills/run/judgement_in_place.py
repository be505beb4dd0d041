"""Compare what ranks that recover in place noted with a training without a fault. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memstore.drills.ranks.in_place import ENTERED, TRAINED, Note, RankEnd

if TYPE_CHECKING:
    from memstore.drills.ranks.in_place_model import Unbroken

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
