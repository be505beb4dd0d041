"""What is said of durable storage is what was seen there, and when: before the last copies go, and in status (R19)."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from memstore.core.durable.checks import AGAIN_S, CHECK_DEADLINE_S, LOOK_EVERY_S, PATIENCE_S
from memstore.core.durable.paths import other_key
from memstore.core.report.problems import DEGRADED
from memstore.core.wire.orders import DurableOrder, ListMarkers, WriteSlices
from memstore.core.wire.reports import MarkersListed, Report
from memstore.testing.controller.holder import DirectedHolder, DirectedRank
from memstore.testing.controller.trained import written
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import ShardId, StepId


def last_copies(world: ControllerWorld, rank: DirectedRank, job: str | None = "train") -> dict[str, list[str]]:
    """Ask what would be lost with the copies in RAM."""
    count = len(rank.answers.get("last_copies", ()))
    world.call(rank, "last_copies", job=job)
    assert world.run_until(lambda: len(rank.answers.get("last_copies", ())) > count, 400.0)
    lost: dict[str, list[str]] = rank.answers["last_copies"][-1]["lost"]
    return lost


def status(world: ControllerWorld) -> dict[str, Any]:
    """What status says of the job."""
    row: dict[str, Any] = world.status()["jobs"][0]
    return row


def rows(world: ControllerWorld) -> list[dict[str, Any]]:
    """The problems about durable storage."""
    return [row for row in world.status()["problems"] if "/durable" in row["cause"]]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("nothing", ""),
        ("emptied", "step 2 lives only in RAM (nothing of it is durable): durable storage does not have its marker"),
        ("a part is gone", "step 2 lives only in RAM (durable is step 1): rank-0.0 is gone"),
        ("unreadable", "step 2 cannot be read on durable storage: not mounted (h0, h1)"),
        ("no host looks", "step 2 cannot be read on durable storage: no host that could look answers"),
    ],
)
def test_a_step_is_durable_only_if_the_storage_has_it_when_a_process_asks(loss: str, said: str) -> None:
    """Its marker was seen once; before its last copies go it is looked for again, slices and all."""
    world, ranks = written(last=2, keep_steps=2, durable_keep=2)
    if loss == "emptied":
        world.durable.markers.clear()
    elif loss == "a part is gone":
        world.durable.lacks = "rank-0.0 is gone"
    elif loss == "unreadable":
        world.durable.problem = "not mounted"
    elif loss == "no host looks":
        world.served.hosts.is_answering = lambda host: False  # type: ignore[method-assign]
    lost = last_copies(world, ranks[0])
    if not said:
        assert lost == {}
    else:
        [words] = lost["train"]
        assert words.startswith(said)
    if loss in ("emptied", "a part is gone"):
        world.durable.lacks = ""
        world.run(20.0)
        assert ("train", 1, 2) in world.durable.markers  # written again from RAM
        assert last_copies(world, ranks[0], None) == {}


def test_a_pinned_step_is_looked_for_as_well() -> None:
    """Both the newest and the pinned one have a marker; the pinned one's bytes went."""
    world, ranks = written(last=2, keep_steps=2, durable_keep=2)
    world.call(ranks[0], "pin", step=1, name="best")
    world.run(1.0)
    assert last_copies(world, ranks[0], None) == {}
    del world.durable.markers["train", 1, 1]
    [words] = last_copies(world, ranks[0], None)["train"]
    assert words.startswith("what is pinned as best (step 1) lives only in RAM: ")


def test_a_job_that_goes_while_a_process_asks_is_not_waited_for() -> None:
    """The look ends with the job."""
    world, ranks = written()
    for holder in world.holders.values():
        holder.instead[ListMarkers] = lambda order: None
    world.call(ranks[0], "last_copies", job=None)
    world.run(1.0)
    assert not ranks[0].answers.get("last_copies")
    world.call(ranks[1], "rm", force=True)
    assert world.run_until(lambda: bool(ranks[0].answers.get("last_copies")), 10.0)
    assert ranks[0].answers["last_copies"] == [{"lost": {}}]


def test_status_says_when_the_durable_step_was_last_seen() -> None:
    """As it was written, and then by a look now and then; status itself asks no process."""
    world, _ = written()
    world.run(100.0)
    assert 90.0 < status(world)["durable_seen_s"] < 110.0
    world.run(LOOK_EVERY_S)
    assert status(world)["durable_seen_s"] < 110.0
    assert rows(world) == []


