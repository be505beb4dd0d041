"""The check before a fault: a drill may not destroy another job's last copy of a shard, unless the user allows it.

The decision uses a dry run of the controller's recovery planner, right before the fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memstore.core.wire.calls import AskPlan
from memstore.core.wire.replies import Plan
from memstore.core.wire.status_rows import JobRow
from memstore.drills.sites.site import Site
from memstore.errors import DrillError


def endangered(jobs: Sequence[JobRow], plans: Mapping[str, Plan], hosts: Sequence[str]) -> list[str]:
    """Return, as text, each job that would lose a committed step together with the memory of the hosts.

    Args:
        jobs: Rows of the store's status, without the drill's own job.
        plans: By job, the controller's plan for a restore after the loss of these hosts.
        hosts: Hosts whose memory the drill would destroy.
    """
    found = []
    for job in jobs:
        name, plan = job.job, plans.get(job.job)
        if plan is None:  # without an attempt there is no plan; so none of the job's copies may be lost
            held = sorted({h for step in job.steps for h in step.hosts} & set(hosts))
            if held:
                found.append(f"{name}: no attempt of it is known, and {', '.join(held)} holds copies of it")
            continue
        step, committed = plan.step, plan.committed_step
        if committed is None:
            continue
        if plan.verdict == "wait" or step is None:
            found.append(f"{name}: committed step {committed} could not be restored any more ({plan.why})")
        elif step < committed:
            found.append(f"{name}: it would fall back from committed step {committed} to step {step}")
    return found


def check_last_copies(site: Site, hosts: Sequence[str], *, own_job: str, allows_data_loss: bool) -> None:
    """Raise DrillError if the loss of the hosts' memory would cost another job its last copy of a shard."""
    if not hosts or allows_data_loss:
        return
    jobs = [job for job in site.status().jobs if job.job != own_job]
    plans = {job.job: site.ask(AskPlan(job=job.job, lose=tuple(hosts))) for job in jobs if job.attempt is not None}
    found = endangered(jobs, plans, hosts)
    if found:
        look = site.config.commands("`memstore status`")
        raise DrillError(
            f"refused before anything was broken: destroying the memory of {', '.join(hosts)} would cost "
            f"{'; '.join(found[:5])}. Name another host with --victim, wait until its copies are complete "
            f"({look}), or pass --allow-data-loss"
        )
