"""Committed steps of which no byte is left are one line, not a row each; late hosts are awaited (R22, R24)."""

from __future__ import annotations

from memstore.cli.timeline import AwaitedRun, run_text, timeline_rows
from memstore.core.report.timeline import gone_steps, spans_of, steps_of
from memstore.core.wire.replies import StepList
from memstore.testing.controller.trained import trained
from memstore.testing.controller.world import ControllerWorld
from recovery.inventory import StepId
from recovery.lineage import Span

LAST = 20


def restarted(*lost: str) -> ControllerWorld:
    """Two hosts and 20 committed steps, then everything is killed; hosts in `lost` come back without their memory."""
    world, _ = trained(2, 2, last=LAST)
    world.run(2.0)  # the step before is freed
    world.crash_controller(restart_after_s=None)
    for host in ("h0", "h1"):
        world.kill_host(host, keep_memory=host not in lost)
    return world


def shown(world: ControllerWorld) -> StepList:
    """The timeline of the job."""
    return steps_of(world.served.state, world.served.parts.durable_states, world.job())


def come_back(world: ControllerWorld, *hosts: str) -> None:
    """Start a controller and the hosts, and wait until it serves."""
    world.start_controller()
    for host in hosts:
        world.return_host(host)
    world.run(10.0)


def test_steps_that_retention_freed_are_one_row_after_a_restart() -> None:
    """The journals know every commit; the newest has its bytes, all others are gone."""
    world = restarted()
    come_back(world, "h0", "h1")
    body = shown(world)
    assert [(row.step, row.state, row.copies) for row in body.steps] == [(LAST, "committed", 2)]
    [span] = body.gone
    assert (span.first, span.last, span.count, span.state) == (1, LAST - 1, LAST - 1, "gone")
    assert run_text(span) == f"steps 1 to {LAST - 1} (attempt 1): gone, no copy in any tier"


def test_a_lost_arena_leaves_no_row_of_a_step_without_a_byte() -> None:
    """Both hosts are back, one with its journal and without the copies that matter: nothing is called committed."""
    world = restarted()
    world.holders["h0"].forget(*world.holders["h0"].held)
    world.holders["h1"].forget(*world.holders["h1"].held)
    come_back(world, "h0", "h1")
    body = shown(world)
    assert body.steps == []
    assert [(span.first, span.last) for span in body.gone] == [(1, LAST)]
    assert gone_steps(world.served.state, world.served.parts.durable_states, world.job()) == {
        StepId(1, n) for n in range(1, LAST + 1)
    }


def test_a_host_that_has_not_come_is_waited_for() -> None:
    """A step that only a late host may have is not gone: it says which host; once that is here it is."""
    world = restarted()
    world.holders["h0"].forget(*world.holders["h0"].held)
    come_back(world, "h0")
    body = shown(world)
    assert body.gone == []
    assert {(row.state, *row.waiting_for) for row in body.steps} == {("waiting", "h1")}
    [job] = world.served.parts.status.answer().jobs
    [(graph, line)] = [row for row in timeline_rows(job) if isinstance(row[1], AwaitedRun)]
    assert (graph, run_text(line)) == ("*", f"steps 1 to {LAST} (attempt 1): no copy here, waiting for h1")
    world.return_host("h1")
    world.run(10.0)
    body = shown(world)
    assert [row.step for row in body.steps] == [LAST]
    assert [(span.first, span.last) for span in body.gone] == [(1, LAST - 1)]


def test_a_host_that_died_just_now_may_be_back_with_its_memory() -> None:
    """Its steps are awaited until it is dead for good, as a get waits for it; then they are gone."""
    world, _ = trained(2, 2, last=2)
    for host in ("h0", "h1"):
        world.kill_host(host)
    assert [row.state for row in shown(world).steps] == ["waiting"]
    world.run(2 * world.served.state.rules.dead_after_s)
    assert (shown(world).steps, [span.last for span in shown(world).gone]) == ([], [2])


def test_durable_storage_that_was_not_listed_yet_may_have_them() -> None:
    """A new controller cannot list durable storage: no step is gone before it has."""
    world, _ = trained(2, 2, last=2, durable="/ck", durable_every=100)
    machine = world.served
    assert machine.parts.durable_states.is_known(world.job())
    for host in ("h0", "h1"):
        world.holders[host].forget(*world.holders[host].held)
    world.durable.problem = "not mounted"
    world.crash_controller()
    world.run(10.0)
    assert not world.served.parts.durable_states.is_known(world.job())
    rows = shown(world).steps
    assert [(row.step, row.state) for row in rows] == [(2, "waiting"), (1, "waiting")]
    assert all(row.waiting_for == ["durable storage"] for row in rows)


def test_runs_end_at_real_steps_attempts_and_the_lineage() -> None:
    """A run never spans what is there, another attempt or the end of the lineage; pins stay named."""
    known = {StepId(1, n) for n in (0, 10, 20, 30, 40)} | {StepId(2, 35)}
    gone = known - {StepId(1, 20)}
    rows = spans_of(known, gone, (Span(2, None), Span(1, 30)), {StepId(1, 10): ["best"]})
    assert [(row.attempt, row.first, row.last, row.count, row.in_lineage) for row in rows] == [
        (2, 35, 35, 1, True),
        (1, 40, 40, 1, False),
        (1, 30, 30, 1, True),
        (1, 0, 10, 2, True),
    ]
    assert [run_text(row) for row in rows[-1:]] == [
        "2 steps from 0 to 10 (attempt 1): gone, no copy in any tier, pinned best"
    ]
