"""A recovery in place: who was replaced, and how long its phases took. Plain data.

detect: until a loss is known. abort: until a surviving rank has left its function and ended its process group.
replace: until the replacements are there. meet: until the process group of all is made. rebuild: until all ranks have
called get(). get: until all have the step. first_step: until the first commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memstore.core.wire.status_rows import ReplacedRow


@dataclass(slots=True)
class Recovery:
    """From a loss to the first commit of the generation after it.

    Up to its join the rank measures the phases on its clock, then the controller on its own: no phase is a difference
    between two clocks.
    """

    replaced: tuple[ReplacedRow, ...]
    rank: int  # the last to join: the phases are those that it waited for
    host: str
    since_s: float  # on the controller's clock: when the newest phase ended
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, in their order

    def end_phase(self, phase: str, now: float) -> None:
        """Add the time since the phase before."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, now - self.since_s)
        self.since_s = max(now, self.since_s)

    @property
    def is_over(self) -> bool:
        """Return whether the generation has committed a step."""
        return "first_step" in self.seconds
