"""Job fields given to a store's start: defaults for its jobs, field by field; an unset field is no default one (R5)."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import memstore
from memstore.admin.cluster import _check_fields
from memstore.cli import main
from memstore.config import Config
from memstore.errors import ConfigError
from memstore.testing.clusters.processes import ProcessCluster


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


def test_a_start_with_other_defaults_lists_them() -> None:
    running = Config(replicas=3, durable="/d").start_fields()
    _check_fields(Config(), running)
    _check_fields(Config(replicas=3), running)
    _check_fields(Config(), Config(arena_bytes="400MiB").start_fields())  # nothing is asked, so nothing differs
    with pytest.raises(ConfigError, match=r"arena_bytes: 400.0 MiB runs, 1.0 TiB asked.*`memstore down --store a`"):
        _check_fields(Config(arena_bytes="1TiB", store="a"), Config(arena_bytes="400MiB", store="a").start_fields())
    with pytest.raises(ConfigError, match=r"replicas: 3 runs, 2 asked; keep_steps: no default of the store \(1\), 4"):
        _check_fields(Config(replicas=2, keep_steps=4), running)


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
