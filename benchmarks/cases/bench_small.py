"""Small states, where fixed costs are all there is: many small tensors, and the commit of next to nothing.

5,000 tensors of 1 KiB, and FSDP2 with AdamW over 723 parameters (2,892 tensors, most of them DTensors, of one rank):
how long a put blocks, and how long beyond a plain copy of the same tensors. 1 KiB of one rank, then of each of four
ranks on one host: from the first put until all know that it is committed, with a copy on the other host. A round's
value is the median of its puts; everything changes before each.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.report import targets
from benchmarks.report.harness import MIB, Options, Record, Target, Took, interleave, require
from benchmarks.rigs import rig
from benchmarks.rigs.rank_workers import RankWorkers, ranks_on_hosts
from benchmarks.rigs.stopwatch import cpu_seconds, timed

PUTS = 10  # of a round
KIB_ELEMENTS = 256
SMALL_TENSORS, BLOCKS, WIDTH = 5000, 80, 32
ROOM_BYTES = 64 * MIB  # the arena's share of a state: a chunk for each, whatever its size
PUT, COPY = "put", "plain copy"


def run(options: Options) -> list[Record]:
    """Return a record for each kind of many tensors, and for one and for four ranks of 1 KiB."""
    options = dataclasses.replace(options, nbytes=ROOM_BYTES)
    return [
        _many(options, "small, 5,000 x 1 KiB", small_tensors, targets.MANY_STALL, None),
        _in_a_process(_fsdp2, options),
        _kib(options, 1, targets.KIB_COMMIT),
        _kib(options, 4, targets.KIB_COMMIT_4),
    ]


def small_tensors() -> dict[str, torch.Tensor]:
    """Return a state of many small tensors."""
    return {f"t{number}": torch.rand(KIB_ELEMENTS) for number in range(SMALL_TENSORS)}


def kib_state(seed: int) -> dict[str, torch.Tensor]:
    """Return a rank's 1 KiB."""
    return {"t": torch.full((KIB_ELEMENTS,), float(seed))}


def _in_a_process(measure: Callable[[Options], Record], options: Options) -> Record:
    """Measure in a process that ends afterwards: torch's meshes keep gloo's listener for as long as theirs lives."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, options).result()


def _fsdp2(options: Options) -> Record:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _many(options, "small, FSDP2 with AdamW", fsdp2_state, None, targets.FSDP2_BEYOND)
    finally:
        dist.destroy_process_group()


def fsdp2_state() -> dict[str, Any]:
    """Return model and optimizer of a transformer's parameters under FSDP2, moments made."""
    mesh = dist.init_device_mesh("cpu", (1,))
    blocks = [_block() for _ in range(BLOCKS)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    first, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    model = nn.Sequential(first, *blocks, nn.RMSNorm(WIDTH), last)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _block() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH))


def local_tensors(state: Any) -> list[torch.Tensor]:
    """Return every tensor of a state, in state order; of a DTensor what this rank has of it."""
    if isinstance(state, torch.Tensor):
        return [(state.to_local() if isinstance(state, DTensor) else state).detach()]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in local_tensors(part)]


def _many(
    options: Options, name: str, make_state: Callable[[], Any], stall: Target | None, beyond: Target | None
) -> Record:
    state, twin = make_state(), make_state()
    sources, twins = local_tensors(state), local_tensors(twin)
    with rig.store_on_two_hosts(options, replicas=2) as (cluster, store):

        def put(step: int) -> Took:
            _touch(sources)
            took, ticket = timed(lambda: store.put(step, state), rig.pids_of(cluster))
            ticket.wait("committed")
            return took

        def copy(_: int) -> Took:
            return timed(lambda: [twin.copy_(source) for twin, source in zip(twins, sources, strict=True)])[0]

        def puts(number: int) -> Took:
            took = _middle(put, range(number * PUTS, (number + 1) * PUTS))
            store.get((number + 1) * PUTS - 1, rank=0, into=twin)
            require(_is_same(twins, sources), f"{name}, round {number}")
            torch._foreach_zero_(twins)
            return took

        def copies(_: int) -> Took:
            took = _middle(copy, range(PUTS))
            require(_is_same(twins, sources), f"{name}, plain copy")
            torch._foreach_zero_(twins)
            return took

        rounds = interleave({PUT: puts, COPY: copies}, options, lambda _: None)
    record = Record(name, sum(t.nbytes for t in sources), rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    record.figure("stall", rounds.seconds[PUT], "s", stall)
    pairs = zip(rounds.seconds[PUT], rounds.seconds[COPY], strict=True)
    record.figure("stall beyond the plain copy", [put_s - copy_s for put_s, copy_s in pairs], "s", beyond)
    record.notes.append(f"{name}: {len(sources):,} tensors")
    return record


def _kib(options: Options, ranks: int, target: Target) -> Record:
    committed: list[float] = []
    spent: list[float] = []
    with (
        rig.two_hosts(options, replicas=2, versions=float(2 * ranks)) as cluster,
        RankWorkers(cluster.config, [rig.NEAR] * ranks, kib_state) as workers,
    ):
        pids = [*workers.pids, *rig.pids_of(cluster)]

        def put(step: int) -> Took:
            workers.ask("touch")
            before_s = cpu_seconds(pids)
            marks = workers.ask("put", step)
            wall_s = max(mark["committed"] for mark in marks) - min(mark["begun"] for mark in marks)
            return Took(wall_s, cpu_seconds(pids) - before_s)

        for number in range(options.warmups + options.rounds):
            took = _middle(put, range(number * PUTS, (number + 1) * PUTS))
            require(all(workers.ask("is_same", (number + 1) * PUTS - 1, rig.FAR)), f"1 KiB of {ranks}, round {number}")
            if number >= options.warmups:
                committed.append(took.wall_s)
                spent.append(took.cpu_s or 0.0)
    record = Record(f"small, 1 KiB, ranks on one host: {ranks}", 0, {"put to committed": committed})
    record.figure("put to committed", committed, "s", target)
    record.figure("CPU seconds of one put, all ranks", spent, "s")
    return record


def _middle(one: Callable[[int], Took], numbers: Sequence[int]) -> Took:
    """Return the median of each of the two, over several times the same."""
    took = [one(number) for number in numbers]
    return Took(statistics.median(t.wall_s for t in took), statistics.median(t.cpu_s or 0.0 for t in took))


def _touch(sources: Sequence[torch.Tensor]) -> None:
    torch._foreach_add_(list(sources), 1)


def _is_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# -- commit -------------------------------------------------------------------------------------------
# How long after the last seal do all ranks know that the step is committed? Four hosts, a rank on each.
#
# From the moment the last rank received that its copies are sealed on its own host and its peer, until the last rank
# learned of the commit: seals to the controller, the rule, the fact into two journals, the word to all hosts. One
# machine, one clock.


COMMIT_PUTS = 5  # of a round: a commit takes milliseconds
SMALL, LARGE = MIB, 64 * MIB


def run_commit(options: Options) -> list[Record]:
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
        for number in range((options.warmups + options.rounds) * COMMIT_PUTS):
            workers.ask("touch")
            before_s = cpu_seconds(pids)
            beyond_s, whole_s = one(workers, number)
            spent_s = cpu_seconds(pids) - before_s
            if number >= options.warmups * COMMIT_PUTS:
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
