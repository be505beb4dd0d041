"""The benchmarks run at tiny size, compare bytes after the clock, and report what they promise."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from variants import later

from benchmarks.__main__ import main
from benchmarks.cases import bench_controller, bench_faults, bench_planner, bench_processors, bench_small
from benchmarks.gpu import put, restore, training
from benchmarks.gpu.training import Size
from benchmarks.report import __main__, harness, results, targets
from benchmarks.report.harness import AT_MOST, Options, Ratio, Record, Took, interleave, median_interval
from benchmarks.rigs import gpt_tensors
from benchmarks.rigs.stopwatch import descendants, timed
from memstore.core.wire import codec
from memstore.testing.clusters.namespaces import available
from placement import place
from recovery.lineage import Span
from recovery.planner import what_if

SMALL = ["--nbytes", str(2 << 20), "--rounds", "1", "--chunk-bytes", str(64 << 10)]


def count_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every comparison of bytes that a benchmark makes."""
    seen: list[str] = []
    real = harness.require

    def require(is_equal: bool, what: str) -> None:
        seen.append(what)
        real(is_equal, what)

    for name in ("bench_put", "bench_replicate", "bench_restore"):
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
    body: dict[str, Any] = json.loads((tmp_path / results.RECORDS).read_text())
    record, *others = body[name]
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


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(available() is not None, reason="hosts are network namespaces")
def test_parity_answers_its_promises_beside_two_copies() -> None:
    """Memory of stores without a slot to spare; puts, gets and a lost host of two stores in one run."""
    records = main([*SMALL, "--only", "parity"])
    held = [getattr(ratio.target, "line", "") for record in records for ratio in record.ratios if ratio.target]
    assert sorted(held) == sorted(
        ["parity wire", *(line for line in targets.LINES if line == "copies memory" or line.startswith("parity "))]
    )
    assert all(value > 0 for record in records for values in record.seconds.values() for value in values)


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
    seconds = bench_processors.seconds_with_lock(SCRIPT)
    assert seconds == {41: 2 * bench_processors.PERIOD_S, 42: bench_processors.PERIOD_S}


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


# -- benchmarks report --------------------------------------------------------------------------------
# The results page is rendered from the result files: figures with their units, targets met, missed or not measured.


PAGE = "by hand\n<!-- generated: targets -->\nold\n<!-- end -->\n<!-- generated: results -->\n<!-- end -->\nlast\n"


def record(name: str = "put stall", target: tuple[float, str] | None = targets.STALL_COPY) -> Record:
    """A record with one contender, one that did not run, and figures of several kinds."""
    made = Record(name, 1 << 30, {"put": [0.06, 0.07, 0.2]}, about=results.about(Options(), "quick"))
    made.cpu_seconds["put"] = [0.5, 1.0, 0.7]
    made.ratios.append(Ratio("put / plain copy", [0.9, 1.2, 1.2, 1.3, 9.0], target))
    made.figure("sent", [3 << 20], "bytes")
    made.absent["peer"] = "ImportError: no module of that name"
    return made


def test_records_come_back_from_their_file_as_they_were_written(tmp_path: Path) -> None:
    """Targets, units and reasons included."""
    written = record()
    results.merge("put_stall", [written], tmp_path)
    assert results.load(tmp_path) == {"put_stall": [written]}


def test_a_stored_figure_is_held_against_the_promise_as_it_is_now(tmp_path: Path) -> None:
    """A limit that changed, or a promise that is gone, does not wait for the next run."""
    old, gone = record(), record("other")
    old.ratios[0].target = targets.STALL_COPY._replace(limit=99.0)
    gone.ratios[0].target = targets.STALL_COPY._replace(line="no longer promised")
    results.merge("put_stall", [old, gone], tmp_path)
    assert [one.ratios[0].target for one in results.load(tmp_path)["put_stall"]] == [targets.STALL_COPY, None]


def test_a_benchmark_measured_in_parts_keeps_what_it_did_not_measure_now(tmp_path: Path) -> None:
    """A record replaces the one of its name; the benchmark's others stay, in their order, and other benchmarks'."""
    stays, newer = record("b"), record("a", None)
    results.merge("wire", [record("a")], tmp_path)
    results.merge("peers", [record("a"), stays], tmp_path)
    results.merge("peers", [newer], tmp_path)
    assert results.load(tmp_path) == {"peers": [newer, stays], "wire": [record("a")]}
    assert [path.name for path in tmp_path.iterdir()] == [results.RECORDS]


