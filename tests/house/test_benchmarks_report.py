"""The results page is rendered from the result files: figures with their units, targets met, missed or not measured."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from benchmarks.report import __main__, results, targets
from benchmarks.report.harness import AT_MOST, Options, Ratio, Record, median_interval

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
    path = results.merge("put_stall", [written], tmp_path)
    assert results.load(path) == [written]


def test_a_stored_figure_is_held_against_the_promise_as_it_is_now(tmp_path: Path) -> None:
    """A limit that changed, or a promise that is gone, does not wait for the next run."""
    old, gone = record(), record("other")
    old.ratios[0].target = targets.STALL_COPY._replace(limit=99.0)
    gone.ratios[0].target = targets.STALL_COPY._replace(line="no longer promised")
    loaded = results.load(results.merge("put_stall", [old, gone], tmp_path))
    assert [one.ratios[0].target for one in loaded] == [targets.STALL_COPY, None]


def test_a_benchmark_measured_in_parts_keeps_what_it_did_not_measure_now(tmp_path: Path) -> None:
    """A record replaces the one of its name; the others of the file stay, in their order."""
    stays, newer = record("b"), record("a", None)
    results.merge("peers", [record("a"), stays], tmp_path)
    path = results.merge("peers", [newer], tmp_path)
    assert results.load(path) == [newer, stays]


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
    assert __main__.page(committed, __main__.read()) == committed
