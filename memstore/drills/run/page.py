"""The HTML page of a suite's record: a summary, then a timeline for each drill. Pure: takes a record, returns text."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from memstore.cli.output import size_text

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #1d232b; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 2.2em 0 .3em; }
table { border-collapse: collapse; margin: .6em 0; } th, td { padding: .2em .9em .2em 0; text-align: left;
  vertical-align: top; } thead th { border-bottom: 1px solid #aab; } td.n { text-align: right; white-space: nowrap; }
.badge { border-radius: .3em; color: #fff; padding: .05em .5em; font-size: .85em; }
.PASS { background: #1b7f4b; } .FAIL { background: #b3261e; } .ERROR { background: #8a5a00; }
.axis { position: relative; height: 2.6em; background: #f2f4f7; border-radius: .3em; margin: .8em 0 1.6em; }
.phase { position: absolute; top: 0; height: 1.5em; overflow: hidden; white-space: nowrap; font-size: .75em;
  color: #fff; border-radius: .2em; padding-left: .2em; box-sizing: border-box; min-width: 2px; }
.setup, .cleanup { background: #7a8594; } .inject { background: #b3261e; } .wait-for-effect { background: #c9621b; }
.recover { background: #2b5fa8; } .wait-for-recovery { background: #2d8f8f; } .check { background: #1b7f4b; }
.mark { position: absolute; top: 1.5em; width: 1px; height: 1.1em; background: #1d232b; }
.muted { color: #66707c; } code { background: #f2f4f7; padding: .1em .3em; }
"""


def page(record: Mapping[str, Any]) -> str:
    """Return the HTML page of a record. It loads no other file, and no text of the record can become markup."""
    title = f"memstore drills: suite {record['suite']}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)} {_badge(record['outcome'])}</h1>",
        _facts(record),
        _summary(record),
        *(_drill(row, at) for at, row in enumerate(record["drills"])),
        _skipped(record["skipped"]),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _badge(outcome: str) -> str:
    known = outcome if outcome in ("PASS", "FAIL", "ERROR") else "ERROR"
    return f'<span class="badge {known}">{escape(outcome)}</span>'


def _facts(record: Mapping[str, Any]) -> str:
    where, counts = record["environment"], record["counts"]
    versions = " · ".join(f"{name} {value}" for name, value in record["versions"].items() if value)
    words = [
        f"{sum(counts.values())} drills played: {', '.join(f'{n} {name}' for name, n in counts.items())}; "
        f"{len(record['skipped'])} not played; {record['seconds']:g} s; seed {record['seed']}; "
        f"{size_text(record['nbytes_per_rank'])} per rank; ended {record['ended']}",
        f"{where['cpus']} processors, {where['system']} {where['kernel']} {where['machine']}, "
        f"{size_text(where['memory_available_bytes'])} of memory left at the end · Python "
        f"{where['python']} · {versions}",
        f"commit {record['commit'] or 'unknown'}",
    ]
    return "".join(f'<p class="muted">{escape(line)}</p>' for line in words)


#: The columns of a suite's table; a number's begins with ">".
HEADS = ("DRILL", "OUTCOME", ">DETECT", ">PLAN", "RESTORED", "VERIFIED", ">RPO", ">RTO", ">PLAYED")


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a drill's row of the table."""
    return (
        title_of(row),
        row["outcome"],
        seconds_text(row["seconds"]["detect"]),
        seconds_text(row["seconds"]["plan"]),
        tiers_text(row),
        "every byte" if row["verified"] else "-",
        rpo_text(row),
        seconds_text(row["rto_s"]),
        seconds_text(row["seconds_played"]),
    )


def _summary(record: Mapping[str, Any]) -> str:
    classes = ['<td class="n">' if head.startswith(">") else "<td>" for head in HEADS]
    rows = []
    for at, row in enumerate(record["drills"]):
        title, outcome, *others = cells(row)
        shown = [f'<a href="#d{at}">{escape(title)}</a>', _badge(outcome), *map(escape, others)]
        rows.append("".join(f"{td}{text}</td>" for td, text in zip(classes, shown, strict=True)))
    heads = "".join(f"<th>{escape(head.removeprefix('>').lower())}</th>" for head in HEADS)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def title_of(row: Mapping[str, Any]) -> str:
    """Return the drill's name as on the command line."""
    return f"{row['drill']}{' --beyond' if row['beyond'] else ''}"


