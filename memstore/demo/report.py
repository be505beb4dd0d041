"""The result of the demo: a table, one JSON object, and a plot."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from memstore.demo.records import DemoCheck, committed_step, killed_attempt, steps_redone
from memstore.demo.run import DemoOutcome, LostHostRun, restore_seconds, tiers_text

DISK_EVERY = 50  # steps between checkpoints to disk, to compare with


def seconds(lost: LostHostRun) -> dict[str, float | None]:
    """Return the seconds that the lost host cost, by phase; None for a phase that did not happen.

    detect: from the kill until the store notices it. restart: from the kill until the last rank is in its training
    function again; Ray's part. connect, get: of the slowest rank, with its wait for the others. restore: the part of
    get for transfer, verification and load. lost: from the last step before the kill to the next one, less a step.
    """
    run, killed = lost.run, killed_attempt(lost.run, lost.kill)
    joined = [j for j in run.joined if j.attempt > killed]
    before, after = ([s.wall_s for s in run.steps if (s.attempt > killed) == is_later] for is_later in (False, True))
    found: dict[str, float | None] = dict.fromkeys(("detect", "restart", "connect", "get", "restore", "lost"))
    found["detect"] = lost.detect_s
    if not joined or not before or not after:
        return found
    walls = [(s.attempt, s.wall_s) for s in run.steps if s.rank == 0]
    gaps = [b[1] - a[1] for a, b in pairwise(walls) if a[0] == b[0]]
    found["restart"] = max(j.entered_s for j in joined) - lost.kill.wall_s
    found["connect"] = max(j.connect_s for j in joined)
    found["get"] = max((r.get_s for r in run.restored), default=None)
    found["restore"] = restore_seconds(run) if run.restored else None
    found["lost"] = max(0.0, min(after) - max(before) - (statistics.median(gaps) if gaps else 0.0))
    return found


def _text(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f} s"


def table(outcome: DemoOutcome, plot: str) -> str:
    """Return the table that `make demo` prints."""
    lost = outcome.disturbed
    run, took = lost.run, seconds(lost)
    last = outcome.options.steps - 1
    first = min((s.step for s in run.steps if s.attempt > killed_attempt(run, lost.kill)), default=0)
    disk = (committed_step(run, lost.kill) + 1) % DISK_EVERY
    expected, losses = outcome.undisturbed.losses(), run.losses()
    equal = sum(losses.get(step) == expected.get(step) for step in range(first, last + 1))
    ours = _text((took["connect"] or 0.0) + (took["get"] or 0.0)) if run.restored else "-"
    rows = [
        (f"loss at steps {first}-{last}", f"{equal} of {last + 1 - first} equal the uninterrupted run, bit for bit"),
        (
            "steps redone",
            f"{len(steps_redone(run)):<3d}  a checkpoint on disk every {DISK_EVERY} steps would have redone {disk}",
        ),
        ("bytes restored", tiers_text(run.restored[0].bytes_by_tier) if run.restored else "none"),
        (
            "time lost",
            f"{_text(took['lost'])}, of which Ray's restart {_text(took['restart'])}, memstore connect + get {ours}",
        ),
        ("detected", f"{_text(took['detect'], 2)} after the kill, while Ray restarts the workers"),
    ]
    if outcome.in_place is not None:
        rows.append(("time lost in place", _in_place_text(took["lost"], seconds(outcome.in_place))))
    lines = [f"  {name:<22}{value}" for name, value in rows]
    lines += ["", "  checks", *map(_check_line, lost.checks)]
    if outcome.in_place is not None:
        lines += ["", "  checks of the run in place", *map(_check_line, outcome.in_place.checks)]
    if outcome.control is not None:
        lines += ["", f"  the same checks with restore off: {len(outcome.control_failed)} of 3 must-fail checks failed"]
        lines += map(_check_line, outcome.control.checks)
    return "\n".join([*lines, "", f"  plot: {plot} · {outcome.total_s:.0f} s in all", verdict(outcome)])


def _in_place_text(ordinary_s: float | None, took: dict[str, float | None]) -> str:
    lost_s = took["lost"]
    ratio = "" if not ordinary_s or lost_s is None else f", {lost_s / ordinary_s:.2f} of the ordinary restart"
    return f"{_text(lost_s)}{ratio}; all ranks in their function again after {_text(took['restart'])}"


def _check_line(check: DemoCheck) -> str:
    return f"    {'ok  ' if check.is_ok else 'FAIL'}  {check.name:<16}{check.detail}"


def verdict(outcome: DemoOutcome) -> str:
    """Return one line with the verdict: PASS, or FAIL with the failed checks."""
    runs = [run for run in (outcome.disturbed, outcome.in_place) if run is not None]
    failed = [check.name for run in runs for check in run.checks if not check.is_ok]
    if failed:
        cause = "" if outcome.options.is_restoring else " (restore is switched off: they must)"
        return f"FAIL  {', '.join(failed)} failed{cause}"
    if not outcome.is_ok:
        return "FAIL  the checks pass, but some of them also pass where they must fail: they prove nothing"
    proof = " · without restore the checks fail, as they must" if outcome.control is not None else ""
    return f"PASS  a host died with its memory; training went on from a peer's RAM, bit for bit{proof}"


def as_dict(outcome: DemoOutcome, plot: str) -> dict[str, Any]:
    """Return the object that `memstore demo --json` prints."""
    return {
        "ok": outcome.is_ok,
        "steps": outcome.options.steps,
        "restore": outcome.options.is_restoring,
        "demo": _run_dict(outcome.disturbed),
        "in_place": _run_dict(outcome.in_place) if outcome.in_place is not None else None,
        "control": _run_dict(outcome.control) if outcome.control is not None else None,
        "control_failed": outcome.control_failed,
        "seconds_total": outcome.total_s,
        "plot": plot,
    }


def _run_dict(lost: LostHostRun) -> dict[str, Any]:
    got = lost.run.restored[0] if lost.run.restored else None
    return {
        "kill": asdict(lost.kill),
        "lost": lost.done,
        "detected_by": lost.detect_why,
        "step_committed": committed_step(lost.run, lost.kill),
        "step_restored": got.step if got is not None else None,
        "verdict": got.verdict if got is not None else None,
        "bytes": got.bytes_by_tier if got is not None else {},
        "ranks_moved": list(got.ranks_moved) if got is not None else [],
        "steps_redone": steps_redone(lost.run),
        "seconds": seconds(lost),
        "checks": [asdict(check) for check in lost.checks],
    }


def draw(outcome: DemoOutcome, path: Path) -> None:
    """Write the plot: the losses with and without the kill by step, and those of the run with the kill by time.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lost, run = outcome.disturbed, outcome.disturbed.run
    killed, start_s = killed_attempt(run, lost.kill), run.joined[0].wall_s
    figure, (by_step, by_time) = pyplot.subplots(2, 1, figsize=(9, 7), layout="constrained")
    calm = sorted(outcome.undisturbed.losses().items())
    by_step.plot(*_columns(calm), color="#9bbfe0", linewidth=6, label="uninterrupted", solid_capstyle="round")
    again = "after the restore" if run.restored else "started over"
    for is_later, color, name in ((False, "#1f3a5f", "until the kill"), (True, "#d1495b", again)):
        steps = [s for s in run.steps if s.rank == 0 and (s.attempt > killed) == is_later]
        for axes, xs in ((by_step, [s.step for s in steps]), (by_time, [s.wall_s - start_s for s in steps])):
            points = _columns([(x, s.loss) for x, s in zip(xs, steps, strict=True)])
            axes.plot(*points, color=color, linewidth=1.5, marker=".", markersize=4, label=name)
    committed, killed_s = committed_step(run, lost.kill), lost.kill.wall_s - start_s
    text = f"step {run.restored[0].step} restored" if run.restored else "nothing restored"
    by_step.axvline(committed + 0.5, color="gray", linestyle="--", linewidth=1)
    by_step.annotate(
        f"{lost.kill.host} killed with its memory\n{text}",
        (committed + 0.5, 0.93),
        (6, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )
    by_step.set(xlabel="step", ylabel="loss (nats per character)", title="Losses by step: one curve on the other")
    by_time.axvline(killed_s, color="gray", linestyle="--", linewidth=1, label="kill")
    if run.restored:
        restored_s = max(r.wall_s for r in run.restored) - start_s
        by_time.axvspan(killed_s, restored_s, color="#eeeeee", label="kill to restored")
    by_time.set(xlabel="seconds since the first rank joined", ylabel="loss", title="The same run by time")
    for axes in (by_step, by_time):
        axes.legend(loc="upper right", fontsize=9)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _columns(points: list[Any]) -> tuple[list[float], list[float]]:
    return [p[0] for p in points], [float.fromhex(p[1]) for p in points]
