"""What a suite writes: a record for machines and a page that shows every text of it as text; nothing is run here."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from repository import ROOT

import memstore.drills.cli as group_module
import memstore.drills.run.suite as suite_module
from memstore.cli import main
from memstore.cli.output import ExitCode
from memstore.config import Config
from memstore.core.wire.calls import NoteDrill
from memstore.drills.model.catalogue import DRILLS, EMBEDDED, RUNNING, Options, find
from memstore.drills.model.report import BROKEN, CHECK, ERROR, PASS, SETUP, Report, Timeline
from memstore.drills.run import runner
from memstore.drills.run.page import page
from memstore.drills.run.suite import FULL, STANDARD, Play, Suite, SuiteResult, plays_of, record
from memstore.drills.sites.site import Site
from memstore.errors import ConfigError, DrillError, PeerTimeout
from memstore.testing import part_records
from memstore.testing.faults.catalogue import KINDS

NASTY = "<script>alert('x')</script> & \"quoted\""


class Tags(HTMLParser):
    """Collects tags and text, and complains about what is not closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def report_of(name: str, *, outcome: str = PASS, words: str = "0 steps lost") -> Report:
    """A report as a drill leaves it, with two phases and three lines."""
    report = Report(name, 7, "0 steps lost", outcome=outcome, words=words, verdict="local", step_before=5)
    timeline = Timeline(report, lambda line: None)
    with timeline.phase(SETUP):
        pass
    for label in ("before", "inject", "detected"):
        timeline.line(label, f"{label} {NASTY}")
    with timeline.phase(CHECK):
        pass
    report.step_restored, report.is_verified, report.bytes_compared = 5, True, 4096
    report.bytes_by_tier["peer"] = 4096
    report.seconds.update(detect=0.25, plan=0.001, transfer=0.5, load=0.1)
    return report


def suite_with(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, Report | Exception]) -> tuple[Suite, list[str]]:
    """A suite whose drills end as ordered, on sites that note when they are opened and closed."""
    log: list[str] = []

    @contextlib.contextmanager
    def opener() -> Iterator[Site]:
        log.append("open")
        yield cast(Site, type("FakeSite", (), {"config": Config()})())
        log.append("close")

    def run(name: str, site: Site, options: Options, print_line: Any) -> Report:
        log.append(name)
        found = outcomes[name]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(suite_module, "run_drill", run)
    return Suite({EMBEDDED: opener}, Options(seed=7), durable="/d", timeout_s=60.0, print_line=lambda line: None), log


def test_a_drill_that_fails_does_not_stop_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken promise, a drill that did not work and one that blew up are noted; the next has a new cluster."""
    outcomes = {
        "kill-rank": RuntimeError("blew up"),
        "kill-holder": report_of("kill-holder", outcome=ERROR),
        "kill-controller": report_of("kill-controller", outcome=BROKEN),
        "corrupt-chunk": report_of("corrupt-chunk"),
    }
    suite, log = suite_with(monkeypatch, outcomes)
    result = suite.run([Play(find(name)) for name in outcomes])
    assert [row["outcome"] for row in result.drills] == [ERROR, ERROR, BROKEN, PASS]
    assert result.drills[0]["message"] == "blew up"
    assert log == [
        "open",
        "kill-rank",
        "close",
        "open",
        "kill-holder",
        "close",
        "open",
        "kill-controller",
        "corrupt-chunk",
        "close",
    ]
    found = record(STANDARD, 7, result, nbytes=1)
    assert (found["outcome"], found["counts"]) == (BROKEN, {PASS: 1, BROKEN: 1, ERROR: 2})


def test_what_cannot_be_played_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No place for it, no directory, or no time left: skipped with the reason, and nothing is opened for it."""
    suite, log = suite_with(monkeypatch, {})
    suite.openers = {RUNNING: suite.openers[EMBEDDED]}
    suite.durable = None
    plays = [Play(find("kill-host"), is_beyond=True), Play(find("kill-host")), Play(find("durable-error"))]
    assert [row["why"].split(":")[0] for row in suite.run(plays).skipped] == [
        "it runs on a cluster of its own, on this machine",
        "it hits what is not its own",
        "it needs a directory that every host reaches",
    ]
    suite.deadline_s = 0.0
    assert "deadline of 60 s" in suite.run([Play(find("kill-rank"))]).skipped[-1]["why"]
    assert log == []
    assert suite.result.is_cut_short
    assert record(FULL, 7, SuiteResult(), nbytes=1)["outcome"] == ERROR, "nothing played proves nothing"


def test_an_interrupted_suite_reports_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the drill under way and begins no other; those before it are in the record, which is no pass."""
    suite, log = suite_with(monkeypatch, {"kill-rank": report_of("kill-rank")})

    def interrupt(name: str, *others: Any) -> Report:
        log.append(name)
        raise KeyboardInterrupt

    played = suite.run([Play(find("kill-rank"))])
    monkeypatch.setattr(suite_module, "run_drill", interrupt)
    suite.run([Play(find("kill-holder")), Play(find("kill-host"))])
    assert log == ["open", "kill-rank", "close", "open", "kill-holder", "close"]
    assert [row["why"].split(" of ")[0] for row in played.skipped] == ["interrupted", "the suite's deadline"]
    assert (record(STANDARD, 7, played, nbytes=1)["outcome"], len(played.drills)) == (ERROR, 1)


def test_an_interrupted_drill_is_a_plain_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a drill that is played alone ends the command with 130 after its clean-up, without a bug report."""
    closed: list[str] = []

    @contextlib.contextmanager
    def site(place: str, *others: Any, **named: Any) -> Iterator[Any]:
        yield SimpleNamespace(config=Config(store="scratch"))
        closed.append(place)

    def interrupt(*others: Any) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr(group_module, "own_site", site)
    monkeypatch.setattr(suite_module, "run_drill", interrupt)
    result = CliRunner().invoke(main, ["drill", "kill-holder", "--embedded", "--json"])
    assert (result.exit_code, result.stdout) == (ExitCode.INTERRUPTED, "")
    assert result.stderr.split() == ["not", "played:", "kill-holder:", "interrupted"]
    assert closed == [EMBEDDED]


