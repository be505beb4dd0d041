"""Arguments that no message can hold: refused where they are given (R20)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from link_site import WAIT_S, Site, state

from memstore.client.store import Store
from memstore.errors import ConfigError

TOO_LARGE = 1 << 64


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    site = Site(tmp_path, ["a"], monkeypatch)
    yield site.connect()[0]
    site.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.get(step=TOO_LARGE),
        lambda store: store.get(rank=TOO_LARGE),
        lambda store: store.pin(TOO_LARGE, "best"),
        lambda store: store.rewind(TOO_LARGE),
    ],
    ids=["get", "get of a rank", "pin", "rewind"],
)
def test_a_number_of_more_than_64_bits_is_refused_at_once(store: Store, ask: Callable[[Store], Any]) -> None:
    """The thread that sends could only log it, and the call would wait for an answer until its deadline."""
    with pytest.raises(ConfigError, match="cannot be asked for: a body cannot be encoded"):
        ask(store)
    assert store.put(1, state(1)).wait("committed", WAIT_S).level == "committed"
