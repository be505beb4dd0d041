"""What the live page draws: the values that its browser gets, made of a status and of events."""

from __future__ import annotations

import json

import pytest
from cli_store import Desk
from msgspec.structs import replace

from memstore.core.report.page import LAST_MAX, STEPS_MAX, Json, drills, hosts_of, loss_view, news_view, status_view
from memstore.core.wire.calls import AskEvents, AskPlan, AskStatus, NoteDrill
from memstore.core.wire.replies import Status
from memstore.core.wire.status_rows import AttemptStatus, EventRow, HostRow, JobRow, ReplacedRow
from memstore.testing.controller.world import JOB, ControllerWorld, trained
from memstore.testing.fuzz.messages import blank

RACKS = {"h0": {"zone": "z1", "rack": "r1"}, "h1": {"zone": "z1", "rack": "r2"}, "h2": {}}


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A job of two ranks with durable steps, on a host in each of two racks and one without a rack."""
    world = ControllerWorld(list(RACKS), labels=RACKS, durable="/durable", durable_every=1)
    ranks = world.launch(2)
    world.get(ranks)
    for step in range(1, 4):
        assert world.put_all(ranks, step)
        world.run(5.0)
    return Desk(monkeypatch, world, ranks[0])


def asked(desk: Desk) -> tuple[Status, list[EventRow]]:
    """Return what the page's server asks for."""
    return desk.ask(AskStatus(), 5.0), desk.ask(AskEvents(), 5.0).events


def event(kind: str, seq: int, **fields: object) -> EventRow:
    """Return an event of the job with the fields of its kind."""
    place = replace(blank(EventRow), job=JOB, attempt=1, rank=1, host="h2")
    return replace(place, seq=seq, event=kind, wall_s=float(seq), fields=dict(fields))


def test_hosts_are_in_their_finest_domain_with_what_they_hold(desk: Desk) -> None:
    """Those without the label come last; a dead one looks dead, and its memory is not shown."""
    desk.world.kill_host("h1")
    desk.world.run(1.0)
    view = status_view(asked(desk)[0])
    assert view["level"] == "rack"
    groups = [(group["name"], group["within"], [host["host"] for host in group["hosts"]]) for group in view["groups"]]
    assert groups == [("r1", "zone z1", ["h0"]), ("r2", "zone z1", ["h1"]), ("", "", ["h2"])]
    alive, dead = view["groups"][0]["hosts"][0], view["groups"][1]["hosts"][0]
    assert (alive["look"], alive["holds"].startswith("own")) == ("ok", True)
    assert (dead["look"], dead["used"], dead["state"].startswith("dead")) == ("dead", None, True)
    assert json.loads(json.dumps(view)) == view  # plain values, as they travel


def test_jobs_and_problems_are_in_the_words_of_status(desk: Desk) -> None:
    """What the page shows of exposure is what the command prints."""
    view, screen = status_view(asked(desk)[0]), desk.run("status").stdout
    [job] = view["jobs"]
    assert (job["job"], job["ranks"], job["copies"]) == (JOB, "2/2", "2 of 2")
    assert f"  {job['survives']}  " in screen
    assert f"  {job['at risk now'].split(' / ')[0]} / " in screen
    assert {row["text"].split(" (")[0] for row in view["problems"]} <= {
        line[2:].split(" (")[0] for line in screen.splitlines() if line.startswith("! ")
    }


