"""The phases of one attempt's steps, with what every seal asks of them at hand. Pure."""

from __future__ import annotations

from typing import Literal

StepPhase = Literal["open", "committing", "committed", "abandoned", "superseded"]


class StepPhases(dict[int, StepPhase]):
    """Step -> phase. Every step gets thousands of seals, so no seal may look at all steps that are remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[int] = set()  # steps whose phase is "open"
        self.newest_decided = -1  # the newest step that was ever committing or committed; -1 if none

    def __setitem__(self, step: int, phase: StepPhase) -> None:
        super().__setitem__(step, phase)
        if phase == "open":
            self.open.add(step)
            return
        self.open.discard(step)
        if phase in ("committing", "committed"):
            self.newest_decided = max(self.newest_decided, step)

    def __delitem__(self, step: int) -> None:
        super().__delitem__(step)
        self.open.discard(step)

    def begin(self, step: int) -> None:
        """Open a step, unless its phase is known."""
        if step not in self:
            self[step] = "open"
