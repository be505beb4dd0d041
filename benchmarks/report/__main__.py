"""`python -m benchmarks.report`: render what is generated of benchmarks/README.md from the results.

The README's generated parts stand between markers; everything else in it is written by hand.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import results
from benchmarks.report.harness import GIB, Ratio, Record
from benchmarks.report.targets import LINES

HEAD = "| benchmark | what | median | lowest to highest | CPU s per GB | target |\n|---|---|---:|---:|---:|---|"
HERE = Path(__file__).resolve().parents[1]


def amount(value: float, unit: str) -> str:
    """Write a figure with its unit."""
    if unit == "s":
        return (
            f"{value * 1e6:.3g} µs" if value < 1e-3 else f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"
        )
    if unit == "bytes":
        power = max((p for p in range(4) if value >= 1024**p), default=0)
        return f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
    if unit == "percent":
        return f"{value:.2g} %" if value < 10 else f"{value:.0f} %"
    return f"{value:g}" if unit == "count" else f"{value:.2f}"


def verdict(ratio: Ratio) -> str:
    """Write the target of a figure and whether it is kept; "" without a target."""
    if ratio.target is None:
        return ""
    limit, side = ratio.target[:2]
    shown = f"{limit:g}" if ratio.unit in ("", "count") else amount(limit, ratio.unit)
    return f"{side} {shown}: {'too noisy to say' if ratio.is_noisy else 'met' if ratio.is_met else '**MISSED**'}"


def rows(record: Record) -> str:
    """Return Markdown table rows: one for every contender, then one for every ratio or other figure."""
    lines = []
    for name, values in record.seconds.items():
        middle = statistics.median(values)
        rate = f", {record.nbytes / middle / 1e9:.2f} GB/s" if record.nbytes else ""
        spread = f"{amount(min(values), 's')} to {amount(max(values), 's')}"
        lines.append(
            f"| {record.name} | {name} | {amount(middle, 's')}{rate} | {spread} | {cpu_per_gb(record, name)} | |"
        )
    for name, why in record.absent.items():
        lines.append(f"| {record.name} | {name} | did not run | | | {why} |")
    for ratio in record.ratios:
        spread = f"{amount(min(ratio.values), ratio.unit)} to {amount(max(ratio.values), ratio.unit)}"
        middle_cell = f"**{amount(ratio.median, ratio.unit)}**"
        lines.append(f"| {record.name} | **{ratio.name}** | {middle_cell} | {spread} | | {verdict(ratio)} |")
    return "\n".join(lines)


def cpu_per_gb(record: Record, contender: str) -> str:
    """Write the processor seconds that a contender took for a gigabyte of the state; "" where they were not read."""
    spent = record.cpu_seconds.get(contender)
    return f"{statistics.median(spent) / record.nbytes * 1e9:.2f}" if spent and record.nbytes else ""


def described(about: Mapping[str, Any]) -> str:
    """Say in one line how a record was taken."""
    machine = about["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if name != "memstore")
    given = machine.get("glibc_tunables")  # of records taken when it was not refused yet
    tunables = f", GLIBC_TUNABLES={given}" if given else ""
    return (
        f"Commit {machine['commit']}, {about['rounds']} rounds after {about['warmups']} warm-ups; "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}, {versions}{tunables}; load before {machine['load_before']}."
    )


def targets_table(measured: Mapping[str, list[Record]]) -> str:
    """Return the table of all promises: measured value, target, met or MISSED or not measured."""
    found: dict[str, list[tuple[str, str, Ratio]]] = {key: [] for key in LINES}
    for benchmark, records in measured.items():
        for record in records:
            for ratio in record.ratios:
                line = ratio.target[2] if ratio.target is not None and len(ratio.target) > 2 else ""
                if line in found:
                    found[line].append((benchmark, record.name, ratio))
    table = ["| promised | measured | target | |", "|---|---:|---|---|"]
    for key, (what, note) in LINES.items():
        if not found[key]:
            table.append(f"| {what} | not measured | | |")
        for benchmark, record_name, ratio in found[key]:
            which = f" ({record_name})" if len(found[key]) > 1 else ""
            value = amount(ratio.judged, ratio.unit)
            answer = f"[why](notes/{note}.md)" if not ratio.is_met and _has_note(note) else ""
            table.append(f"| {what}{which} | [{value}](#{_anchor(benchmark)}) | {verdict(ratio)} | {answer} |")
    return "\n".join(table)


def _has_note(note: str) -> bool:
    return (HERE / "notes" / f"{note}.md").exists()


def _anchor(benchmark: str) -> str:
    return benchmark.replace("_", "-")


def sections(measured: Mapping[str, list[Record]]) -> str:
    """Return one section for each benchmark: its table, and how it was taken."""
    parts = []
    for benchmark, records in measured.items():
        lines = [f"### {_anchor(benchmark)}", ""]
        lines += [HEAD, *(rows(record) for record in records), ""]
        notes = [note for record in records for note in record.notes]
        taken = dict.fromkeys(_taken(record) for record in records)
        lines += [*(f"- {note}" for note in [*dict.fromkeys(notes), *taken])]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _taken(record: Record) -> str:
    size = f"{record.nbytes / GIB:.3g} GiB. " if record.nbytes else ""
    return size + described(record.about)


def filled(text: str, parts: Mapping[str, str]) -> str:
    """Put the parts between their markers; ValueError for a part that the text has no markers for."""
    for name, part in parts.items():
        start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, marker, rest = text.partition(start)
        _, closing, after = rest.partition(end)
        if not (marker and closing):
            raise ValueError(f"the page has no '{start.strip()}' ... '{end}'")
        text = f"{before}{start}{part}\n{end}{after}"
    return text


def page(text: str, measured: Mapping[str, list[Record]]) -> str:
    """Return the page with its generated parts rendered again."""
    return filled(text, {"targets": targets_table(measured), "results": sections(measured)})


def main() -> None:
    """Render the page."""
    readme = HERE / "README.md"
    readme.write_text(page(readme.read_text(encoding="utf-8"), results.load()), encoding="utf-8")


if __name__ == "__main__":
    main()
