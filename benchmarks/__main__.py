"""`python -m benchmarks --quick|--full --out FOLDER`: run benchmarks, print tables, merge their records."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import (
    bench_controller,
    bench_memory,
    bench_parity,
    bench_planner,
    bench_processors,
    bench_put,
    bench_replicate,
    bench_restore,
    bench_sharing,
    bench_small,
    bench_wire,
)
from benchmarks.report import __main__, results
from benchmarks.report.harness import EMULATED_HOSTS, GIB, MIB, SHARED_CORES, Options, Record

BENCHMARKS = {
    "first_put": bench_put.run_first,
    "put_stall": bench_put.run_stall,
    "put_waits": bench_put.run_waits,
    "replicate": bench_replicate.run,
    "restore": bench_restore.run,
    "restore_links": bench_restore.run_links,
    "commit": bench_small.run_commit,
    "small": bench_small.run,
    "wire": bench_wire.run,
    "natural": bench_wire.run_natural,
    "memory": bench_memory.run,
    "idle": bench_memory.run_idle,
    "parity": bench_parity.run,
    "loader": bench_processors.run_loader,
    "catalog": bench_controller.run_catalog,
    "controller": bench_controller.run,
    "placement": bench_planner.run_placement,
    "planner": bench_planner.run,
    "sharing": bench_sharing.run,
    "busy": bench_put.run_busy,
    "gil": bench_processors.run_gil,
}
SIZES = {"quick": (64 * MIB, 3), "full": (GIB, 5)}


def main(arguments: Sequence[str] | None = None) -> list[Record]:
    """Run what the command line asks for; a missed target is printed, not an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help="64 MiB, 3 rounds (default)")
    size.add_argument("--full", dest="size", action="store_const", const="full", help="1 GiB, 5 rounds")
    parser.add_argument(
        "--only", choices=sorted(BENCHMARKS), action="append", help="run only this one; may be repeated"
    )
    parser.add_argument("--nbytes", type=int, help="bytes of the state instead")
    parser.add_argument("--rounds", type=int, help="timed rounds instead")
    parser.add_argument(
        "--chunk-bytes", type=int, default=4 * MIB, help="chunk size of the store (default %(default)s)"
    )
    parser.add_argument("--without-ray", action="store_true", help="leave Ray's object store out")
    parser.add_argument(
        "--hosts",
        choices=(SHARED_CORES.split()[0], EMULATED_HOSTS.split()[0]),
        help="replicate and restore: only with all cores shared by both hosts, or only with a core for each",
    )
    parser.add_argument("--out", type=Path, help="folder whose records.json takes the records")
    chosen = parser.parse_args(arguments)
    name = chosen.size or "quick"
    nbytes, rounds = SIZES[name]
    options = Options(
        nbytes=chosen.nbytes or nbytes,
        rounds=chosen.rounds or rounds,
        chunk_bytes=chosen.chunk_bytes,
        with_ray=not chosen.without_ray,
        hosts=tuple(h for h in (SHARED_CORES, EMULATED_HOSTS) if h.startswith(chosen.hosts or "")),
    )
    about = results.about(options, name)
    print(f"{__main__.described(about)}\n\n{__main__.HEAD}", flush=True)
    measured: list[Record] = []
    for key in chosen.only or BENCHMARKS:
        records = BENCHMARKS[key](options)
        for record in records:
            record.about = about
            print(__main__.rows(record), flush=True)
        if chosen.out is not None:
            results.merge(key, records, chosen.out)
        measured += records
    return measured


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    main()
