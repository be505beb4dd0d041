"""ray_cluster.yaml: accepted by Ray's own validator, with failure domains and the store's start in it."""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import ROOT

PATH = ROOT / "ray_cluster.yaml"


@pytest.fixture
def config() -> dict[str, Any]:
    """Return the file as Ray reads it."""
    loaded = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def prepare(config: dict[str, Any]) -> dict[str, Any]:
    """Do what `ray up` does before it connects to any machine: fill in defaults, validate."""
    pytest.importorskip("jsonschema")
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def label_command(config: dict[str, Any], home: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Run the command that writes a host's labels, on a machine whose only address is `address`."""
    fake = home / "bin" / "hostname"
    fake.parent.mkdir(parents=True)
    fake.write_text(f"#!/bin/sh\necho '{address} '\n")
    fake.chmod(0o755)
    env = {"HOME": str(home), "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    (command,) = config["initialization_commands"]
    return subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_ray_accepts_the_file(config: dict[str, Any]) -> None:
    """Ray's validator takes the file, keeps every worker for good and runs our start commands."""
    prepared = prepare(config)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == len(config["provider"]["worker_ips"])
    assert prepared["head_start_ray_commands"] == config["head_start_ray_commands"]
    assert prepared["worker_start_ray_commands"] == config["worker_start_ray_commands"]


@pytest.mark.slow
def test_the_validator_refuses_what_ray_up_refuses(config: dict[str, Any]) -> None:
    """The check can fail: an unknown key is refused."""
    import jsonschema

    config["failure_domains"] = ["rack"]
    with pytest.raises(jsonschema.ValidationError, match="failure_domains"):
        prepare(config)


def test_every_host_gets_its_own_labels(config: dict[str, Any], tmp_path: Path) -> None:
    """Each address writes a labels file that Ray parses, with a host name of its own and its rack of the table."""
    from ray._private.label_utils import parse_node_labels_from_yaml_file

    table = [line.split() for line in config["metadata"]["racks"].splitlines()]
    assert {row[0] for row in table} == {config["provider"]["head_ip"], *config["provider"]["worker_ips"]}
    found = {}
    for address, rack, zone in table:
        done = label_command(config, tmp_path / address, address)
        assert done.returncode == 0, done.stderr
        labels = parse_node_labels_from_yaml_file(str(tmp_path / address / "memstore_labels.yaml"))
        assert (labels["rack"], labels["zone"]) == (rack, zone)
        found[labels["host"]] = rack
    assert len(found) == len(table)
    assert len(set(found.values())) == 2


def test_a_host_outside_of_the_table_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    """A host without a rack stops the start; an address that begins like a listed one is not taken for it."""
    for number, address in enumerate(("10.99.0.1", "10.20.0.1", "10.20.0.111")):
        done = label_command(config, tmp_path / str(number), address)
        assert done.returncode == 1
        assert address in done.stderr


def test_every_raylet_starts_with_labels_and_the_head_starts_the_store(config: dict[str, Any]) -> None:
    """Labels come with both start commands, the store after Ray on the head, authentication set alike everywhere."""
    head, workers = config["head_start_ray_commands"], config["worker_start_ray_commands"]
    starts = [command for command in (*head, *workers) if "ray start" in command]
    assert len(starts) == 2
    for command in starts:
        assert "--labels-file=$HOME/memstore_labels.yaml" in shlex.split(command)
    for command in (*starts, head[-1]):
        assert "RAY_AUTH_MODE=disabled" in command
    assert head[-1].endswith("memstore up")


def test_every_number_is_explained() -> None:
    """A line with a setting that is a number has a comment above it that says why."""
    lines = PATH.read_text(encoding="utf-8").splitlines()
    numbers = [at for at, line in enumerate(lines) if re.fullmatch(r"\s*[a-z_]+: \d+(\.\d+)?", line)]
    assert numbers
    for at in numbers:
        above = next(line for number, line in reversed(list(enumerate(lines[:at]))) if number not in numbers)
        assert above.lstrip().startswith("#"), f"no reason for {lines[at]!r}"