def test_the_plot_of_a_step_has_stall_and_the_times_since_the_put_began(desk: Desk) -> None:
    """In the order in which they end; durable too, which comes seconds later."""
    status, events = asked(desk)
    steps = news_view(events, 0, status.jobs)["told"][JOB]["steps"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert 0 <= step["stall"] <= step["sealed"] <= step["committed"] < step["durable"]


def test_a_skipped_step_says_why_and_only_the_last_steps_are_drawn() -> None:
    """A plot of a week would be a line."""
    rows = [replace(event("skip", n, why="no room", resume=0), step=n) for n in range(1, STEPS_MAX + 6)]
    steps = news_view(rows, 0, [])["told"][JOB]["steps"]
    assert (len(steps), steps[0]["step"]) == (STEPS_MAX, 6)
    assert steps[-1] == {"attempt": 1, "step": STEPS_MAX + 5, "skip": "no room"}


def test_news_are_what_came_after_the_last_look(desk: Desk) -> None:
    """Lines once; a plot again only where something of its job happened."""
    status, events = asked(desk)
    everything = news_view(events, 0, status.jobs)
    assert [line["seq"] for line in everything["events"]] == [row.seq for row in events]
    assert {line["level"] for line in everything["events"]} >= {"routine", "notable"}
    nothing = news_view(events, events[-1].seq, status.jobs)
    assert nothing == {"events": [], "told": {}, "drills": None}
    desk.world.kill_host("h2")
    desk.world.run(1.0)
    status, events = asked(desk)
    later = news_view(events, everything["events"][-1]["seq"], status.jobs)
    assert [line["about"] for line in later["events"] if "DEAD" in line["text"]] == ["h2"]


def recovered(view: Json) -> list[tuple[int, bool, str]]:
    """Return generation, is it over, and phases of the recoveries of the job."""
    return [(row["generation"], row["is_over"], row["text"]) for row in view["told"][JOB]["recoveries"]]


def test_recoveries_are_shown_by_phase_also_the_one_that_is_under_way() -> None:
    """The newest phases come from status: an event is made only when the recovery is over."""
    who = ReplacedRow(rank=1, host="h1", to_host="h2", cause="ended", is_spare=True)
    plain = {"rank": 1, "host": "h1", "to_host": "h2", "cause": "ended", "is_spare": True}
    past = [
        event("replaced", 1, generation=1, replaced=[plain]),
        event("recovered", 2, generation=1, seconds={"meet": 0.25, "first_step": 1.0}),
        event("replaced", 3, generation=2, replaced=[plain]),
    ]
    newest = replace(blank(AttemptStatus), generation=2, replaced=[who], recovery_s={"meet": 0.5})
    row = replace(blank(JobRow), job=JOB, newest=newest)
    view = news_view(past, 0, [row])
    assert recovered(view) == [(2, False, "meet 0.50 s"), (1, True, "meet 0.25 s, first step 1.00 s")]
    assert "rank 1 of h1 was replaced on h2 by a spare" in view["told"][JOB]["recoveries"][0]["who"]
    assert recovered(news_view(past, 3, [row]))[0] == (2, False, "meet 0.50 s")  # without an event, too
    over = replace(newest, recovery_s={"meet": 0.5, "first_step": 2.0})
    assert recovered(news_view(past, 0, [replace(row, newest=over)]))[0][1] is True


def test_a_drill_is_shown_as_it_tells_the_store(desk: Desk) -> None:
    """What a drill notes is an event that everybody reads; the newest drill comes first."""
    for number in range(LAST_MAX + 1):
        for phase, text in (("inject", "SIGKILL to h1"), ("PASS", "every byte equal")):
            desk.ask(NoteDrill(job=f"drill-kill-host-{number}", phase=phase, text=text), 5.0)
    status, events = asked(desk)
    shown = news_view(events, 0, status.jobs)["drills"]
    assert [drill["job"] for drill in shown] == [f"drill-kill-host-{n}" for n in range(LAST_MAX, 0, -1)]
    assert [told[1:] for told in shown[0]["told"]] == [["inject", "SIGKILL to h1"], ["PASS", "every byte equal"]]
    assert "drill, PASS: every byte equal" in desk.run("events", "drill-kill-host-3").stdout
    assert drills([]) == []


def test_what_a_loss_would_cost_is_what_plan_says(desk: Desk) -> None:
    """Of a host and of a whole rack, by the controller's own dry run."""
    status, _ = asked(desk)
    places = [("host", "h2"), ("rack", "r1"), ("rack", "r9")]
    assert [hosts_of(status, *place) for place in places] == [["h2"], ["h0"], []]
    for level, name, typed in (("host", "h1", "h1"), ("rack", "r1", "rack=r1")):
        plan = desk.ask(AskPlan(job=JOB, lose=tuple(hosts_of(status, level, name))), 5.0)
        [row] = loss_view([plan])
        printed = desk.run("plan", JOB, "--lose", typed).stdout.splitlines()
        assert (row["outcome"], row["lines"]) == ("whole", [line.strip() for line in printed[: len(row["lines"])]])


def test_hosts_without_any_label_are_one_group() -> None:
    """There is no level to lose then but the host."""
    world, _ = trained(2)
    status = world.served.parts.status.answer()
    view = status_view(replace(status, hosts=[replace(row, labels={}) for row in status.hosts]))
    assert (view["level"], [(g["name"], len(g["hosts"])) for g in view["groups"]]) == ("", [("", 2)])
    assert hosts_of(status, "host", "h1") == ["h1"]
    assert isinstance(status.hosts[0], HostRow)
