"""What in-place recovery asks of torch's NCCL groups before they are made."""

from __future__ import annotations

import os

import pytest

from memstore.errors import ConfigError
from memstore.inplace import watcher

NAMES = tuple(watcher._NEEDED)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what a test leaves in the environment."""
    for name in (*NAMES, watcher._DUMP):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_torch_is_kept_from_ending_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not set is set; a dump of the flight recorder that the user wants stays."""
    monkeypatch.setenv(watcher._DUMP, "1")
    watcher.leave_errors_to_us()
    assert {name: os.environ[name] for name in NAMES} == dict.fromkeys(NAMES, "0")
    assert os.environ[watcher._DUMP] == "1"
    watcher.leave_errors_to_us()


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_that_breaks_the_recovery_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The error names it, and what to do."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name}=1 is set, and recovery in place needs {name}=0: unset it"):
        watcher.leave_errors_to_us()


def test_without_a_group_there_is_nothing_to_abort() -> None:
    """A rank that has left its group, or had not made it yet."""
    watcher.abort()
    assert not watcher.has_nccl()
