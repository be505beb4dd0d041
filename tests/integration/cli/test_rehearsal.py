"""A rehearsal says before the first failure what a fresh process would not take: real processes, one file of builds."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import rehearsed
from click.testing import CliRunner
from link_site import WAIT_S, Site

from memstore.cli import main
from memstore.client.rehearsal import rehearse_alone, target_of
from memstore.client.store import Store
from memstore.errors import ConfigError, PeerTimeout

FILE = Path(rehearsed.__file__)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("good", "a fresh process takes this step: every value comes back, and its next loss is equal"),
        ("refuses", "LoadError: Grows.load_state_dict() raised ValueError: has room for 0 and gets 2"),
        ("forgets", "does not come back: state['counter']['count']: 2 was put, 0 is there"),
        ("without_random_state", "something that training uses is not in the state, such as random state"),
        ("raises", "raised RuntimeError: no data set here"),
        ("absent", "has no function 'absent'"),
        ("connects", "joins no job, else it would fence the one that trains: call connect('llm') outside of build()"),
    ],
)
def test_what_would_not_come_back_is_named(name: str, found: str) -> None:
    """Each kind of loss by its path or its cause; a state that comes back is called equal."""
    rehearsal = rehearse_alone(f"{FILE}:{name}", 2, WAIT_S * 2)
    assert found in str(rehearsal)
    assert rehearsal.is_equal is (name == "good")


def test_a_build_that_hangs_ends_with_its_deadline() -> None:
    """No process of it is left."""
    with pytest.raises(PeerTimeout, match="has not ended after 8 s: raise timeout_s"):
        rehearse_alone(f"{FILE}:hangs", 1, 8.0)


def test_the_command_says_so_with_its_exit_code() -> None:
    """0 for equal, 1 with the paths; --json has both."""
    good = CliRunner().invoke(main, ["rehearse", f"{FILE}:good"])
    assert (good.exit_code, "every value comes back" in good.output) == (0, True)
    bad = CliRunner().invoke(main, ["rehearse", f"{FILE}:forgets", "--json"])
    assert bad.exit_code == 1
    assert "state['counter']['count']" in bad.output


def test_what_user_code_prints_does_not_mix_with_the_data() -> None:
    """stdout has one JSON document, whatever build() prints."""
    command = [sys.executable, "-m", "memstore.cli", "rehearse", f"{FILE}:prints", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S * 2, check=False)
    assert json.loads(done.stdout)["is_equal"] is True, done.stderr
    assert done.stderr.splitlines() == ["a model is built"] * 2  # one line of each process, and none of its end


def test_a_function_that_no_process_can_import_is_refused() -> None:
    """Before any process is started."""
    with pytest.raises(ConfigError, match="needs a function that a fresh process can import"):
        target_of(lambda: None)
    assert target_of(rehearsed.good) == "rehearsed:good"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A store on one host."""
    site = Site(tmp_path, ["a"], monkeypatch)
    yield site
    site.close()


@pytest.fixture
def store(site: Site) -> Store:
    """One rank of it."""
    return site.connect()[0]


def test_a_stored_step_is_rehearsed_by_the_job_itself(store: Store) -> None:
    """The stored bytes are what the fresh process takes, and the loss that followed is compared."""
    state, step = rehearsed.good()
    step()
    store.put(1, state)
    loss = step()
    assert store.rehearse(rehearsed.good, loss=loss).is_equal
    found = store.rehearse(rehearsed.good, loss=loss + 1)
    assert (found.is_equal, found.differs) == (False, ())
    state["counter"] = rehearsed.Forgets()
    state["counter"].count = 3
    store.put(2, state)
    assert "state['counter']['count']: 3 was put, 0 is there" in str(store.rehearse(rehearsed.forgets))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("good", "every value comes back"),
        ("forgets", "does not come back: state['counter']['count']: 1 was put, 0 is there"),
        ("hangs", "was cut short by close()"),
    ],
)
def test_the_first_step_is_rehearsed_beside_the_training(
    site: Site, caplog: pytest.LogCaptureFixture, name: str, found: str
) -> None:
    """The verdict is in rank 0's log, though later steps have replaced the first; close() ends what is under way."""
    caplog.set_level(logging.INFO, "memstore")
    state, step = (rehearsed.forgets if name == "forgets" else rehearsed.good)()
    step()
    store = site.connect(rehearse=f"{FILE}:{name}")[0]
    for number in range(3):  # the first may be superseded
        store.put(number, state)
    store.flush()
    rehearsal = store.first_rehearsal
    assert rehearsal is not None
    if name != "hangs":
        assert rehearsal.wait(WAIT_S * 2)
    store.close()
    assert found in caplog.text
    assert not [child for child in psutil.Process().children() if "memstore.client.rehearsal" in child.cmdline()]


def test_a_rehearsal_that_cannot_be_is_refused_by_connect(site: Site) -> None:
    """Before the rank joins."""
    with pytest.raises(ConfigError, match="needs a function that a fresh process can import"):
        site.connect(rehearse=lambda: None)
    with pytest.raises(ConfigError, match="takes no shared shards"):
        site.connect(rehearse=rehearsed.good, shard_rank=0, shard_count=1)
