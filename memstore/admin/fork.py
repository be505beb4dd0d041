"""fork: a new job that begins with a committed step of another one, sharing its chunks (R32)."""

from __future__ import annotations

import os
from dataclasses import dataclass

from memstore.config import Config, check_given_whole, check_name, check_seconds, check_whole
from memstore.core.wire.calls import ForkJob
from memstore.core.wire.codec import fields_of
from memstore.shell.rank.admin_link import any_tool

FORK_S = 120.0  # hosts claim room and digest chunks again that were verified too long ago


@dataclass(frozen=True)
class Fork:
    """A fork that is whole in RAM; `connect(job)` and `get()` go on from it."""

    job: str
    attempt: int
    step: int
    from_job: str
    from_attempt: int
    shards: int
    nbytes: int
    copies: int


def fork(
    job: str,
    step: int,
    new_job: str,
    *,
    attempt: int | None = None,
    address: str | None = None,
    config: Config | None = None,
    timeout_s: float = FORK_S,
) -> Fork:
    """Make `new_job` begin with a committed step of `job`; no byte is copied, and the old job goes on untouched.

    Args:
        job: The job to fork.
        step: Its committed step to begin with; it must be whole in RAM.
        new_job: A name that the store does not know.
        attempt: The attempt that put the step, where several lineages have one of that number (`memstore ls`).
        address: Ray cluster to ask through, where no holder runs on this machine.

    Raises:
        ConfigError: A name is not allowed, or the new job exists, in RAM or on durable storage.
        RecoveryError: The step is unknown, not committed, or not whole in RAM.
        CapacityError: A host has no room for the chunks on the day that `job` drops them; nothing was made.
    """
    check_name("job", new_job)
    request = fork_request(
        check_name("job", job), check_whole("step", step), new_job, check_given_whole("attempt", attempt)
    )
    timeout_s = check_seconds("timeout_s", timeout_s)
    if address is not None:
        from memstore.admin.cluster import ask, join_ray

        join_ray(address, config=config)
        return Fork(**fields_of(ask(request, config=config, timeout_s=timeout_s)))
    with any_tool(config or Config()) as tool:
        return Fork(**fields_of(tool.ask(request, timeout_s)))


def fork_request(job: str, step: int | None, new_job: str, attempt: int | None) -> ForkJob:
    """Return the question, about the newest step if None; its nonce makes it the same fork when it is asked again."""
    return ForkJob(job=job, step=step, of_attempt=attempt, new_job=new_job, nonce=os.urandom(8).hex())