def test_the_suites_cover_the_catalogue() -> None:
    """standard has the standard drills; full has every drill and every play beyond; another name is refused."""
    assert [p.drill.name for p in plays_of(STANDARD)] == [n for n, d in DRILLS.items() if d.is_standard]
    full = plays_of(FULL)
    assert {p.drill.name for p in full if not p.is_beyond} == set(DRILLS)
    assert {p.drill.name for p in full if p.is_beyond} == {n for n, d in DRILLS.items() if d.beyond}
    with pytest.raises(ConfigError, match="standard, full"):
        plays_of("none")


def test_the_record_is_json_with_phases_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says where and with what it ran; each drill has what `drill --json` prints, and its phases with times."""
    suite, _ = suite_with(monkeypatch, {"kill-rank": report_of("kill-rank")})
    found = record(STANDARD, 7, suite.run([Play(find("kill-rank"))]), nbytes=1 << 20)
    found = json.loads(json.dumps(found))
    assert {"python", "cpus", "kernel"} <= set(found["environment"])
    assert found["versions"]["ray"]
    assert part_records.SOURCE_ROOT == ROOT, "the commit is that of another folder, or of none"
    row = found["drills"][0]
    assert set(report_of("kill-rank").to_dict()) <= set(row)
    assert [phase["phase"] for phase in row["phases"]] == [SETUP, CHECK]
    assert all(phase["start_s"] <= phase["end_s"] for phase in row["phases"])
    assert row["phases"][0]["start_s"] <= 0.0
    assert (row["rpo_steps"], row["rto_s"], row["bytes"]["peer"]) == (0, 0.851, 4096)


def test_the_page_shows_every_text_as_text_and_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, words and lines from hosts and errors cannot become markup; no script, no link to elsewhere."""
    outcomes = {"kill-rank": report_of("kill-rank", words=NASTY), "kill-holder": DrillError(NASTY)}
    suite, _ = suite_with(monkeypatch, outcomes)
    found = record(STANDARD, 7, suite.run([Play(find(name)) for name in outcomes]), nbytes=1)
    found["skipped"] = [{"drill": NASTY, "beyond": True, "why": NASTY}]
    found["commit"] = found["versions"]["ray"] = NASTY
    for row in found["drills"]:
        row.update(victims=[NASTY], replay=NASTY, promised=NASTY, place=NASTY)
        row["phases"] = [{**phase, "phase": NASTY} for phase in row["phases"]]
    text = page(found)
    read = Tags(text)
    assert read.open == []
    assert "script" not in read.tags
    assert "<script>" not in text.replace("&lt;script>", "")
    assert sum(NASTY in word for word in read.words) >= 8
    assert not [value for name, value in read.attributes if name in ("src", "href") and not str(value).startswith("#")]
    assert "http" not in text.replace("<!doctype html>", "")


def test_the_page_has_a_timeline_and_the_numbers_of_every_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per drill: fault, detection, plan, bytes by tier, verification, RPO, RTO, a bar per phase and a mark per line."""
    suite, _ = suite_with(monkeypatch, {"kill-rank": report_of("kill-rank")})
    read = Tags(page(record(STANDARD, 7, suite.run([Play(find("kill-rank"))]), nbytes=1)))
    words = " ".join(read.words)
    for expected in ("0.250 s: detected", "4.0 KiB peer", "4,096 bytes compared", "0 steps", "0.851 s", "PASS"):
        assert expected in words, expected
    classes = [value for name, value in read.attributes if name == "class"]
    assert [c for c in classes if c and c.startswith("phase ")] == [f"phase {SETUP}", f"phase {CHECK}"]
    assert classes.count("mark") == 3


def test_every_drill_plays_one_kind_of_the_catalogue() -> None:
    """Faults have one catalogue, and a drill stands at one kind of it."""
    played = [name for kind in KINDS.values() for name in kind.drills.split()]
    assert sorted(played) == sorted(DRILLS)


# -- the live page ------------------------------------------------------------------------------------


class Hearing:
    """A store that hears of a drill, once it is let."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, str]] = []
        self.may_answer = threading.Event()

    def ask(self, request: NoteDrill, timeout_s: float) -> None:
        """Take a line, or fail as a store whose controller is the victim."""
        self.may_answer.wait(30)
        if request.phase == "lost":
            raise PeerTimeout("the controller did not answer")
        self.heard.append((request.job, request.phase, request.text))


def test_a_drill_tells_the_store_what_it_does_and_never_waits_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines come in order; what the store did not hear is left out; one that hangs holds up nothing."""
    monkeypatch.setattr(runner, "TELL_S", 0.01)
    store = Hearing()
    teller = runner.Teller(cast(Any, store), "drill-x")
    timeline = Timeline(Report("kill-controller", 7, ""), lambda line: None)
    timeline.tell = teller.tell
    with timeline.phase("inject"):
        timeline.line("inject", "SIGKILL to the controller")
    timeline.line("lost", "nobody heard this")
    timeline.line("restored", "step 4")
    teller.end()
    assert store.heard == []
    store.may_answer.set()
    teller._thread.join(30)
    assert store.heard == [
        ("drill-x", "inject", "begins"),
        ("drill-x", "inject", "SIGKILL to the controller"),
        ("drill-x", "restored", "step 4"),
    ]
