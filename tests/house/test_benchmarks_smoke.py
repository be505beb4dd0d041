"""The benchmarks run at tiny size, compare bytes after the clock, and report what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from benchmarks.__main__ import main
from benchmarks.cases import bench_faults, bench_gil, bench_small
from benchmarks.report import harness
from benchmarks.report.harness import Options, Ratio, Took, interleave
from benchmarks.rigs import gpt_tensors
from benchmarks.rigs.process_costs import descendants
from benchmarks.rigs.stopwatch import timed

SMALL = ["--nbytes", str(2 << 20), "--rounds", "1", "--chunk-bytes", str(64 << 10)]


def count_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every comparison of bytes that a benchmark makes."""
    seen: list[str] = []
    real = harness.require

    def require(is_equal: bool, what: str) -> None:
        seen.append(what)
        real(is_equal, what)

    for name in ("bench_put_stall", "bench_replicate", "bench_restore"):
        monkeypatch.setattr(f"benchmarks.cases.{name}.require", require)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ratios", "contenders"),
    [
        ("put_stall", ["put / plain copy"], 2),
        (
            "replicate",
            ["speed / raw TCP", "speed / the floor", "the floor's speed / raw TCP", "CPU seconds / the floor's"],
            3,
        ),
        (
            "restore",
            [
                "local get / plain copy",
                "local get of all ranks together / plain copy",
                "get from one peer / plain copy",
                "get from one peer: speed / raw TCP",
            ],
            7,
        ),
    ],
)
def test_a_benchmark_compares_bytes_in_every_round_and_writes_its_ratios(
    name: str, ratios: list[str], contenders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every contender of every round, warm-ups included, has its bytes compared; the record has all ratios."""
    seen = count_comparisons(monkeypatch)
    main([*SMALL, "--only", name, "--without-ray", "--hosts", "shared", "--out", str(tmp_path)])
    rounds = 1 + Options().warmups
    assert len(seen) == contenders * rounds
    body: dict[str, Any] = json.loads((tmp_path / f"{name}.json").read_text())
    record, *others = body["records"]
    assert [other["name"] for other in others] == (["restore, at most 256 MiB"] if name == "restore" else [])
    assert [ratio["name"] for ratio in record["ratios"]] == ratios
    assert all(len(values) == 1 and values[0] > 0 for values in record["seconds"].values())
    assert set(record["cpu_seconds"]) == set(record["seconds"])
    assert all(spent_s > 0 for values in record["cpu_seconds"].values() for spent_s in values)
    assert record["about"]["machine"]["cores"] >= 1


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.slow
def test_rays_object_store_is_measured_in_the_same_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Ray the record has Ray's put and fetch and memstore's speed over it."""
    seen = count_comparisons(monkeypatch)
    (record,) = main([*SMALL, "--only", "replicate", "--hosts", "shared", "--out", str(tmp_path)])
    assert seen.count("Ray's object") == 1 + Options().warmups
    assert [r.name for r in record.ratios] == [
        "speed / raw TCP",
        "speed / the floor",
        "the floor's speed / raw TCP",
        "CPU seconds / the floor's",
        "speed / Ray put and fetch",
        "speed / Ray fetch alone",
    ]


CORES = """
import os, sys
from pathlib import Path
from benchmarks.rigs.cores import emulated, on_core

def cores():
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}

hosts, before = emulated(), cores()
with on_core(hosts.near):
    assert cores() == {frozenset({hosts.near})}, cores()
    with on_core(hosts.far):
        assert cores() == {frozenset({hosts.far})}, cores()
    assert cores() == {frozenset({hosts.near})}, cores()
assert cores() == before, (before, cores())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two hosts are emulated on a core each")
def test_emulated_hosts_have_a_core_each() -> None:
    """All threads of a process stand on the core of the host that it is on; afterwards they are where they were."""
    subprocess.run([sys.executable, "-c", CORES], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two hosts are emulated on a core each")
@pytest.mark.parametrize(("name", "line"), [("replicate", "sealed tcp hosts"), ("restore", "get peer hosts")])
def test_hosts_emulated_with_a_core_each_answer_their_own_promise(name: str, line: str) -> None:
    """The record has a name of its own, so that it stands beside that of shared cores."""
    before = os.sched_getaffinity(0)
    (record,) = main([*SMALL, "--only", name, "--hosts", "emulated"])
    assert record.name == f"{name}, emulated hosts"
    assert line in [getattr(ratio.target, "line", "") for ratio in record.ratios]
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
@pytest.mark.long
def test_small_states_answer_their_four_promises() -> None:
    """Many small tensors, FSDP2's, and 1 KiB of one and of four ranks; bytes are compared in every round."""
    records = main([*SMALL, "--only", "small"])
    held = {getattr(ratio.target, "line", "") for record in records for ratio in record.ratios if ratio.target}
    assert held == {"many stall", "fsdp2 beyond", "kib commit", "kib commit 4"}
    assert len(bench_small.local_tensors(bench_small.small_tensors())) == 5000


SCRIPT = """
  41 55d0c0de (/usr/bin/python3.11)
  41 55d0c0df (/opt/venv/lib/python3.11/site-packages/msgpack/_cmsgpack.cpython-311-x86_64-linux-gnu.so)
  41 55d0c0e0 (/opt/venv/lib/python3.11/site-packages/xxhash/_xxhash.cpython-311-x86_64-linux-gnu.so)
  41 ffffffffa0000000 ([kernel.kallsyms])
  42 7f00c0e1 (/usr/lib/x86_64-linux-gnu/libc.so.6)
  42 7f00c0e2 (/usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0)
"""


def test_samples_in_the_interpreter_and_in_what_keeps_its_lock_count() -> None:
    """The kernel, libc's copies and digests run without the lock."""
    seconds = bench_gil.seconds_with_lock(SCRIPT)
    assert seconds == {41: 2 * bench_gil.PERIOD_S, 42: bench_gil.PERIOD_S}


def test_bytes_that_differ_stop_a_benchmark() -> None:
    """No number is reported for bytes that did not arrive."""
    with pytest.raises(RuntimeError, match="differ"):
        harness.require(False, "a copy")


def test_a_touched_state_differs_in_every_64_kib() -> None:
    """No chunk of a round equals one of an earlier round, or its store and transfer would be free."""
    state = gpt_tensors.gpt_state(4 << 20)
    equal_state = gpt_tensors.empty_like(state)
    for target, source in zip(gpt_tensors.tensors(equal_state), gpt_tensors.tensors(state), strict=True):
        target.copy_(source)
    assert gpt_tensors.is_same(state, equal_state)
    gpt_tensors.touch(state)
    for old, new in zip(gpt_tensors.tensors(equal_state), gpt_tensors.tensors(state), strict=True):
        for a, b in zip(old.reshape(-1).split(16384), new.reshape(-1).split(16384), strict=True):
            assert not a.equal(b)


@pytest.mark.parametrize("nbytes", [2 << 20, 64 << 20])
def test_a_gpt_state_has_about_the_size_that_was_asked(nbytes: int) -> None:
    """Within a tenth, for any width that was chosen."""
    assert abs(gpt_tensors.total_nbytes(gpt_tensors.gpt_state(nbytes)) - nbytes) < nbytes / 10


def test_contenders_take_turns_and_warm_up_rounds_do_not_count() -> None:
    """Each contender runs once a round, the order turns, and only timed rounds are kept."""
    order: list[tuple[str, int]] = []

    def contender(name: str) -> Any:
        return lambda number: order.append((name, number)) or Took(float(number), number / 2 if name == "a" else None)

    options = Options(rounds=2, warmups=1)
    rounds = interleave({"a": contender("a"), "b": contender("b")}, options, lambda number: None)
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert rounds.seconds == {"a": [1.0, 2.0], "b": [1.0, 2.0]}
    assert rounds.cpu_seconds == {"a": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("values", "target", "is_met"),
    [
        ([1.0, 1.1, 1.2, 1.2, 9.0], (1.3, "at most"), True),
        ([1.4], (1.3, "at most"), False),
        ([2.4], (2.5, "at least"), False),
        ([1.0, 1.2, 1.4, 1.5, 1.6], (1.3, "at most"), None),
        ([-5.0, -4.8, -2.0, 0.1, 0.1], (0.15, "at most"), None),
        ([0.1, 0.5, 2.0, 2.5, 9.0], (0.15, "at most"), False),
    ],
)
def test_a_ratio_is_judged_by_its_median(values: list[float], target: tuple[float, str], is_met: bool | None) -> None:
    """One slow round does not decide; rounds that do not agree say nothing, nor do such that differ by the target."""
    assert Ratio("r", values, target).is_met is is_met
    assert Ratio("r", values, target).is_noisy == (is_met is None)


def test_processor_seconds_count_threads_that_have_ended() -> None:
    """A contender that starts threads for a transfer, and ends them with it, is charged for them all the same."""

    def spend() -> None:
        while time.thread_time() < 0.05:
            pass

    def work() -> None:
        thread = threading.Thread(target=spend)
        thread.start()
        thread.join()

    took, _ = timed(work)
    assert took.cpu_s is not None
    assert took.cpu_s >= 0.05


def test_processes_that_others_started_are_found() -> None:
    """A saver that a peer's process starts counts, and so does what that one starts; others do not."""
    script = "import subprocess, sys; child = subprocess.Popen(['cat']); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert {parent.pid, child} <= set(descendants(os.getpid()))
        assert descendants(child) == []
        parent.communicate("")


def test_percentiles_are_values_that_were_measured() -> None:
    """The nearest rank, so that p90 of five is the worst of them; a fault no process notices shows no number."""
    assert bench_faults.percentiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {"p50": 3.0, "p90": 5.0, "max": 5.0}
    assert bench_faults.percentiles([float(n) for n in range(1, 11)]) == {"p50": 5.0, "p90": 9.0, "max": 10.0}
    assert bench_faults.percentiles([]) is None
    shown = bench_faults.row("slow link", {"noticed": None, "recovered": bench_faults.percentiles([1.5])})
    assert shown == "| slow link | – | – | – | 1.50 s | 1.50 s | 1.50 s |"
