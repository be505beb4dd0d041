"""Play rounds: `python -m memstore.testing.nemesis --minutes 20`, or one of them again: `--round-seed S`.

The exit status is 0 if every promise was kept, 1 if one was broken, 2 for a wrong command line. A round that breaks a
promise leaves its story and the logs of all processes in a folder.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path

from memstore.testing.nemesis import leaks
from memstore.testing.nemesis.ledger import Story
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.nemesis.record import RecordPart, append
from memstore.testing.nemesis.round import NemesisRound
from memstore.testing.nemesis.schedule import COMPOSED, PARITY, draw, without
from memstore.testing.part_records import parts_of
from memstore.testing.ranks.rank_process import RankNursery

DEFAULT_FOLDER = Path("nemesis-report")


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = parser().parse_args(argv)
    for sig in (signal.SIGTERM, signal.SIGINT):  # SIGINT too: it is ignored in a shell's background job
        signal.signal(sig, _end)
    seed = options.seed if options.seed is not None else 1 + len(parts_of(options.out)) if options.out else 1
    part, broken = RecordPart(seed), 0
    rng, began_s = random.Random(seed), time.monotonic()
    run = secrets.token_hex(8)
    options.folder = options.folder.resolve()  # it holds durable storage, whose path every process must read alike
    options.folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=options.folder / "nemesis.log", level=logging.WARNING)  # of this process's questions
    os.environ[leaks.RUN_VARIABLE] = run
    os.environ.pop("RAY_ADDRESS", None)
    with RankNursery() as nursery, LoadMeter() as meter:
        while True:
            round_seed = options.round_seed if options.round_seed is not None else rng.getrandbits(32)
            broken += _play(options, round_seed, nursery, meter, run, part)
            if options.out is not None:
                append(options.out, part)
            if options.round_seed is not None or time.monotonic() - began_s > 60 * options.minutes:
                break
            if broken and options.stop_at_first:
                break
    body = part.body
    print(
        f"{body['rounds']} rounds, {body['clean_rounds']} clean, {body['seconds']:.0f} s, "
        f"{sum(body['faults'].values())} faults, {body['counts']}"
    )
    return 1 if broken else 0


def _end(number: int, _frame: object) -> None:
    """End the round that is played, which then cleans up."""
    raise SystemExit(128 + number)


def _play(
    options: argparse.Namespace, seed: int, nursery: RankNursery, meter: LoadMeter, run: str, part: RecordPart
) -> bool:
    """Play one round and print how it went; return whether it broke a promise."""
    scenario = without(
        draw(seed, shape="ray" if options.ray else options.shape, is_short=options.short), options.without
    )
    folder = options.folder / f"round-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    began_s = time.monotonic()
    story = NemesisRound(scenario, nursery, meter, folder, run, Path("/dev/shm")).play()
    seconds = time.monotonic() - began_s
    part.add(scenario, story, seconds, meter.share())
    print(
        f"{time.strftime('%H:%M:%S')} round {seed} {scenario.shape}: {_verdict(story)} in {seconds:.0f} s", flush=True
    )
    if story.violations:
        (folder / "story.txt").write_text("\n".join(story.lines) + "\n", encoding="utf-8")
        for violation in story.violations:
            print(f"    {violation.kind}: {violation.text}", flush=True)
        print(f"    {folder}/story.txt; again: --round-seed {seed}", flush=True)
    elif not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    if options.keep:
        (folder / "story.txt").write_text("\n".join(story.lines) + "\n", encoding="utf-8")
    return bool(story.violations)


def _verdict(story: Story) -> str:
    faults = sum(story.faults.values())
    kept = "clean" if not story.violations else f"{len(story.violations)} VIOLATIONS"
    return f"{kept}, {faults} faults, {story.counts['steps_committed']} commits, {story.counts['gets']} gets"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m memstore.testing.nemesis", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no round after so many minutes (20)")
    parser.add_argument("--seed", type=int, help="seed of the rounds' seeds (default: one more than parts recorded)")
    parser.add_argument("--round-seed", type=int, help="play this one round")
    parser.add_argument(
        "--shape", choices=("random", "kills", "ray", PARITY, *COMPOSED), default="", help="only rounds of this shape"
    )
    parser.add_argument("--short", action="store_true", help="rounds of some seconds")
    parser.add_argument("--ray", action="store_true", help="hosts are raylets of a Ray cluster on this machine")
    parser.add_argument("--without", action="append", default=[], help="leave out the faults of a kind")
    parser.add_argument("--stop-at-first", action="store_true", help="end with the first broken promise")
    parser.add_argument("--keep", action="store_true", help="keep story and logs of clean rounds as well")
    parser.add_argument("--out", type=Path, help="append to this record")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="for stories and logs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
