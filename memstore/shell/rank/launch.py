"""Who am I in this launch: rank, world size, and the key that is new for every launch (R20).

Reads the launch that was given, Ray Train, an initialised torch.distributed and the environment, in this order, and
imports neither torch nor ray: a library that the process has not imported cannot be in use by it. Read `identity.py`
next.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from memstore.config import check_given_whole
from memstore.core.wire.calls import InPlace
from memstore.errors import ConfigError, PeerTimeout
from memstore.shell.arena.lock import process_start_time
from memstore.shell.identity import read_boot_id

log = logging.getLogger("memstore")
REHEARSAL_VARIABLE = "MEMSTORE_REHEARSAL"  # what a process rehearses: it is no rank of any launch
_KEY_NBYTES = 16  # 128 random bits: two launches never draw the same
_BLOCK_NBYTES = 256  # what rank 0 broadcasts: the key, then its launcher's name in UTF-8, padded with zeros


# What launchers of several processes set -> what counts them; one of one is alone.
_LAUNCHERS = {
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_PROCID"), "SLURM_NTASKS"),
    **dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_SIZE"),
    **dict.fromkeys(("PMI_SIZE", "PMI_RANK", "PMIX_RANK"), "PMI_SIZE"),
    **dict.fromkeys(("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"), "MV2_COMM_WORLD_SIZE"),
    **dict.fromkeys(("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"), "JSM_NAMESPACE_SIZE"),
    **dict.fromkeys(("HOROVOD_SIZE", "HOROVOD_RANK"), "HOROVOD_SIZE"),
    **dict.fromkeys(("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR"), ""),
    **dict.fromkeys(("MPI_LOCALNRANKS", "JOB_COMPLETION_INDEX", "FLUX_TASK_RANK", "PALS_RANKID"), ""),
}


IN_PLACE = "in place"  # the source of a launch that processes begin again in, without an end of theirs


@dataclass(frozen=True)
class Launch:
    """One rank's place in one launch of its worker group.

    `key` is equal on all ranks of the launch and new for every launch; None where nothing provides one.
    `launcher` names what started the ranks and would restart them; it tells a restart from a second start.
    `source` is "in place", "ray-train", "torch.distributed", "environment", "arguments" or "alone".
    """

    rank: int
    world_size: int
    key: str | None
    launcher: str
    source: str
    in_place: InPlace | None = None  # it replaces lost ranks and keeps the processes of the others
    since_s: float = 0.0  # on the monotonic clock: when the last phase of `in_place` ended
    may_be_loss: Callable[[BaseException], bool] | None = None  # after which its processes go on, in another launch


_given_launch: Launch | None = None


def give_launch(launch: Launch | None) -> None:
    """Name the launch that this process is in from now on; None: it is detected again."""
    global _given_launch
    _given_launch = launch


def detect_launch(
    rank: int | None = None,
    world_size: int | None = None,
    attempt: str | None = None,
    *,
    env: Mapping[str, str],
    timeout_s: float = 120.0,
) -> Launch:
    """Return this process's rank, world size and launch key.

    Collective where torch.distributed is initialised (and Ray Train is not in charge): rank 0 draws the key and
    broadcasts it, so every rank must call this within `timeout_s`.

    Args:
        rank: The caller's value; must agree with the detected one.
        world_size: The same for the number of ranks.
        attempt: An opaque string, equal on all ranks and new for every launch. It is the key where neither
            Ray Train nor torch.distributed provides one, and is not used otherwise. A single rank draws one.
        env: The process environment (RANK, WORLD_SIZE and the launchers' run ids are read).
        timeout_s: Deadline of the broadcast.

    Raises:
        ConfigError: one of several processes, and nothing says which rank it is; a value is out of range, or two
            sources contradict each other.
        PeerTimeout: not every rank called within `timeout_s`.
    """
    if attempt is not None and (not isinstance(attempt, str) or not attempt or len(attempt) > 256):
        raise ConfigError(
            f"attempt={attempt!r} must be a string of 1 to 256 characters, equal on all ranks and new for every launch",
            field="attempt",
        )
    found = _given_launch or _ray_train_launch() or _torch_place() or _environment_place(env)
    place = _agree(rank, world_size, found, env)
    if found is not None and found.source in (IN_PLACE, "ray-train"):
        return replace(found, rank=place.rank, world_size=place.world_size)
    launcher = launcher_name(env)
    if found is not None and found.source == "torch.distributed":
        key, launcher = _broadcast_key(place, launcher, timeout_s)
        return Launch(place.rank, place.world_size, key, launcher, found.source)
    # One rank agrees with itself: every connect() of it is a launch of its own, such as a notebook's cell run again.
    if attempt is None and place.world_size == 1:
        attempt = f"alone:{secrets.token_hex(_KEY_NBYTES)}"
    return Launch(place.rank, place.world_size, attempt, launcher, place.source)


def launcher_name(env: Mapping[str, str]) -> str:
    """Return a name for what started this process: a run id if the launcher sets one, else its parent process.

    "none" is torchrun's default run id, so it distinguishes runs no better than an unset one.
    """
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != "none":
        return f"torchelastic:{run_id}"
    if env.get("SLURM_JOB_ID"):
        return f"slurm:{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
    ray = _ray_if_initialised()
    if ray is not None:
        return f"ray-job:{ray.get_runtime_context().get_job_id()}"
    pid, parent = os.getpid(), os.getppid()
    return parent_name(
        f"{socket.gethostname()}:{read_boot_id()}:{os.stat('/proc/self/ns/pid').st_ino}",
        parent=(parent, process_start_time(parent) if parent > 1 else None),
        own=(pid, process_start_time(pid)),
    )


def parent_name(place: str, *, parent: tuple[int, int | None], own: tuple[int, int | None]) -> str:
    """Return a name for the parent, by pid and start, in one pid namespace of one boot of a machine.

    A parent of another pid namespace is pid 0, and pid 1 adopts every orphan: neither shows what started the
    process, which is then a launcher of its own. Such processes are each `docker exec` and `kubectl exec`.
    """
    pid, start = parent
    if pid <= 1 or start is None:
        return f"process:{place}:{own[0]}:{own[1]}"
    return f"parent:{place}:{pid}:{start}"


def _agree(rank: int | None, world_size: int | None, found: Launch | None, env: Mapping[str, str]) -> Launch:
    """Merge the caller's arguments with the detected values; a contradiction or a gap is a ConfigError."""
    given = {"rank": rank, "world_size": world_size}
    for field, value in given.items():
        value = check_given_whole(field, value)
        detected = None if found is None else getattr(found, field)
        if None not in (value, detected) and value != detected:
            raise ConfigError(
                f"{field}={value} was passed, but {_describe(found)} says {field}={detected}: "
                f"leave {field} out, or correct it",
                field=field,
                value=value,
                detected=detected,
            )
        given[field] = detected if value is None else value
    if given == {"rank": None, "world_size": None} and not _other_processes(env):
        log.warning("memstore: no launcher, rank= or world_size=: this process is rank 0 of 1")
        return Launch(0, 1, None, "", "alone")
    missing = [field for field, value in given.items() if value is None]
    final_rank, size = given["rank"], given["world_size"]
    if final_rank is None or size is None:
        shows = _other_processes(env)
        hint = f", and {shows} says that there may be several processes" if shows else ""
        raise ConfigError(
            f"{' and '.join(missing)} not known: no Ray Train worker, no initialised torch.distributed and no "
            f"RANK / WORLD_SIZE in the environment{hint}; pass rank= and world_size= (0 and 1 for a single process)",
            field=missing[0],
        )
    if size < 1 or not 0 <= final_rank < size:
        raise ConfigError(
            f"rank={final_rank} of world_size={size} is out of range: 0 <= rank < world_size must hold",
            field="rank",
            value=final_rank,
        )
    return Launch(final_rank, size, None, "", found.source if found is not None else "arguments")


def _other_processes(env: Mapping[str, str]) -> str:
    """Return what shows that this process may be one of several; "" for a plain script."""
    for name, count in _LAUNCHERS.items():
        if env.get(name) and env.get(count) != "1":
            return f"{name}={env[name]}"
    if multiprocessing.parent_process() is not None:
        return "a parent that uses multiprocessing"
    ray = _ray_if_initialised()
    return "a Ray worker" if ray is not None and ray.get_runtime_context().worker.mode == ray.WORKER_MODE else ""


def _describe(found: Launch | None) -> str:
    names = {
        "ray-train": "Ray Train's context",
        IN_PLACE: "the generation that this process is in",
        "environment": "the environment (RANK / WORLD_SIZE)",
    }
    return "" if found is None else names.get(found.source, found.source)


def _ray_if_initialised() -> Any:
    """Return the ray module if this process imported and initialised it, else None."""
    ray = sys.modules.get("ray")
    is_initialised = getattr(ray, "is_initialized", None)  # absent while ray is still being imported
    return ray if is_initialised is not None and is_initialised() else None


def _ray_train_launch() -> Launch | None:
    """Return the launch of a Ray Train worker, keyed by its placement group; None outside of one.

    Train makes a new worker group, and with it a new placement group, after every failure, so the id of the
    group is what R20 asks of a key.
    """
    ray = _ray_if_initialised()
    train = sys.modules.get("ray.train")
    if ray is None or train is None or not hasattr(train, "get_context"):
        return None
    group = ray.util.get_current_placement_group()
    if group is None:
        return None  # a driver, or an actor of the caller's own; asking Train's context would only warn
    try:
        context = train.get_context()
        rank, world_size = context.get_world_rank(), context.get_world_size()
        experiment = context.get_experiment_name()
    except (RuntimeError, DeprecationWarning):
        return None  # Train says so outside of a training function, and inside of a Tune one
    if not isinstance(rank, int) or not isinstance(world_size, int):
        return None
    launcher = f"ray-train:{ray.get_runtime_context().get_job_id()}:{experiment}"
    return Launch(rank, world_size, f"ray-pg:{group.id.hex()}", launcher, "ray-train")


def _torch_place() -> Launch | None:
    """Return rank and world size of an initialised torch.distributed; None if there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return Launch(dist.get_rank(), dist.get_world_size(), None, "", "torch.distributed")


def _environment_place(env: Mapping[str, str]) -> Launch | None:
    """Return RANK and WORLD_SIZE of the environment; None if neither is set, ConfigError if one is or is no number."""
    texts = {name: env[name] for name in ("RANK", "WORLD_SIZE") if env.get(name)}
    if not texts:
        return None
    numbers = {}
    for name in ("RANK", "WORLD_SIZE"):
        text = texts.get(name, "")
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(
                f"the environment has {' and '.join(f'{k}={v!r}' for k, v in texts.items())}: "
                "RANK and WORLD_SIZE must both be set, as numbers, or neither",
                field=name,
            )
        numbers[name] = int(text)
    return Launch(numbers["RANK"], numbers["WORLD_SIZE"], None, "", "environment")


def _broadcast_key(place: Launch, launcher: str, timeout_s: float) -> tuple[str, str]:
    """Return rank 0's random key and launcher name, sent through the default process group.

    A plain tensor of bytes: the group's own object broadcast would unpickle what it receives.
    """
    torch = sys.modules["torch"]
    dist = torch.distributed
    block = bytearray(_BLOCK_NBYTES)
    if place.rank == 0:
        block[:_KEY_NBYTES] = secrets.token_bytes(_KEY_NBYTES)
        name = launcher.encode()[: _BLOCK_NBYTES - _KEY_NBYTES]
        block[_KEY_NBYTES : _KEY_NBYTES + len(name)] = name
    # "cpu:gloo,cuda:nccl": a group without a CPU backend moves bytes of its accelerator only.
    devices = [part.partition(":")[0] for part in dist.distributed_c10d.get_backend_config().split(",")]
    tensor = torch.tensor(list(block), dtype=torch.uint8, device="cpu" if "cpu" in devices else devices[0])
    try:
        work = dist.broadcast(tensor, src=0, async_op=True)
        work.wait(timedelta(seconds=timeout_s))
        block = bytearray(tensor.cpu().tolist())
    except RuntimeError as exc:  # what every backend raises for a timeout or a lost rank
        raise PeerTimeout(
            f"rank {place.rank} of {place.world_size} got no launch key from rank 0 through torch.distributed within "
            f"{timeout_s:g} s: every rank must call memstore.connect() ({exc})",
            operation="launch key broadcast",
            limit_s=timeout_s,
        ) from exc
    key = bytes(block[:_KEY_NBYTES])
    return f"torch:{key.hex()}", bytes(block[_KEY_NBYTES:]).rstrip(b"\0").decode(errors="replace")
