"""The process of one contestant: `python -m benchmarks.peers.child`, which gets its orders as JSON lines on stdin.

The answers go to the stdout it was started with; what libraries print goes to stderr. A failure is answered with its
last line, never with a number.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

CONTESTANTS = {
    "torch": "torch_saves:TorchSaves",
    "torchft": "torchft_http:TorchftHttp",
    "dlrover": "dlrover_memory:DlroverMemory",
    "lm-resiliency": "lm_resiliency_pair:LmResiliencyPair",
    "nvidia-resiliency-ext": "nvrx_local:NvrxLocal",
    "hyperpod": "hyperpod_client:HyperpodClient",
    "mooncake": "mooncake_store:MooncakeStore",
    "memstore": "memstore_rank:MemstoreRank",
}
RANKS_APART = 1000


class Child:
    """Holds the state and the contestant between the commands."""

    def prepare(self, name: str, nbytes: int, rank: int, world_size: int, **places: Any) -> dict[str, Any]:
        """Make the state of this rank and the contestant."""
        from benchmarks.peers.contestant import Task
        from benchmarks.rigs import gpt_tensors

        if world_size > 1:
            import torch.distributed as dist

            dist.init_process_group("gloo")
        self._state = gpt_tensors.gpt_state(nbytes)
        gpt_tensors.mark(self._state, RANKS_APART * rank)
        self._world_size = world_size
        self._shared_pids = places["options"].get("pids", []) if rank == 0 else []  # of all ranks: counted once
        module, _, kind = CONTESTANTS[name].partition(":")
        task = Task(
            self._state,
            RANKS_APART * (1 - 2 * rank),
            rank,
            world_size,
            Path(places["memory"]),
            Path(places["disk"]),
            places["options"],
        )
        self._contestant = getattr(importlib.import_module(f"benchmarks.peers.{module}"), kind)(task)
        return {"nbytes": gpt_tensors.total_nbytes(self._state)}

    def round(self, way: str, step: int) -> dict[str, Any]:
        """Change the state, wait for the other rank, save."""
        from benchmarks.rigs import gpt_tensors
        from benchmarks.rigs.stopwatch import cpu_seconds, descendants

        gpt_tensors.touch(self._state)
        if self._world_size > 1:
            import torch.distributed as dist

            dist.barrier()
        pids = [os.getpid(), *descendants(os.getpid()), *self._shared_pids]
        before_s = cpu_seconds(pids)
        stamps = self._contestant.run(way, step)
        return {**stamps._asdict(), "cpu": cpu_seconds(pids) - before_s}

    def check(self, way: str) -> dict[str, Any]:
        """Compare what the last round moved."""
        return {"is_same": self._contestant.is_same(way)}

    def close(self) -> dict[str, Any]:
        """Stop the contestant."""
        self._contestant.close()
        return {}


def main() -> None:
    """Answer every line until stdin ends or `close` is answered."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child = Child()
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        try:
            _answer(answers, getattr(child, what)(**command))
        except Exception as error:  # a peer may fail in any way; the reason belongs into the results
            traceback.print_exc()
            _answer(answers, {"error": traceback.format_exception_only(error)[-1].strip()})
        if what == "close":
            break
    answers.flush()
    os._exit(0)  # what a peer leaves running, such as a thread that never ends, must not keep the process


def _answer(answers: TextIO, body: dict[str, Any]) -> None:
    answers.write(json.dumps(body) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