def test_the_page_shows_every_promise_and_leaves_what_is_written_by_hand() -> None:
    """A missed target links the note that answers it, one without a figure is called not measured."""
    records = {"put_stall": [record()]}
    page = __main__.page(PAGE, records)
    assert page.startswith("by hand\n")
    assert page.endswith("last\n")
    assert "\nold\n" not in page
    assert "| [1.20](#put-stall) | at most 1.1: **MISSED** | [why](notes/transfer.md) |" in page
    assert page.count("| not measured |") == len(targets.LINES) - 1
    assert "| put stall | peer | did not run | | | ImportError: no module of that name |" in page
    assert "| put stall | put | 70 ms, 15.34 GB/s | 60 ms to 200 ms | 0.65 | |" in page
    assert __main__.page(page, records) == page


def test_a_promise_that_two_records_answer_says_which_is_which() -> None:
    page = __main__.page(PAGE, {"replicate": [record("one core computes"), record("two cores compute")]})
    assert page.count(" (one core computes) | [") == page.count(" (two cores compute) | [") == 1


def test_a_setting_that_no_worker_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies around the cache would be a speed that no user sees."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=0x100000")
    with pytest.raises(ValueError, match="unset it"):
        results.about(Options(), "quick")


def test_a_page_without_a_place_for_the_results_is_refused() -> None:
    """The error names the marker."""
    with pytest.raises(ValueError, match="generated: targets"):
        __main__.page("nothing generated", {})


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.25, "s", "250 ms"),
        (1.2199, "s", "1.22 s"),
        (12.34, "s", "12.3 s"),
        (2e-5, "s", "20 µs"),
        (1 << 21, "bytes", "2 MiB"),
        (0.0, "bytes", "0 B"),
        (0.42, "percent", "0.42 %"),
        (11.7, "percent", "12 %"),
        (0, "count", "0"),
        (1.1, "", "1.10"),
    ],
)
def test_a_figure_is_shown_in_its_unit(value: float, unit: str, shown: str) -> None:
    """As a person would write it."""
    assert __main__.amount(value, unit) == shown


def test_a_promise_about_every_round_is_judged_by_the_worst() -> None:
    """One wait in five rounds is a wait."""
    assert not Ratio("waits", [0, 0, 1], (0, AT_MOST), "count", "highest").is_met


def test_of_many_rounds_the_interval_of_their_median_is_judged() -> None:
    """Few rounds on both sides of a target say nothing; of many the median is known all the same."""
    chance = random.Random(7)
    rounds = [chance.gauss(0.95, 0.08) for _ in range(125)]
    assert min(rounds) < 1.01 < max(rounds)
    assert Ratio("cost", rounds, (1.01, AT_MOST)).is_met
    assert Ratio("cost", [value + 0.1 for value in rounds], (1.01, AT_MOST)).is_met is False
    assert Ratio("cost", [value + 0.06 for value in rounds], (1.01, AT_MOST)).is_met is None
    assert Ratio("cost", rounds[:10], (1.01, AT_MOST)).is_met is None


@pytest.mark.parametrize("count", [20, 25, 126])
def test_the_interval_of_a_median_holds_it_with_95_percent(count: int) -> None:
    """Of a distribution that is not symmetric, and whose median is known."""
    chance = random.Random(count)
    found = 0
    for _ in range(1000):
        among = median_interval(sorted(chance.expovariate(1.0) for _ in range(count)))
        found += among[0] <= math.log(2) <= among[-1]
    assert 940 <= found < 1000


def test_the_committed_page_is_what_its_results_render_to() -> None:
    """After a benchmark: `python -m benchmarks.report`, and commit the page with the results."""
    committed = (__main__.HERE / "README.md").read_text(encoding="utf-8")
    assert __main__.page(committed, results.load()) == committed


# -- benchmarks scale ---------------------------------------------------------------------------------
# The benchmarks of controller and planner at tiny size: what they report, and that a wrong plan is no number.


TINY = Options(rounds=1, warmups=1)


def test_the_catalogs_record_answers_both_of_its_lines() -> None:
    """A step's seconds, their growth with the ranks, what waiting costs, what is kept."""
    record = bench_controller.measure_catalog((32, 64), TINY)
    assert [ratio.target for ratio in record.ratios[:2]] == [targets.CATALOG, targets.CATALOG_GROWTH]
    assert set(record.seconds) == {"32 ranks", "64 ranks"}
    assert all(value > 0 for ratio in record.ratios for value in ratio.values)


