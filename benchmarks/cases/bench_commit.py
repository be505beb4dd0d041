"""How long after the last seal do all ranks know that the step is committed? Four hosts, a rank on each.

From the moment the last rank received that its copies are sealed on its own host and its peer, until the last rank
learned of the commit: seals to the controller, the rule, the fact into two journals, the word to all hosts. One
machine, one clock.
"""

from __future__ import annotations

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, require
from benchmarks.rigs import rig
from benchmarks.rigs.process_costs import cpu_seconds
from benchmarks.rigs.rank_workers import RankWorkers, ranks_on_hosts

PUTS = 5  # of a round: a commit takes milliseconds
SMALL, LARGE = MIB, 64 * MIB


def run(options: Options) -> list[Record]:
    """Return the seconds beyond the last seal, for a small state and for a large one."""
    return [measure(options, min(nbytes, options.nbytes)) for nbytes in (SMALL, LARGE)]


def measure(options: Options, nbytes: int) -> Record:
    """Return one record: the whole put, and what the commit adds."""
    beyond: list[float] = []
    whole: list[float] = []
    spent: list[float] = []
    with ranks_on_hosts(options, nbytes) as (cluster, workers):
        actual = workers.ask("nbytes")[0]
        hosts = list(cluster.labels)
        pids = [*workers.pids, *rig.pids_of(cluster)]
        for number in range((options.warmups + options.rounds) * PUTS):
            workers.ask("touch")
            before_s = cpu_seconds(pids)
            beyond_s, whole_s = one(workers, number)
            spent_s = cpu_seconds(pids) - before_s
            if number >= options.warmups * PUTS:
                beyond.append(beyond_s)
                whole.append(whole_s)
                spent.append(spent_s / len(hosts))  # rates are of one rank's state
        last = number
        for rank in range(len(hosts)):
            same = workers.ask("is_same", last, hosts[(rank + 2) % len(hosts)], ranks=[rank])
            require(all(same), f"rank {rank}'s shard of step {last}")
    size = f"{nbytes // MIB} MiB a rank"
    record = Record(f"commit, {size}", actual, {"put to committed": whole})
    record.cpu_seconds["put to committed"] = spent
    record.figure("beyond the last seal", beyond, "s", targets.COMMIT)
    return record


def one(workers: RankWorkers, step: int) -> tuple[float, float]:
    """Return the seconds from the last seal to the last commit, and from the first put to it."""
    marks = workers.ask("put", step)
    committed_s = max(mark["committed"] for mark in marks)
    return (committed_s - max(mark["replicated"] for mark in marks), committed_s - min(mark["begun"] for mark in marks))
