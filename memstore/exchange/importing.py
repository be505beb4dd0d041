"""Make a new job out of files of stock libraries: a put step of rank files, a DCP step of all else (R18, R20).

One process plays all ranks of the job on its host, each on a thread; several, started with RANK and WORLD_SIZE on
several hosts, share them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from memstore.client.connect import connect
from memstore.client.reader import reader
from memstore.client.store import Store
from memstore.client.ticket import Ticket
from memstore.config import Config, check_whole
from memstore.core.wire.calls import AskStatus, RemoveJob
from memstore.errors import ConfigError, FencedError, IntegrityError, MemstoreError
from memstore.exchange.dcp_files import DcpSource
from memstore.exchange.dcp_shares import StepSource, put_share, shares_of
from memstore.exchange.exporting import NOTE_NAME
from memstore.exchange.put_tree import file_name
from memstore.exchange.safetensors_files import SafetensorsSource
from memstore.shell.codec.encode import plan_state
from memstore.shell.rank.admin_link import any_tool

log = logging.getLogger("memstore")
COMMIT_S = 600.0
REPAIR_S = 30.0  # longest wait for copies that the commit did not wait for
POLL_S = 0.2
Work = Callable[[Store, int], Ticket]


def import_job(
    job: str, folder: Path, format: str | None, *, config: Config, step: int | None = None, ranks: int | None = None,
    prefix: str = "", allow_pickle: bool = False, place: tuple[int, int] = (0, 1),
) -> dict[str, Any]:  # fmt: skip
    """Commit the files of a folder as one step of the new job; return the result.

    Args:
        format: "dcp", "torch" or "safetensors"; None: as the folder looks.
        step: None: as `memstore.json` in the folder says, else 0.
        ranks: World size of a DCP step, by default 1; a step of rank files has as many as there are files.
        prefix: With safetensors, put before every name.
        allow_pickle: With torch files, run their pickles (weights_only=False).
        place: Which of how many processes this is; each plays its share of the ranks.

    Raises:
        ConfigError: the job exists, or an argument makes no sense. IntegrityError, UnsupportedState: the files.
        CapacityError, CommitError: the store. The job is removed again then.
    """
    format = format or _format_of(folder)
    step = check_whole("step", _step_of(folder) if step is None else step)
    count, work = _torch_work(folder, step, ranks, allow_pickle) if format == "torch" else (
        _dcp_work(_source(format, folder, prefix), step, ranks or place[1])
    )  # fmt: skip
    if count < place[1]:
        raise ConfigError(f"{count} ranks cannot be shared by {place[1]} processes: give --ranks", field="ranks")
    _check_new(job, config)
    mine = [rank for rank in range(count) if rank * place[1] // count == place[0]]

    opened: list[int] = []

    def play(rank: int) -> Ticket:
        with connect(job, rank=rank, world_size=count, config=config) as store:
            # Durable storage may know it, or another import was quicker. A removed job goes on counting its attempts.
            if store.attempt != 1 and store.agree_on_step() is not None:
                raise _exists(job, config, store.config.durable)
            opened.append(rank)
            ticket = work(store, rank)
            return ticket.wait("committed" if store.config.durable is None else "durable", COMMIT_S)

    try:
        with ThreadPoolExecutor(len(mine)) as pool:
            tickets = list(pool.map(play, mine))
    except BaseException as error:
        if opened and not isinstance(error, FencedError):  # a fenced import has no job to remove: it is another's now
            with contextlib.suppress(MemstoreError), any_tool(config) as tool:
                tool.ask(RemoveJob(job=job, force=True))
        raise
    return {
        "job": job, "step": step, "format": format, "made_by": "put" if format == "torch" else "dcp",
        "world_size": count, "ranks": mine, "nbytes": sum(t.nbytes for t in tickets), "level": tickets[0].level,
        "degraded": _settled(job, step, config),
    }  # fmt: skip


def _format_of(folder: Path) -> str:
    for pattern, name in ((".metadata", "dcp"), (file_name(0), "torch"), ("*.safetensors", "safetensors")):
        if next(folder.glob(pattern), None) is not None:
            return name
    raise ConfigError(
        f"{folder} has no .metadata (DCP), no {file_name(0)} (torch) and no .safetensors file: is it the right folder?"
    )


def _step_of(folder: Path) -> int:
    try:
        return int(json.loads((folder / NOTE_NAME).read_text())["step"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise IntegrityError(f"{folder / NOTE_NAME} says no step: give --step ({error!r})") from error


def _check_new(job: str, config: Config) -> None:
    with any_tool(config) as tool:
        jobs = tool.ask(AskStatus()).jobs
    if any(row.job == job and row.attempt is not None for row in jobs):
        raise _exists(job, config)


def _settled(job: str, step: int, config: Config) -> str:
    """Return "" once the step has all its copies, or what it lacks after REPAIR_S, in which repair may add them (R29).

    There is no wait where each live host has a copy already.
    """
    deadline_s, has_said = time.monotonic() + REPAIR_S, False
    with any_tool(config) as tool, reader(job, config=config) as source:
        while True:
            info = next(info for info in source.steps() if info.step == step)
            lacks, hosts = info.degraded, [h for h in tool.ask(AskStatus()).hosts if h.status == "live"]
            if not lacks or len(hosts) <= info.copies or time.monotonic() > deadline_s:
                return lacks
            if not has_said:
                has_said = True
                wait = f"waiting up to {REPAIR_S:g} s for repair"
                log.warning("memstore %s: step %d is committed, but %s; %s", job, step, lacks, wait)
            time.sleep(POLL_S)


def _exists(job: str, config: Config, durable: str | None = None) -> ConfigError:
    """Return the error for a job that exists; `durable`: the storage of its steps, which its removal keeps."""
    remedy = config.commands(f"`memstore rm {job}` first") if durable is None else "with another --durable"
    where = "" if durable is None else f", its steps are in {durable}"
    return ConfigError(f"job {job!r} exists{where}: import under another name, or {remedy}", field="JOB")


def _source(format: str, folder: Path, prefix: str) -> StepSource:
    if prefix and format != "safetensors":
        raise ConfigError(f"prefix={prefix!r} is of format safetensors, not of {format}", field="prefix")
    return DcpSource(folder) if format == "dcp" else SafetensorsSource(folder, prefix)


def _dcp_work(source: StepSource, step: int, count: int) -> tuple[int, Work]:
    if not source.metadata.state_dict_metadata:
        raise IntegrityError("there is nothing in it to import")
    shares = shares_of(source.metadata, count)
    return count, lambda store, rank: put_share(store, step, source, shares)


def _torch_work(folder: Path, step: int, ranks: int | None, allow_pickle: bool) -> tuple[int, Work]:
    paths = sorted(folder.glob("rank_*.pt"))
    names = [path.name for path in paths]
    if not names or names != [file_name(rank) for rank in range(len(names))] or ranks not in (None, len(names)):
        wanted = f"{file_name(0)} to {file_name((ranks or max(len(names), 1)) - 1)}"
        raise ConfigError(f"{folder} has {names[:5]} ({len(names)}) where {wanted} belong: one file for every rank")
    for path in paths:  # before there is a job
        plan_state(_load(path, allow_pickle))
    return len(paths), lambda store, rank: store.put(step, _load(paths[rank], allow_pickle))


def _load(path: Path, allow_pickle: bool) -> Any:
    """Return a file's objects, its tensors still in the file until they are copied."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=not allow_pickle)
    except OSError as error:
        raise IntegrityError(
            f"{path} cannot be read: {error.strerror or error}. It must be a file of torch.save() that this user may "
            "read"
        ) from error
    except Exception as error:  # bad files raise nearly anything
        said = (str(error) or repr(error)).splitlines()[0]
        raise IntegrityError(
            f"{path} cannot be read: {said} If it holds more than tensors and plain values and "
            "comes from where you trust, use --allow-pickle"
        ) from error


def place_from_environment() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE and take them out of the environment: the job's ranks are others. (0, 1) without."""
    rank, count = os.environ.pop("RANK", "0"), os.environ.pop("WORLD_SIZE", "1")
    if not (rank.isdigit() and count.isdigit() and int(rank) < int(count)):
        raise ConfigError(f"RANK={rank!r} and WORLD_SIZE={count!r} are no place among processes", field="RANK")
    return int(rank), int(count)