def test_the_controllers_record_tells_what_all_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a real controller's sessions.

    What goes to all is packed once, of a moment's suspicion no process learns.
    """
    real, packed = codec.encode, Counter[str]()

    def encode(message: codec.Message) -> bytes:
        packed[codec.tag_of(message)] += 1
        return real(message)

    monkeypatch.setattr(codec, "encode", encode)
    costs = bench_controller.episodes(8)
    assert costs["a host is suspected"].orders == 0
    assert costs["a commit"].orders == 8 * 3  # the fact, its word, and what it lets go
    assert costs["a successor starts"].received_bytes > costs["a successor starts"].sent_bytes
    # The facts of room once, of two commits and two attempts with each host's part; journals at each of two starts.
    assert 0 < packed["journal"] <= 4 * 8 + 2 * 8 + 10
    # For a rack of two: each greeted, the first reported at once, the other in turn.
    assert 0 < packed["all_hosts"] + packed["host_news"] <= 6 + 3 * 2
    figures = bench_controller.record(8, costs).ratios
    assert len(figures) == 4 * len(costs) + 1


def test_the_planners_record_answers_both_of_its_lines() -> None:
    """Seconds where the lost hosts lie apart, and where whole pairs are gone; memory per host."""
    record = bench_planner.measure((32, 64), 8, TINY)
    held = [ratio.target for ratio in record.ratios if ratio.target is not None]
    assert held == [targets.PLANNER, targets.PLANNER_MEMORY]
    assert len(record.seconds) == 4


def test_the_placements_record_answers_both_of_its_lines() -> None:
    """Seconds of the large cluster, and how they grew from the small one; a wrong placement is no number."""
    record = bench_planner.measure_placement((3, 6), TINY)
    assert [ratio.target for ratio in record.ratios] == [targets.PLACEMENT, targets.PLACEMENT_GROWTH]
    topology = bench_planner.topology_of(3)
    placement = place(topology, replicas=bench_planner.REPLICAS)
    bench_planner.check_placement(placement, topology)
    owner, held = next(iter(placement.targets.items()))
    with pytest.raises(RuntimeError, match="the placement is wrong"):
        bench_planner.check_placement(replace(placement, targets={**placement.targets, owner: held[:1]}), topology)


def test_a_plan_that_reads_from_a_dead_host_stops_the_benchmark() -> None:
    """No number is reported for a plan that could not be carried out."""
    inventory, hosts = bench_planner.survivors(8)
    plan = what_if(inventory, (Span(1, None),), [hosts[3]], world_size=8, rank_hosts=dict(enumerate(hosts)))
    bench_planner.check(plan, hosts, [hosts[3]], "peer")
    with pytest.raises(RuntimeError, match="the plan is wrong"):
        bench_planner.check(plan, hosts, [hosts[2]], "peer")
    with pytest.raises(RuntimeError, match="the plan is wrong"):
        bench_planner.check(replace(plan, transfers=plan.transfers[1:]), hosts, [hosts[3]], "peer")


# -- benchmarks gpu -----------------------------------------------------------------------------------
# The GPU benchmarks: on a machine with nothing but torch, numpy, msgpack, msgspec, xxhash; no claim without CUDA.


GPU_TINY = Size(parameters=100_000, width=64, rounds=1, warmups=0, chunk_bytes=64 << 10)
WAIT_S = 300.0

# Read by every Python that starts there, so by the store's processes, too. Absent is what the store and its benchmarks
# can use beside the five; torch's own needs are torch's.
BARE_MACHINE = """
from importlib.machinery import PathFinder
ABSENT = {
    "ray", "click", "rich", "cryptography", "psutil", "obstore", "zstandard", "safetensors", "lightning",
    "transformers", "hypothesis", "pytest", "matplotlib",
}
found = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in ABSENT else found(name, path, target)
PathFinder.find_spec = find_spec
"""

MEASURE = f"""
import importlib.util, json, torch
assert importlib.util.find_spec("ray") is None
from benchmarks.gpu import put, restore
from benchmarks.gpu.training import Size
records = [one.measure(torch.device("cpu"), {GPU_TINY!r}) for one in (put, restore)]
lines = [getattr(ratio.target, "line", None) for record in records for ratio in record.ratios]
print(json.dumps([lines, [record.seconds for record in records]]))
"""


def run(folder: Path, *arguments: str) -> str:
    """Run Python on a bare machine without a GPU; return what it printed."""
    (folder / "sitecustomize.py").write_text(BARE_MACHINE)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", ["gpu.put", *later("gpu.restore")])
def test_without_a_device_they_say_that_nothing_was_measured(name: str, tmp_path: Path) -> None:
    """As a person runs them; they end well."""
    assert run(tmp_path, "-m", f"benchmarks.{name}").splitlines() == [training.NO_DEVICE]


@pytest.mark.slow
def test_they_measure_what_is_promised_where_ray_is_not(tmp_path: Path) -> None:
    """At tiny size on the host's memory, bytes compared, through a store whose processes have as little to import."""
    lines, seconds = json.loads(run(tmp_path, "-c", MEASURE))
    assert sorted(filter(None, lines)) == ["gpu d2h", "gpu h2d", "gpu overlap", "gpu stall"]
    assert all(len(values) == 1 for record in seconds for values in record.values())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_they_run_on_a_gpu() -> None:
    """With a model of a few MiB: the bytes are compared, the figures mean nothing."""
    for one in (put, restore):
        one.measure(torch.device("cuda", torch.cuda.current_device()), GPU_TINY)
