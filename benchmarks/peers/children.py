"""The processes of one contestant, one for each rank, seen from the benchmark: commands with deadlines."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.report.harness import Took

# -- environments -------------------------------------------------------------------------------------
# An environment for each peer: made once from its pinned requirements, made again when they change.
#
# All share the torch of the environment that runs this (a .pth file behind their own packages): it is the same
# release, and five copies of it would take gigabytes.


FOLDER = Path(__file__).resolve().parents[2] / ".peers"  # ignored by git
INSTALL_S = 600.0
TORCH = "torch==2.13.0"
PINS = {
    "dlrover": ("dlrover==0.6.1",),
    "hyperpod": ("amzn-sagemaker-checkpointing==1.1.3", "boto3==1.44.5", "s3torchconnector==1.5.0", "tenacity==9.2.1"),
    "lm-resiliency": ("lm-resiliency==0.2.0",),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
    "nvidia-resiliency-ext": ("nvidia-resiliency-ext==0.4.1",),
    "torch": ("safetensors==0.8.0",),
    "torchft": ("torchft==0.2.0",),
}


class CannotInstall(Exception):
    """An environment could not be made; the text is the last line that said why."""


def interpreter(name: str) -> Path:
    """Return the Python of a peer's environment, which is made if it is missing or its pins changed.

    Raises:
        CannotInstall: pip or venv failed, or took longer than INSTALL_S.
    """
    if name == "memstore":
        return Path(sys.executable)
    wanted = (TORCH, *PINS[name])
    pins = "\n".join(wanted) + "\n"
    home = FOLDER / name
    python, stamp = home / "bin" / "python", home / "pins.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == pins:
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(home)])
    shared = sysconfig.get_paths()["purelib"]
    (next(home.glob("lib/python3*/site-packages")) / "zz_shared.pth").write_text(shared + "\n", encoding="utf-8")
    _run([str(python), "-m", "pip", "install", "-q", *wanted])
    stamp.write_text(pins, encoding="utf-8")
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(str(error)) from error
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise CannotInstall(lines[-1] if lines else f"exit status {done.returncode}")


# -- children -----------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parent.parent.parent
ANSWER_S = 140.0
CLOSE_S = 10.0


class PeerFailed(Exception):
    """A contestant did not run; the text is the last line that said why."""


class Team:
    """One contestant. A context manager: its processes and files are gone afterwards.

    Args:
        name: Of the contestant, and of its environment.
        nbytes: Of every rank's state.
        ranks: 1 or 2 processes.
        options: Handed to the contestant.

    Raises:
        PeerFailed: It cannot be installed, or a rank fails or does not answer within ANSWER_S.
    """

    def __init__(self, name: str, nbytes: int, ranks: int = 1, **options: Any) -> None:
        self.name = name
        self.nbytes = 0
        self._ranks = ranks
        self._steps = itertools.count()
        self._stack = contextlib.ExitStack()
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            self._start(nbytes, options)
        except BaseException:
            self._end()
            raise

    def _start(self, nbytes: int, options: dict[str, Any]) -> None:
        try:
            python = interpreter(self.name)
        except CannotInstall as error:
            raise PeerFailed(f"not installed: {error}") from error
        memory = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-"))
        disk = self._stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT, prefix=".bench-"))
        port = _free_port()
        for rank in range(self._ranks):
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(self._ranks),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            child = subprocess.Popen(
                [str(python), "-m", "benchmarks.peers.child"],
                cwd=memory,
                env=environment,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log(),
                start_new_session=True,
            )
            self._children.append(child)
        answers = self._ask_all(
            [
                {
                    "do": "prepare",
                    "name": self.name,
                    "nbytes": nbytes,
                    "rank": rank,
                    "world_size": self._ranks,
                    "memory": memory,
                    "disk": disk,
                    "options": options,
                }
                for rank in range(self._ranks)
            ]
        )
        self.nbytes = answers[0]["nbytes"]

    def _log(self) -> Any:
        """What the processes print: shown where BENCH_PEERS_LOG names a file, else dropped."""
        return self._stack.enter_context(open(os.environ.get("BENCH_PEERS_LOG", os.devnull), "ab"))

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(PeerFailed, OSError):
            self._ask_all([{"do": "close"}] * self._ranks, CLOSE_S)
        self._end()

    def _end(self) -> None:
        """Kill every process group that was started, and remove the files."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
        self._stack.close()

    def round(self, way: str) -> tuple[float, Took]:
        """Run one round on all ranks, a step of its own whatever the way.

        Returns:
            The longest stall of a rank in seconds, and what the round took from the first start until the last end.
        """
        ranks = self._ask_all([{"do": "round", "way": way, "step": next(self._steps)}] * self._ranks)
        stall_s = max(rank["released"] - rank["started"] for rank in ranks)
        wall_s = max(rank["ended"] for rank in ranks) - min(rank["started"] for rank in ranks)
        return stall_s, Took(wall_s, sum(rank["cpu"] for rank in ranks))

    def is_same(self, way: str) -> bool:
        """Have all ranks compare the bytes of the last round."""
        return all(answer["is_same"] for answer in self._ask_all([{"do": "check", "way": way}] * self._ranks))

    def _ask_all(self, commands: list[dict[str, Any]], limit_s: float = ANSWER_S) -> list[dict[str, Any]]:
        for child, command in zip(self._children, commands, strict=True):
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # the answer says what happened
                    child.stdin.write(json.dumps(command).encode() + b"\n")
        deadline_s = time.monotonic() + limit_s
        answers = [
            self._answer(child, command["do"], deadline_s)
            for child, command in zip(self._children, commands, strict=True)
        ]
        for answer in answers:
            if "error" in answer:
                raise PeerFailed(str(answer["error"]))
        return answers

    def _answer(self, child: subprocess.Popen[bytes], what: str, deadline_s: float) -> dict[str, Any]:
        assert child.stdout is not None  # it was started with a pipe
        line = b""
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([child.stdout], [], [], left_s)[0]:
                return {"error": f"no answer to {what} before the deadline"}
            got = os.read(child.stdout.fileno(), 1 << 16)
            if not got:
                return {"error": f"the process ended during {what}, exit status {child.wait()}"}
            line += got
        found: dict[str, Any] = json.loads(line)
        return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
