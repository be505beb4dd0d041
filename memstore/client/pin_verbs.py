"""What a Store says of steps and does with committed ones: names that keep one (R19), durable out of turn (R31)."""

from __future__ import annotations

from typing import Any

from memstore.client.checkpoint import StepInfo, step_infos
from memstore.client.puts import Puts
from memstore.config import check_given_whole, check_name, check_seconds, check_whole
from memstore.core.cluster.job import TRUSTED
from memstore.core.durable.persist import WITHIN_MAX_S
from memstore.core.wire.calls import AskSteps, PersistStep, PinStep, UnpinStep
from memstore.core.wire.replies import Persisted
from memstore.errors import PeerTimeout
from memstore.shell.rank.collective import CALL_SLACK_S
from memstore.shell.rank.holder_link import HolderLink


class PinVerbs:
    """Part of Store."""

    job: str
    config: Any
    puts: Puts
    _link: HolderLink

    def _check_open(self) -> None:
        raise NotImplementedError

    def latest_step(self) -> int | None:
        """Return the newest committed step of the lineage, for people; ranks branch on get()."""
        return max((s.step for s in self.steps() if s.committed and s.in_lineage), default=None)

    def steps(self) -> list[StepInfo]:
        """Return every step the store knows of this job, newest first, for people."""
        self._check_open()
        return step_infos(self._link.call(AskSteps(job=self.job), self.config.connect_timeout_s))

    def pin(self, step: int, name: str, *, attempt: int | None = None) -> None:
        """Keep a committed step in RAM under a name, beside what `keep_steps` keeps, until `unpin` (R19).

        Any rank may call it, once for all. It survives restarts and `connect(fresh=True)`.

        Raises:
            RecoveryError: The step is not committed, or not whole in RAM.
            CapacityError: A pin takes memory of its own, and there is none; nothing changed.
            ConfigError: The name is not allowed, or another step has it.
        """
        self._ask_pin(pin_request(self.job, step, name, attempt))

    def trust(self, step: int, *, attempt: int | None = None, timeout_s: float = 60.0) -> int:
        """Say that a step was found good: RAM keeps it, and `get(trusted=True)` goes back to the newest one (R38).

        Any rank may call it, once for all. It waits for the commit of a step that this rank has just put. What was
        trusted before is let go of once this step is kept; `unpin("trusted")` takes the word back.

        Returns:
            The step that is trusted now: this one, or a newer one of the lineage.

        Raises:
            RecoveryError: The step is not committed, or not whole in RAM.
            CapacityError: A trusted step takes memory of its own, and there is none; nothing changed.
            CommitError, TimeoutError: Its commit failed, or did not come in time.
        """
        self._check_open()
        request = pin_request(self.job, step, TRUSTED, attempt)
        self.puts.steps.wait_committed(request.step or 0, check_seconds("timeout_s", timeout_s))
        return self._link.call(request, self.config.connect_timeout_s + CALL_SLACK_S).step

    def unpin(self, name: str) -> None:
        """Take a pin's name back: retention decides about its step again (R19). ConfigError if there is none."""
        self._ask_pin(UnpinStep(job=self.job, name=check_name("pin", name)))

    def persist(self, step: int | None = None, *, timeout_s: float = 300.0) -> int:
        """Write a committed step to durable storage now, ahead of the schedule; return its number once it is there.

        Any rank may call it, once for all; it may call it again: that is one write.

        Args:
            step: None: the newest committed step.

        Raises:
            ConfigError: `durable` is off, hosts have no key in common, or `durable_keep` newer steps are there.
            RecoveryError: The step is not committed, not whole in RAM, or retired.
            PeerTimeout: It is not there after `timeout_s`; names what it waits for. The write goes on.
        """
        self._check_open()
        request = persist_request(self.job, step, timeout_s)
        return persisted(self._link.call(request, request.within_s + CALL_SLACK_S), request.within_s)

    def _ask_pin(self, request: PinStep | UnpinStep) -> None:
        self._check_open()
        self._link.call(request, self.config.connect_timeout_s + CALL_SLACK_S)


def pin_request(job: str, step: int, name: str, attempt: int | None) -> PinStep:
    """Return the question for `pin`; ConfigError if its values are none."""
    return PinStep(
        job=job,
        step=check_whole("step", step),
        name=check_name("pin", name),
        of_attempt=check_given_whole("attempt", attempt),
    )


def persist_request(job: str, step: int | None, timeout_s: float) -> PersistStep:
    """Return the question for `persist`; ConfigError if its values are none."""
    within_s = min(check_seconds("timeout_s", timeout_s), WITHIN_MAX_S)
    return PersistStep(job=job, step=check_given_whole("step", step), within_s=within_s)


def persisted(answer: Persisted, timeout_s: float) -> int:
    """Return the step that was made durable; PeerTimeout if it was not in time."""
    if not answer.is_durable:
        raise PeerTimeout(
            f"step {answer.step} of job {answer.job!r} is not durable after {timeout_s:g} s: {answer.problem}",
            operation="persist",
            waited_s=timeout_s,
            limit_s=timeout_s,
        )
    return answer.step
