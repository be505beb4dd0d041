"""Values of arguments that a public call cannot take, or takes as the plain number that they are (R20)."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from link_site import WAIT_S, Site, state

import memstore
from memstore.admin.cluster import _check_fields
from memstore.cli import main
from memstore.client.reader import Reader
from memstore.client.store import Store
from memstore.config import Config
from memstore.core.wire.calls import AskEvents
from memstore.errors import ConfigError, StepConflict, UnsupportedState
from memstore.shell.rank.admin_link import Tool
from memstore.testing.clusters.processes import ProcessCluster

Call = Callable[[Store, Reader, Any], Any]


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, Reader]]:
    """A rank of a new job, and a reader of it."""
    site = Site(tmp_path, ["a"], monkeypatch)
    with Reader("job", Tool(site.folder("a")), site.config) as reader:
        yield site.connect()[0], reader
    site.close()


@pytest.fixture
def pair(new: tuple[Store, Reader]) -> tuple[Store, Reader]:
    """Those, once step 1 is committed."""
    new[0].put(1, state(1)).wait("committed", WAIT_S)
    return new


def refusal(call: Call, pair: tuple[Store, Reader], value: object) -> str:
    """Return why a call refuses a value; "" if it takes it."""
    try:
        call(*pair, value)
    except ConfigError as error:
        return str(error)
    return ""


def refuse(calls: dict[str, Call], pair: tuple[Store, Reader], values: Sequence[object], match: str) -> None:
    """Every call refuses every value with a ConfigError that matches."""
    for name, call in calls.items():
        for value in values:
            said = refusal(call, pair, value)
            assert re.search(match, said), (name, value, said)


WHOLE: dict[str, Call] = {
    "get": lambda store, reader, value: store.get(value),
    "get of a rank": lambda store, reader, value: store.get(1, rank=value),
    "pin": lambda store, reader, value: store.pin(value, "best"),
    "pin of an attempt": lambda store, reader, value: store.pin(1, "best", attempt=value),
    "rewind": lambda store, reader, value: store.rewind(value),
    "rewind to an attempt": lambda store, reader, value: store.rewind(1, attempt=value),
    "persist": lambda store, reader, value: store.persist(value),
    "dcp_reader": lambda store, reader, value: store.dcp_reader(value),
    "reader": lambda store, reader, value: reader.get(value),
    "reader of a rank": lambda store, reader, value: reader.get(1, rank=value),
    "reader of an attempt": lambda store, reader, value: reader.get(1, attempt=value),
    "pin of a reader": lambda store, reader, value: reader.pin(value, "best"),
    "persist of a reader": lambda store, reader, value: reader.persist(value),
    "ranges of a reader": lambda store, reader, value: reader.ranges(attempt=value),
    "connect": lambda store, reader, value: memstore.connect("other", rank=0, world_size=value, config=store.config),
}


def test_what_is_no_number_of_a_step_or_rank_is_refused_at_once(pair: tuple[Store, Reader]) -> None:
    """The error names the argument, its value and the limits; nothing was sent, and nothing waits for a deadline."""
    values = (-1, 1.0, True, "1", "latest", math.nan, 1 << 61, 10**30, (1,), torch.tensor(1.0))
    refuse(WHOLE, pair, values, r"^\w+=.* is out of range: it must be an int from [01] to 2\*\*61 - 1$")


def test_what_is_no_step_is_refused_by_put_as_a_conflict(pair: tuple[Store, Reader]) -> None:
    """put, should_put and a DCP writer take the same numbers; theirs is the error of a step that does not follow."""
    store, _ = pair
    for verb in (lambda step: store.put(step, {}), store.should_put, store.dcp_writer):
        for value in (-1, 1.0, True, "1", None, 1 << 61):
            with pytest.raises(StepConflict, match="is out of range: it must be an int from 0"):
                verb(value)


def test_whole_numbers_of_numpy_and_torch_are_numbers(pair: tuple[Store, Reader]) -> None:
    """A step that was computed by numpy is put, read and pinned as the plain one is."""
    store, reader = pair
    one, rank = np.int64(1), torch.tensor(0)
    assert store.put(one, state(1)).step == 1  # the ticket of before
    got = store.get(one, rank=rank)
    assert got is not None
    assert (got.step, reader.get(one, rank=rank, attempt=np.uint8(1)).step) == (1, 1)
    store.pin(one, "numpy", attempt=np.int16(1))
    reader.unpin("numpy")
    assert store.dcp_reader(one).step == 1
    assert store.prepare(np.int64(100)).wait(WAIT_S).nbytes >= store.config.chunk_bytes


SECONDS: dict[str, Call] = {
    "ticket": lambda store, reader, value: store.put(1, state(1)).wait("committed", value),
    "put": lambda store, reader, value: store.put(1, state(1), timeout_s=value),
    "wait_before_step": lambda store, reader, value: store.wait_before_step(timeout_s=value),
    "flush": lambda store, reader, value: store.flush(timeout_s=value),
    "get of a rank": lambda store, reader, value: store.get(1, rank=0, timeout_s=value),
    "prepare": lambda store, reader, value: store.prepare(100).wait(value),
    "dcp_writer": lambda store, reader, value: store.dcp_writer(2, wait_s=value),
    "dcp_reader": lambda store, reader, value: store.dcp_reader(1, timeout_s=value),
    "reader": lambda store, reader, value: reader.get(timeout_s=value),
    "ranges of a reader": lambda store, reader, value: reader.ranges(timeout_s=value).ask(1, 0).manifest(),
}
COLLECTIVE: dict[str, Call] = {
    "get": lambda store, reader, value: store.get(timeout_s=value),
    "agree_on_step": lambda store, reader, value: store.agree_on_step(timeout_s=value),
}
REFUSED: dict[str, Call] = {
    "persist": lambda store, reader, value: store.persist(timeout_s=value),
    "persist of a reader": lambda store, reader, value: reader.persist(timeout_s=value),
    "start": lambda store, reader, value: memstore.start(store.config, timeout_s=value),
}


def test_what_is_no_time_is_refused_at_once(pair: tuple[Store, Reader]) -> None:
    """NaN above all: no clock ever passes a deadline that is none, so the call would wait for ever."""
    values = (math.nan, np.float32("nan"), "2", True, (), 10**400)
    refuse(SECONDS | COLLECTIVE | REFUSED, pair, values, r"^(timeout_s|wait_s)=.* is no time: use a number of seconds$")


TIMES = (np.float32(30), np.float64(30), np.int64(30), torch.tensor(30.0), math.inf, 1e300)


def test_times_of_numpy_and_torch_and_endless_ones_are_times(pair: tuple[Store, Reader]) -> None:
    """Clocks and messages take plain floats of some years; a caller may give any number of seconds."""
    said = [(name, refusal(call, pair, value)) for name, call in SECONDS.items() for value in TIMES]
    assert [(name, why) for name, why in said if why] == []
    refuse({name: REFUSED[name] for name in REFUSED if "persist" in name}, pair, TIMES, "has no durable storage")


def test_such_times_are_those_of_a_call_of_all_ranks(new: tuple[Store, Reader]) -> None:
    """They travel to the controller, which waits as long for the other ranks."""
    for call in COLLECTIVE.values():
        for value in TIMES:
            assert call(*new, value) is None


def test_numbers_of_a_config_are_plain_ones() -> None:
    """A message of connect() carries them; what is counted is whole."""
    config = Config(
        replicas=np.int64(2),
        connect_timeout_s=np.float32(2),
        stall_budget_s=np.float64(1),
        scrub_bytes_per_s=1e9,
        keep_steps=2.0,
    )  # type: ignore[arg-type]
    plain = (config.replicas, config.connect_timeout_s, config.stall_budget_s, config.scrub_bytes_per_s)
    assert [type(value) for value in (*plain, config.keep_steps)] == [int, float, float, int, int]
    assert (*plain, config.keep_steps) == (2, 2.0, 1.0, 10**9, 2)
    for fields, words in (
        ({"replicas": 2.5}, r"replicas=2.5 is out of range: it must be a whole number from 1 to 16"),
        ({"keep_steps": True}, "keep_steps=True is out of range"),
        ({"stall_budget_s": math.nan}, "stall_budget_s=nan is out of range: it must be a number from 0 to 3600"),
        ({"stall_budget_s": "5"}, "stall_budget_s='5' is out of range"),
        ({"parity": 1}, "parity=1 with replicas=2, scatter=1: parity is for replicas=2 or 3 and scatter=1"),
        ({"parity": 4, "replicas": 1}, "parity=4 with replicas=1"),
        ({"parity": 4, "replicas": 4}, "parity=4 with replicas=4"),
        ({"parity": 4, "replicas": 3, "scatter": 2}, "parity=4 with replicas=3, scatter=2"),
    ):
        with pytest.raises(ConfigError, match=words):
            Config(**fields)  # type: ignore[arg-type]
    assert [Config(parity=4, replicas=replicas).parity for replicas in (2, 3)] == [4, 4]


def test_what_is_no_config_is_refused_by_its_type() -> None:
    """A dict of fields above all."""
    fields: Any = {"replicas": 2}
    for call in (
        lambda: memstore.connect("job", config=fields),
        lambda: memstore.reader("job", config=fields),
        lambda: memstore.start(fields),
        lambda: memstore.status(config=fields),
    ):
        with pytest.raises(ConfigError, match=r"^config= is of type dict: pass a memstore.Config$"):
            call()


def test_a_time_that_is_over_is_no_time_left(pair: tuple[Store, Reader]) -> None:
    """What a caller computes as `deadline - now` may be negative: the call ends as with 0."""
    with pytest.raises(TimeoutError, match="after 0 s"):
        pair[0].put(1, state(1)).wait("durable", -3.0)


def test_a_question_that_no_message_can_hold_names_its_fault(pair: tuple[Store, Reader]) -> None:
    """Behind the checks of arguments: the question and its job are named, and the field that is wrong."""
    with pytest.raises(ConfigError, match=r"^events of job 'job' cannot be asked for: Expected `int` >= 0 .*since"):
        pair[1]._tool.ask(AskEvents(job="job", since=-1))


def test_a_state_without_an_end_is_refused_by_path_at_the_first_put(new: tuple[Store, Reader]) -> None:
    """A list in itself, a dict in itself twice, a tower; the remedy is taken."""
    store, _ = new
    ring: list[Any] = [1.0]
    ring.append(ring)
    wheel: dict[str, Any] = {}
    wheel |= {"a": wheel, "b": wheel}
    tower: Any = [1.0]
    for _ in range(3000):
        tower = [tower]
    for value, match in ((ring, r"\['x'\]\[1\].*without that entry"), (wheel, "itself"), (tower, "put it flatter")):
        for call in (store.prepare, lambda state: store.put(1, state)):
            with pytest.raises(UnsupportedState, match=match):
                call({"x": value})
    with pytest.raises(UnsupportedState, match=r"dtype object.*put its tolist\(\)"):
        store.put(1, {"x": np.array([1, "a"], dtype=object)})
    store.put(1, {"x": ring[:1], "y": np.array([1, "a"], dtype=object).tolist()}).wait("committed", WAIT_S)


# -- job defaults -------------------------------------------------------------------------------------
# Job fields given to a store's start: defaults for its jobs, field by field; an unset field is no default one (R5).


def test_a_config_knows_what_it_was_given() -> None:
    """Also pickled, extended, and sent as plain values; a field given as its default is given."""
    config = Config(replicas=2, store="a").with_fields({"keep_steps": 3})
    for same in (config, pickle.loads(pickle.dumps(config))):
        assert same.given == {"replicas", "store", "keep_steps"}
        assert same.job_defaults() == {"replicas": 2, "keep_steps": 3}
    assert Config().with_fields(config.start_fields()).job_defaults() == {"replicas": 2, "keep_steps": 3}
    merged = config.with_defaults({"replicas": 3, "keep_steps": 9, "durable": "/d"})
    assert (merged.replicas, merged.keep_steps, merged.durable) == (2, 3, "/d")


def test_a_copy_by_replace_is_given_what_it_names_and_what_was_given() -> None:
    """An unset field stays unset: a store's default for it counts; one that is named as its default is given."""
    config = replace(Config(replicas=3, store="a"), keep_steps=1, durable="/d")
    assert config.given == {"replicas", "store", "keep_steps", "durable"}
    assert (config.replicas, config.store, config.keep_steps, config.durable) == (3, "a", 1, "/d")
    again = replace(pickle.loads(pickle.dumps(config)), replicas=2)
    assert again.given == config.given
    assert again.with_defaults({"keep_steps": 9, "put_every": 50}) == replace(again, put_every=50)
    assert replace(Config()).given == frozenset()
    assert replace(config) == config
    assert hash(replace(config)) == hash(config)
    with pytest.raises(ConfigError, match="replicas=99"):
        replace(config, replicas=99)
    with pytest.raises(ConfigError, match="replica"):
        replace(config, replica=1)