@pytest.mark.parametrize("loss", ["emptied", "a part is gone", "unreadable"])
def test_what_durable_storage_lost_is_a_problem_until_it_is_there_again(loss: str) -> None:
    """Without any request it is found by itself, written again from RAM where it is gone, and looked for until it is
    seen.
    """
    world, _ = written()
    if loss == "emptied":
        world.durable.markers.clear()
    elif loss == "a part is gone":
        world.durable.lacks = "rank-0.0 is gone"
    else:
        world.durable.problem = "not mounted"
    world.run(LOOK_EVERY_S - 10.0)
    assert rows(world) == []
    assert world.run_until(lambda: bool(rows(world)), 20.0)
    [row] = rows(world)
    assert (row["kind"], row["severity"]) == ("durable_missing", DEGRADED)
    assert {"emptied": "its marker", "a part is gone": "rank-0.0 is gone"}.get(loss, "not mounted") in row["cause"]
    world.durable.problem = world.durable.lacks = ""
    world.run(3 * AGAIN_S)
    assert rows(world) == []
    assert status(world)["durable_seen_s"] < 3 * AGAIN_S
    assert ("train", 1, 1) in world.durable.markers


def test_a_marker_that_is_written_during_a_look_stays_known() -> None:
    """The list is older than the marker by the time it comes: it says nothing against it, nor for one removed since."""
    world, ranks = written(durable_keep=1)
    late: list[Any] = []
    for holder in world.holders.values():
        notify = holder.state.report

        def report(report: Report, notify: Any = notify) -> None:
            if isinstance(report, MarkersListed):
                late.append(lambda: notify(report))
            else:
                notify(report)

        holder.state.report = report
    world.run(LOOK_EVERY_S)
    assert late
    assert world.put_all(ranks, 2)
    world.run(2.0)
    assert list(world.served.jobs["train"].markers) == [StepId(1, 2)]
    late.pop()()
    world.run(1.0)
    assert list(world.served.jobs["train"].markers) == [StepId(1, 2)]


def test_a_new_controller_lists_the_markers_by_itself() -> None:
    """No get has to come first: status and plan know what is durable, and that the bytes are there."""
    world, ranks = written(last=2)
    world.crash_controller()
    assert world.run_until(lambda: world.machine is not None and world.machine.is_settled, 20.0)
    world.run(3.0)
    row = status(world)
    assert row["durable_step"] == 2
    assert row["durable_seen_s"] < 3.0
    world.call(ranks[0], "plan", lose=[])
    world.run(1.0)
    assert ranks[0].answers["plan"][-1]["unlisted"] == ""


def test_plan_says_that_the_markers_are_not_listed_yet() -> None:
    """Storage that does not answer a new controller: what plan says of durable steps is not all there may be."""
    world, ranks = written(last=2)
    world.durable.problem = "not mounted"
    world.crash_controller()
    world.run(15.0)
    world.call(ranks[0], "plan", lose=["h0", "h1"])
    world.run(1.0)
    answer = ranks[0].answers["plan"][-1]
    assert answer["unlisted"] == "durable markers are not listed yet: not mounted (h0, h1)"
    world.durable.problem = ""
    world.run(2 * AGAIN_S)
    world.call(ranks[0], "plan", lose=["h0", "h1"])
    world.run(1.0)
    answer = ranks[0].answers["plan"][-1]
    assert (answer["unlisted"], answer["step"], answer["verdict"]) == ("", 2, "durable")


@pytest.mark.parametrize("fault", ["cannot read", "hangs", "dies"])
def test_one_host_with_a_bad_mount_says_nothing_of_the_storage(fault: str) -> None:
    """Another host is asked, at once or after half a minute, and the first one from then on; the log names the bad."""
    world, ranks = written(last=2, keep_steps=2, durable_keep=2)
    bad = world.holders["h0"]
    if fault == "cannot read":
        world.durable.problems[bad.host_id] = "not mounted"
    else:
        bad.instead[ListMarkers] = lambda order: None
    world.call(ranks[1], "last_copies", job="train")
    world.run(1.0)
    if fault == "dies":
        world.kill_host("h0", keep_memory=True)
    assert world.run_until(lambda: bool(ranks[1].answers.get("last_copies")), PATIENCE_S + 5.0)
    assert ranks[1].answers["last_copies"] == [{"lost": {}}]
    if fault != "dies":
        why = "not mounted" if fault == "cannot read" else "no answer for "
        assert any(f"durable storage as host h0 sees it: {why}" in note for note in world.notes)
        world.call(ranks[1], "last_copies", job="train")
        assert world.run_until(lambda: len(ranks[1].answers["last_copies"]) == 2, 1.0)
        assert rows(world) == []


