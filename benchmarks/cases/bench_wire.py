"""How many bytes travel when little has changed?

Every byte that the store's processes send over TCP counts, headers, acknowledgements, heartbeats and facts included:
the loopback interface's counter from the put until the commit. 100 percent is what a put of nothing but new bytes
sends, one copy of every rank's state. Ranks reach their holder through a Unix socket and shared memory: no wire.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.rank_workers import ranks_on_hosts
from benchmarks.rigs.stopwatch import cpu_seconds

TENTH = 10
SCATTER_ELEMENTS = 16384  # 64 KiB of float32
ROW_ELEMENTS, ROWS_EVERY = 128, 1000  # rows of 512 bytes, as of an embedding table; one in so many is changed
ALL, NONE, RUN, LAYERS, SCATTERED, ROWS = (
    "all bytes changed",
    "nothing changed",
    "10 % changed, one run",
    "10 % changed, in parameters and both moments",
    "10 % changed, every tenth 64 KiB",
    "0.1 % changed, scattered rows of 512 B",
)


def run(options: Options) -> list[Record]:
    """Return what travels when one rank puts again."""
    return [again(options)]


def again(options: Options) -> Record:
    """One rank, two hosts: the bytes of a put after some of the state changed."""
    state = gpt_tensors.gpt_state(options.nbytes)
    nbytes = gpt_tensors.total_nbytes(state)
    cases: dict[str, Callable[[Any, int], None]] = {
        ALL: lambda state, _: gpt_tensors.touch(state),
        NONE: lambda state, _: None,
        RUN: change_run,
        LAYERS: change_layers,
        SCATTERED: change_scattered,
        ROWS: change_rows,
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in cases}
    percent: dict[str, list[float]] = {name: [] for name in cases}
    with rig.store_on_two_hosts(options, replicas=2) as (cluster, store):
        step = 0
        for number in range(options.warmups + options.rounds):
            for name, change in cases.items():
                change(state, number)
                before = sent_bytes()
                took = rig.put_committed(cluster, store, step, state)
                sent = sent_bytes() - before
                got = rig.read_at(rig.FAR, cluster.config, step)
                require(gpt_tensors.is_same(got.state, state), f"the peer's copy of step {step}")
                if number >= options.warmups:
                    seconds[name].append(took.wall_s)
                    cpu_seconds[name].append(took.cpu_s or 0.0)
                    percent[name].append(100.0 * sent / nbytes)
                step += 1
    record = Record("put again", nbytes, seconds, cpu_seconds=cpu_seconds)
    held = {NONE: targets.WIRE_NONE, RUN: targets.WIRE_TENTH}
    for name, values in percent.items():
        record.figure(f"on the wire, {name}", values, "percent", held.get(name))
    return record


def change_run(state: Any, number: int) -> None:
    """Change a tenth of the bytes that lie together: some tensors, in state order, that no round changed before."""
    del number
    left = gpt_tensors.total_nbytes(state) // TENTH
    for tensor in sorted(gpt_tensors.tensors(state), key=lambda t: -t.numel()):
        count = min(tensor.numel(), left // tensor.element_size())
        tensor.view(-1)[:count] += 1
        left -= count * tensor.element_size()


def change_layers(state: Any, number: int) -> None:
    """Change the last tenth of the parameters and the same part of both moments, as with the layers below frozen."""
    del number
    for part in (state["model"], *moments(state)):
        tensors = gpt_tensors.tensors(part)
        left = sum(t.numel() for t in tensors) // TENTH
        for tensor in reversed(tensors):
            count = min(tensor.numel(), left)
            tensor.view(-1)[tensor.numel() - count :] += 1
            left -= count


def moments(state: Any) -> list[list[Any]]:
    """Return the optimizer's tensors in two lists of equal length: first and second moments."""
    per_parameter = state["optimizer"]["state"].values()
    return [[found[name] for found in per_parameter] for name in ("exp_avg", "exp_avg_sq")]


def change_scattered(state: Any, number: int) -> None:
    """Change all of every tenth 64 KiB: no chunk of 4 MiB stays as it was."""
    del number
    for tensor in gpt_tensors.tensors(state):
        for block in tensor.view(-1).split(SCATTER_ELEMENTS)[::TENTH]:
            block.add_(1)


def change_rows(state: Any, number: int) -> None:
    """Change one row of 512 bytes in a thousand, others in every round: no chunk of 4 MiB stays as it was."""
    for tensor in gpt_tensors.tensors(state):
        whole = tensor.numel() // ROW_ELEMENTS * ROW_ELEMENTS
        tensor.view(-1)[:whole].view(-1, ROW_ELEMENTS)[number % ROWS_EVERY :: ROWS_EVERY] += 1


def sent_bytes() -> int:
    """Return all bytes that the loopback interface has sent since it is up."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise RuntimeError("/proc/net/dev has no interface lo")


# -- natural ------------------------------------------------------------------------------------------
# What does a put cost where data-parallel ranks say that they are equal: who copies, who does not, the network (R34)?
#
# Four ranks on four hosts name one shard of one, two copies; everything changes before every put, and all put at
# once. Both writers copy at the same time, with one thread each as they share two cores, and so do they for the plain
# copy. Bytes on the wire are counted as in bench_wire.py, until the commit: 100 percent is the state once.


NBYTES_MAX = 256 * MIB  # four ranks in one machine's memory
WRITER, OTHER, PLAIN, COMMITTED = "put of a copier", "put of another rank", "plain copy", "put until committed"


def run_natural(options: Options) -> list[Record]:
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
