"""`python -m benchmarks.peers`: memstore beside what a user would pick instead, merged into records.json."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.races import RACES, run
from benchmarks.report import __main__, results
from benchmarks.report.harness import GIB, MIB, Options, Record


def main(arguments: Sequence[str] | None = None) -> list[Record]:
    """Run what the command line asks for; a peer that does not run is shown with the reason."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--full", action="store_true", help="1 GiB, 5 rounds (default: 64 MiB, 3 rounds)")
    parser.add_argument("--only", choices=sorted(RACES), action="append", help="run only this race; may be repeated")
    parser.add_argument("--nbytes", type=int, help="bytes of a rank's state instead")
    parser.add_argument("--rounds", type=int, help="timed rounds instead")
    parser.add_argument("--warmups", type=int, help="rounds thrown away first instead (default 2)", default=2)
    parser.add_argument("--out", type=Path, help="folder whose records.json takes the records")
    chosen = parser.parse_args(arguments)
    nbytes, rounds = (GIB, 5) if chosen.full else (64 * MIB, 3)
    options = Options(chosen.nbytes or nbytes, chosen.rounds or rounds, chosen.warmups)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    about = results.about(options, "full" if chosen.full else "quick")
    print(f"{__main__.described(about)}\n\n{__main__.HEAD}", flush=True)
    measured: list[Record] = []
    for name in chosen.only or RACES:
        records = run(name, options)
        for record in records:
            record.about = about
            print(__main__.rows(record), flush=True)
        if chosen.out is not None:
            results.merge("peers", records, chosen.out)
        measured += records
    return measured


if __name__ == "__main__":
    main()