def test_as_many_hosts_as_there_are_do_not_make_a_look_longer() -> None:
    """None of 9 answers: a few are asked, and the answer names them when the time is over."""
    world = ControllerWorld(9, durable="/durable", durable_every=1)
    ranks = world.launch(9)
    world.get(ranks)
    assert world.put_all(ranks, 1, until="durable")
    asked: list[str] = []
    for name, holder in world.holders.items():
        holder.instead[ListMarkers] = lambda order, name=name: asked.append(name)  # type: ignore[misc]
    world.call(ranks[0], "last_copies", job="train")
    assert world.run_until(lambda: bool(ranks[0].answers.get("last_copies")), CHECK_DEADLINE_S + 2.0)
    world.run(1.0)
    assert sorted(asked[:5]) == ["h0", "h1", "h2", "h3", "h4"]  # the last one for the next look
    [words] = ranks[0].answers["last_copies"][-1]["lost"]["train"]
    assert words.endswith("no answer within 300 s (h0, h1, h2, h3)")


def under(world: ControllerWorld, written: str, **keys: str) -> None:
    """All was written under one key, and since then hosts got other files."""
    world.durable.put_under(written * 16)
    for host, key in keys.items():
        world.durable.keys[host] = key * 16


@pytest.mark.parametrize("has_ram", [True, False])
def test_a_step_under_a_key_that_no_process_has_is_neither_there_nor_lost(has_ram: bool) -> None:
    """All key files were replaced: RAM stays, the words name both keys; what RAM has is written under the new one."""
    world, ranks = written(durable_key_file="/key")
    under(world, "a", h0="b", h1="b")
    for host in () if has_ram else ("h0", "h1"):
        world.job().drop_copy(ShardId("train", 1, 1, 0), host)
    [words] = last_copies(world, ranks[0])["train"]
    assert words == f"step 1 cannot be read on durable storage: {other_key('a' * 16, 'b' * 16)} (h0, h1)"
    world.run(20.0)
    assert world.durable.markers["train", 1, 1][1] == ("b" if has_ram else "a") * 16
    assert world.job().newest_durable == StepId(1, 1)
    if has_ram:
        assert last_copies(world, ranks[0]) == {}
    else:
        assert any(other_key("a" * 16, "b" * 16) in row["cause"] for row in rows(world))


@pytest.mark.parametrize("host", ["h0", "h1"])
def test_the_host_that_has_the_key_is_asked(host: str) -> None:
    """Only one has the file of the key that the step is under: all is there, and nothing is written again."""
    world, ranks = written(durable_key_file="/key")
    under(world, "a", **{"h0": "b", "h1": "b", host: "a"})
    assert last_copies(world, ranks[0]) == {}
    world.run(20.0)
    assert world.durable.markers["train", 1, 1][1] == "a" * 16


def test_a_pinned_step_under_a_lost_key_is_not_said_to_be_gone() -> None:
    """Its marker and bytes are there: the words say which key it needs, not that it lives only in RAM."""
    world, ranks = written(last=2, keep_steps=2, durable_keep=2, durable_key_file="/key")
    world.call(ranks[0], "pin", step=1, name="best")
    world.run(1.0)
    under(world, "a", h0="b", h1="b")
    words = last_copies(world, ranks[0])["train"]
    assert [text.split(" on durable storage: ")[0] for text in words] == [
        "step 1 cannot be read",
        "step 2 cannot be read",
    ]


def test_a_closed_job_whose_step_needs_another_key_keeps_its_ram() -> None:
    """The storage takes no new write, so that it stays so: job_ttl_s passes, and the event names the key."""
    world, ranks = written(job_ttl_s=100.0, durable_key_file="/key")
    for rank in ranks:
        world.call(rank, "close")
    under(world, "a", h0="b", h1="b")
    for holder in world.holders.values():
        holder.instead.update(dict.fromkeys(get_args(DurableOrder), lambda order: None))
        del holder.instead[ListMarkers]
    world.run(150.0)
    assert len(world.holders_of(StepId(1, 1), 0)) == 2
    page = world.events("train")
    [event] = [event for event in page if event["event"] == "not_expired"]
    assert event["why"].startswith(f"it is under key {'a' * 16}")


def test_a_host_may_not_go_for_a_step_that_no_process_can_read() -> None:
    """Both hosts have notice, the durable step needs another key: it counts as there once it is written again."""
    world, ranks = written(durable_key_file="/key")
    under(world, "a", h0="b", h1="b")
    held: list[tuple[DirectedHolder, WriteSlices]] = []
    for holder in world.holders.values():
        holder.instead[WriteSlices] = lambda order, holder=holder: held.append((holder, order))  # type: ignore[misc]
    for host in ("h0", "h1"):
        world.call(ranks[0], "drain", host=host, within_s=600.0)
    world.run(5.0)
    [row] = world.served.parts.departures.remains("h1").short
    assert row.step == 1
    for holder, order in held:
        holder.instead.clear()
        holder.obey(order)
    assert world.run_until(lambda: bool(world.served.parts.departures.remains("h1").durable), 120.0)
    assert world.durable.markers["train", 1, 1][1] == "b" * 16
