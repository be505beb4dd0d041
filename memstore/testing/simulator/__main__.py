"""Play seeds: `python -m memstore.testing.simulator --seeds 1000`, or one of them again: `--seed N`.

The exit status is 0 if every rule held, 1 if one broke, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import sys
from pathlib import Path

from memstore.testing.part_records import source_commit
from memstore.testing.simulator.planted.catalogue import table
from memstore.testing.simulator.run import record
from memstore.testing.simulator.run.campaign import COMMAND, RunOutcome, failure_text, play, run
from memstore.testing.simulator.run.record import play_on
from memstore.testing.simulator.world.scenario import Scenario, draw

FAILURES_SHOWN_MAX = 10  # shrinking one takes seconds; the summary counts the others


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    logging.getLogger("memstore").addHandler(logging.NullHandler())  # the real code warns of each fault
    options = parser().parse_args(argv)
    if options.planted:
        print(table())
        return 0
    if options.seed is not None or options.scenario is not None:
        return _replay(options.scenario or draw(options.seed))
    failed: list[RunOutcome] = []
    played = 0

    def on_outcome(outcome: RunOutcome) -> None:
        nonlocal played
        played += 1
        if outcome.rule:
            failed.append(outcome)
            print(f"seed {outcome.seed} breaks {outcome.rule}", file=sys.stderr)
        if played % 500 == 0:
            print(f"{played} seeds, {len(failed)} failed", file=sys.stderr)

    how = {"jobs": options.jobs, "minutes": options.minutes, "on_outcome": on_outcome}
    if options.campaign is not None:
        summary = play_on(options.campaign, options.first, options.seeds, **how)
    else:
        summary = run(options.first, options.seeds, **how)
    failed.sort(key=lambda outcome: outcome.seed)
    for outcome in failed[:FAILURES_SHOWN_MAX]:
        print(failure_text(draw(outcome.seed), outcome), end="\n\n")
    print(summary.text())
    if options.record:
        commit, date = source_commit() or "unknown", datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
        for outcome in failed:
            why = outcome.why.strip().splitlines()[-1]
            record.add_to_corpus(record.CorpusRow(outcome.rule, date, commit, why, draw(outcome.seed)), options.corpus)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds (default 100)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one per core)")
    parser.add_argument("--minutes", type=float, help="begin no seed after so many minutes")
    parser.add_argument("--campaign", type=Path, help="play the seeds that this record lacks, and add them to it")
    parser.add_argument("--record", action="store_true", help="append scenarios that fail to the corpus")
    parser.add_argument("--corpus", type=Path, default=record.CORPUS, help="the corpus file")
    parser.add_argument("--planted", action="store_true", help="hunt every planted bug and print the table")
    parser.add_argument("--seed", type=int, help="play this one and print its page")
    parser.add_argument("--scenario", type=Scenario.from_json, help="play this one, as a failure prints it")
    return parser


def _replay(scenario: Scenario) -> int:
    outcome = play(scenario)
    print(outcome.page or scenario.text())
    print(f"\nfingerprint {outcome.fingerprint}, {outcome.events:,} events, {outcome.virtual_s:.1f} simulated seconds")
    print(outcome.why if outcome.rule else "every rule held")
    return 1 if outcome.rule else 0


if __name__ == "__main__":
    sys.exit(main())
