"""Bars of the medians with the lowest and the highest round, as small SVG files: the same results, the same file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.report.harness import Record

OURS, OTHERS = "#1f77b4", "#b0b0b0"
# No date, no random ids, text as text: a file changes only when the numbers do.
STYLE = {"svg.hashsalt": "memstore", "svg.fonttype": "none", "font.size": 8.0}
ROW_INCHES = 0.28


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw the seconds of every record that has some, one panel below the other."""
    shown = [record for record in records if record.seconds]
    counts = [len(record.seconds) for record in shown]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.5, sum(counts) * ROW_INCHES + len(shown) * 0.75), layout="constrained")
        panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=counts)
        for panel, record in zip(panels[:, 0], shown, strict=True):
            names = list(record.seconds)[::-1]
            milliseconds = [[value * 1e3 for value in record.seconds[name]] for name in names]
            middles = [statistics.median(values) for values in milliseconds]
            reach = [
                [middle - min(values) for middle, values in zip(middles, milliseconds, strict=True)],
                [max(values) - middle for middle, values in zip(middles, milliseconds, strict=True)],
            ]
            colours = [OURS if name.startswith(("memstore", "put", "get")) else OTHERS for name in names]
            panel.barh(names, middles, xerr=reach, color=colours, ecolor="#404040", capsize=2)
            panel.set_title(f"{record.name}: milliseconds, median, lowest and highest round", loc="left", fontsize=8)
            panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", metadata={"Date": None})