def difference(asked: Config, running: dict[str, Any]) -> str:
    """Return why a start is refused beside a store that runs; "" if it asks for nothing else."""
    try:
        _check_fields(asked, running)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_start_with_other_defaults_lists_them() -> None:
    """What is not asked, and what is asked and runs, is no difference."""
    running = Config(replicas=3, durable="/d").start_fields()
    assert difference(Config(), running) == ""
    assert difference(Config(replicas=3), running) == ""
    assert difference(Config(), Config(arena_bytes="400MiB").start_fields()) == ""
    said = difference(Config(arena_bytes="1TiB", store="a"), Config(arena_bytes="400MiB", store="a").start_fields())
    assert re.search(r"arena_bytes: 400.0 MiB runs, 1.0 TiB asked.*`memstore down --store a`", said)
    said = difference(Config(replicas=2, keep_steps=4), running)
    assert "replicas: 3 runs, 2 asked; keep_steps: no default of the store (1), 4" in said


def test_jobs_get_the_defaults_of_their_store(tmp_path: Path) -> None:
    """A job's own fields win; a controller that replaces another knows the defaults too."""
    durable = tmp_path / "durable"
    durable.mkdir()
    with ProcessCluster(tmp_path / "c", {"h1": {}}, keep_steps=4, replicas=1, durable=str(durable)) as cluster:
        plain = Config(store=cluster.config.store)
        for restart in (False, True):
            if restart:
                cluster.kill_controller()
                cluster.start_controller()
            with memstore.connect("plain", rank=0, world_size=1, config=plain) as store:
                assert (store.config.keep_steps, store.config.replicas) == (4, 1)
                store.get()
                store.put(int(restart), {"a": 1}).wait("durable", 60)
            own = plain.with_fields({"keep_steps": 1, "durable": None})
            with memstore.connect("own", rank=0, world_size=1, config=own) as store:
                assert (store.config.keep_steps, store.config.replicas, store.config.durable) == (1, 1, None)
            body = cluster.status()
            assert body["job_defaults"] == {"keep_steps": 4, "replicas": 1, "durable": str(durable)}
            rows = {row["job"]: row for row in body["jobs"]}
            assert (rows["plain"]["keep_steps"], rows["plain"]["durable"]) == (4, str(durable))
            assert (rows["own"]["keep_steps"], rows["own"]["durable"]) == (1, None)
        shown = CliRunner().invoke(main, ["status", "--store", cluster.config.store])
        assert "jobs get replicas=1, keep_steps=4" in " ".join(shown.stdout.split())
        as_json = CliRunner().invoke(main, ["status", "--json", "--store", cluster.config.store])
        assert json.loads(as_json.stdout)["job_defaults"]["durable"] == str(durable)


def test_the_store_that_is_to_be_stopped_is_named_where_it_lies() -> None:
    """`memstore down` with the folder that was asked for would look there for what the store leaves in memory."""
    running = Config(store="a", arena_dir="/dev/shm/there").start_fields()
    with pytest.raises(ConfigError, match=r"`memstore down --store a --arena-dir /dev/shm/there`"):
        _check_fields(Config(store="a", arena_dir="/mnt/here"), running)
    with pytest.raises(ConfigError, match=r"`memstore down --store a`"):
        _check_fields(Config(store="a", arena_dir="/mnt/here"), Config(store="a").start_fields())