def tiers_text(row: Mapping[str, Any]) -> str:
    """Return the restored bytes by tier, as text; or "refused", or "-" if there was no restore."""
    found = [f"{size_text(nbytes)} {tier}" for tier, nbytes in row["bytes"].items() if nbytes]
    if found:
        return " · ".join(found)
    return "refused" if row["verdict"] == "refused" else "-"


def rpo_text(row: Mapping[str, Any]) -> str:
    """Return how many committed steps were lost, as text."""
    if row["rpo_steps"] is None:
        return "-"
    return f"{row['rpo_steps']} step{'' if row['rpo_steps'] == 1 else 's'}"


def seconds_text(value: float | None) -> str:
    """Return seconds as text, with fewer digits above one second."""
    if value is None:
        return "-"
    return f"{value:.3f} s" if value < 1 else f"{value:.1f} s"


def _drill(row: Mapping[str, Any], at: int) -> str:
    fault = next((text for _, label, text in row["timeline"] if label == "inject"), row["breaks"])
    detected = next((text for _, label, text in row["timeline"] if label == "detected"), "-")
    verified = f"{row['bytes_compared']:,} bytes compared with states made again, " + (
        "every one equal" if row["verified"] else "not all of them equal" if row["bytes_compared"] else "none restored"
    )
    facts = [
        ("fault", fault),
        ("victims", ", ".join(row["victims"]) or "-"),
        ("promised", row["promised"]),
        ("outcome", row["words"]),
        ("detection", f"{seconds_text(row['seconds']['detect'])}: {detected}"),
        ("plan", seconds_text(row["seconds"]["plan"])),
        ("bytes by tier", tiers_text(row)),
        ("verification", verified),
        ("RPO", rpo_text(row)),
        ("RTO", seconds_text(row["rto_s"])),
        ("longest put", seconds_text(row["stall_max_s"])),
        ("played on", row["place"]),
        ("again", row["replay"]),
    ]
    table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(text))}</td></tr>" for name, text in facts)
    lines = "".join(
        f'<tr><td class="n">{when:.3f} s</td><td>{escape(str(label))}</td><td>{escape(str(text))}</td></tr>'
        for when, label, text in row["timeline"]
    )
    return (
        f'<h2 id="d{at}">{escape(title_of(row))} {_badge(row["outcome"])}</h2>{_axis(row)}'
        f"<table>{table}</table><table>{lines}</table>"
    )


def _axis(row: Mapping[str, Any]) -> str:
    """Return the time axis of a drill: a bar for each phase, a mark for each line of the timeline."""
    phases = row["phases"]
    if not phases:
        return '<p class="muted">it did not begin</p>'
    first, last = min(p["start_s"] for p in phases), max(p["end_s"] for p in phases)
    width = max(last - first, 1e-9)

    def percent(seconds: float) -> float:
        return float(round(100 * seconds / width, 3))

    bars = [
        f'<div class="phase {escape(p["phase"])}" style="left:{percent(p["start_s"] - first)}%;'
        f'width:{percent(p["end_s"] - p["start_s"])}%" title="{escape(p["phase"])}: '
        f'{p["end_s"] - p["start_s"]:.3f} s">{escape(p["phase"])}</div>'
        for p in phases
    ]
    marks = [
        f'<div class="mark" style="left:{percent(when - first)}%" '
        f'title="{escape(f"{when:.3f} s {label}: {text}")}"></div>'
        for when, label, text in row["timeline"]
    ]
    return f'<div class="axis">{"".join(bars)}{"".join(marks)}</div>'


def _skipped(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    items = "".join(f"<li>{escape(title_of(row))}: {escape(row['why'])}</li>" for row in rows)
    return f"<h2>Not played</h2><ul>{items}</ul>"
