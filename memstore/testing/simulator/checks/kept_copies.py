"""What must be there in truth of committed steps: the newest of them, and all that are kept, with or without ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstore.core.cluster.kept_steps import kept_steps
from recovery.inventory import StepId

if TYPE_CHECKING:
    from memstore.testing.simulator.checks.checker import Checker


def newest_there(checker: Checker) -> StepId | None:
    """Return the newest committed step; in a wild scenario the newest of which some shard is left anywhere.

    There all hosts may have lost a step, and the job begins again under lower numbers.
    """
    left = {StepId(s.attempt, s.step) for shards in checker.whole.values() for s, _ in shards}
    steps = checker.facts.keys()
    return max(steps if checker.world.scenario.is_strict else steps & left, default=None)


def why_not_kept(checker: Checker) -> str:
    """Say which kept committed step lacks copies that are whole in truth; one of which bytes are lost is none (R29)."""
    world = checker.world
    controller = world.served()
    if controller is None:
        return "no controller serves the job"
    job = controller.catalog.jobs.get(world.scenario.job)
    if job is None or job.newest is None or len(checker.trusted()) < len(world.holders):
        return ""  # a copy's place may be a host that dies often, which gets none
    for step in kept_steps(job, job.newest) & checker.facts.keys():
        copies = [job.copies.get(step, {}).get(rank, {}) for rank in range(checker.facts[step].world_size)]
        is_lost = not all(any(not copy.missing for copy in hosts.values()) for hosts in copies)
        if lacking := "" if is_lost and not world.scenario.is_strict else checker.lacking(step):
            return lacking
    return ""
