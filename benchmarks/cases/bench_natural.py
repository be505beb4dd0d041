"""What does a put cost where data-parallel ranks say that they are equal: who copies, who does not, the network (R34)?

Four ranks on four hosts name one shard of one, two copies; everything changes before every put, and all put at once.
Both writers copy at the same time, with one thread each as they share two cores, and so do they for the plain copy.
Bytes on the wire are counted as in bench_wire.py, until the commit: 100 percent is the state once.
"""

from __future__ import annotations

from statistics import mean

from benchmarks.cases.bench_wire import sent_bytes
from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, require
from benchmarks.rigs import rig
from benchmarks.rigs.process_costs import cpu_seconds
from benchmarks.rigs.rank_workers import ranks_on_hosts

NBYTES_MAX = 256 * MIB  # four ranks in one machine's memory
WRITER, OTHER, PLAIN, COMMITTED = "put of a copier", "put of another rank", "plain copy", "put until committed"


def run(options: Options) -> list[Record]:
    """Return stalls beside a plain copy, and what travels beside the state."""
    seconds: dict[str, list[float]] = {WRITER: [], OTHER: [], PLAIN: [], COMMITTED: []}
    spent: list[float] = []
    percent: list[float] = []
    with ranks_on_hosts(options, min(options.nbytes, NBYTES_MAX), shards=1) as (cluster, workers):
        nbytes, hosts = workers.ask("nbytes")[0], list(cluster.labels)
        writers = [rank for rank, is_writer in enumerate(workers.ask("is_writer")) if is_writer]
        pids = [*workers.pids, *rig.pids_of(cluster)]
        workers.ask("threads", 1)
        for step in range(options.warmups + options.rounds):
            workers.ask("touch")
            before, before_s = sent_bytes(), cpu_seconds(pids)
            told = workers.ask("put", step)
            sent, spent_s = sent_bytes() - before, cpu_seconds(pids) - before_s
            copy_s = mean(workers.ask("copy", ranks=writers))
            require(all(workers.ask("is_same", step, hosts[-1])), f"a shard of step {step}")
            if step >= options.warmups:
                stalls = [answer["stall"] for answer in told]
                seconds[WRITER].append(mean(stalls[rank] for rank in writers))
                seconds[OTHER].append(mean(stall for rank, stall in enumerate(stalls) if rank not in writers))
                seconds[PLAIN].append(copy_s)
                ended_s, begun_s = max(t["committed"] for t in told), min(t["begun"] for t in told)
                seconds[COMMITTED].append(ended_s - begun_s)
                spent.append(spent_s)
                percent.append(100.0 * sent / nbytes)
    record = Record("natural replicas", nbytes, seconds, cpu_seconds={COMMITTED: spent})
    record.figure("on the wire", percent, "percent", targets.WIRE_NATURAL)
    record.ratio("a copier's put / plain copy", WRITER, PLAIN)
    record.ratio("another rank's put / plain copy", OTHER, PLAIN)
    record.notes.append(f"{len(writers)} of {len(hosts)} ranks copy, all at once; rates are of one rank's state")
    return [record]
