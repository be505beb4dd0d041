"""How long a put blocks training, beside a plain copy of the same tensors into warm memory.

The put runs in a store that replicates it, and the clock stops when put returns. The next contender
starts only when the step is committed, so neither is slowed by the other's work in the background.
"""

from __future__ import annotations

from benchmarks.report import targets
from benchmarks.report.harness import Options, Record, Took, interleave, require
from benchmarks.rigs import gpt_tensors, rig
from benchmarks.rigs.stopwatch import timed


def run(options: Options) -> list[Record]:
    """Return put's stall and the plain copy, and their ratio."""
    state = gpt_tensors.gpt_state(options.nbytes)
    twin = gpt_tensors.empty_like(state)
    pairs = list(zip(gpt_tensors.tensors(twin), gpt_tensors.tensors(state), strict=True))
    with rig.store_on_two_hosts(options, replicas=2) as (cluster, store):
        pids = rig.pids_of(cluster)

        def put(step: int) -> Took:
            took, ticket = timed(lambda: store.put(step, state), pids)
            ticket.wait("committed")
            got = store.get(step, rank=0)
            require(got is not None and gpt_tensors.is_same(got.state, state), f"put of step {step}")
            return took

        def copy(step: int) -> Took:
            took = timed(lambda: [target.copy_(source) for target, source in pairs])[0]
            require(gpt_tensors.is_same(twin, state), f"plain copy {step}")
            return took

        rounds = interleave({"put": put, "plain copy": copy}, options, lambda _: gpt_tensors.touch(state))
    record = Record("put stall", gpt_tensors.total_nbytes(state), rounds.seconds, cpu_seconds=rounds.cpu_seconds)
    record.ratio("put / plain copy", "put", "plain copy", targets.STALL_COPY)
    return [record]
