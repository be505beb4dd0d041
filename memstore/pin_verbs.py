"""What a Store can do with pins: names that keep a committed step in RAM (R19)."""

from __future__ import annotations

from typing import Any

from memstore.config import check_name
from memstore.shell.collective import CALL_SLACK_S
from memstore.shell.rank_link import RankLink


class PinVerbs:
    """Part of Store."""

    job: str
    config: Any
    _link: RankLink

    def _check_open(self) -> None:
        raise NotImplementedError

    def pin(self, step: int, name: str, *, attempt: int | None = None) -> None:
        """Keep a committed step in RAM under a name, beside what `keep_steps` keeps, until `unpin` (R19).

        Any rank may call it, once for all. It survives restarts and `connect(fresh=True)`.

        Raises:
            RecoveryError: The step is not committed, or not whole in RAM.
            CapacityError: A pin takes room of its own, and there is none; nothing changed.
            ConfigError: The name is not allowed, or another step has it.
        """
        self._ask_pin("pin", {"step": step, "name": check_name("pin", name), "of_attempt": attempt})

    def unpin(self, name: str) -> None:
        """Take a pin's name back: retention decides about its step again (R19). ConfigError if there is none."""
        self._ask_pin("unpin", {"name": check_name("pin", name)})

    def _ask_pin(self, verb: str, body: dict[str, Any]) -> None:
        self._check_open()
        self._link.call(verb, {"job": self.job, **body}, self.config.connect_timeout_s + CALL_SLACK_S)
