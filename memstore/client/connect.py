"""connect and reader: how a process finds its host's holder and joins a job (R4, R20)."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from memstore.admin.stores import others_here
from memstore.client.rehearsal import FirstRehearsal, target_of
from memstore.client.store import Store
from memstore.client.store_start import StoreStart, begin_start
from memstore.config import Config, check_config, check_given_whole, check_name, check_whole, plain
from memstore.core.wire.calls import GROUPS_MAX, InPlace, Join
from memstore.core.wire.rank_messages import Welcome
from memstore.core.wire.replies import Joined
from memstore.errors import ConfigError, JobBusyError, MemstoreError, PeerUnreachable, TransportError
from memstore.shell.arena.folder import arena_folder
from memstore.shell.arena.lock import process_start_time
from memstore.shell.identity import current_node_labels, holder_hosts, rank_host
from memstore.shell.native.extension import problem as native_problem
from memstore.shell.rank.admin_link import store_root
from memstore.shell.rank.collective import ask_with_all
from memstore.shell.rank.holder_link import HolderLink
from memstore.shell.rank.launch import REHEARSAL_VARIABLE, Launch, detect_launch
from memstore.shell.rank.sigterm import WATCH, check_sigterm

R = TypeVar("R")
log = logging.getLogger("memstore")
START_AFTER_S = 3.0  # a killed holder is back sooner; after this it is not restarted
RETRY_S = 0.1
BUSY_S = 2.0  # a holder looks every quarter of a second which of its ranks are dead; a loaded machine takes longer
DURABLE_OFF = "durable storage is off: losing every copy of a shard loses the run (durable=)"
LEAST_S = 0.1  # for the last part of a connect() whose time is over
_STORES: dict[int, weakref.ref[Store]] = {}  # of this process, by id; ranks may be threads that connect all at once


def holder_folder(config: Config, node_labels: Mapping[str, str] | None = None) -> Path:
    """Return the arena folder of this process's host (R4); ConfigError if its host is ambiguous.

    `node_labels` are those of this process's Ray node, where this process itself has not joined Ray.
    """
    host = rank_host(os.environ, store_root(config), current_node_labels() or node_labels)
    return arena_folder(config.arena_dir, store=config.store, host=host)


def open_link(
    config: Config, launch: Launch, *, address: str | None, nonce: str, job: str, deadline_s: float
) -> HolderLink:
    """Connect to this host's holder; start a store that is not back soon through Ray, beside, and wait for it (R3, R4).

    A holder that was here has START_AFTER_S to come back before Ray is asked; where none was, Ray is asked at once and
    the start has its end before the rank connects.
    """
    began_s = time.monotonic()
    limit_s = max(LEAST_S, deadline_s - began_s)
    is_new = not holder_hosts(store_root(config))
    start: StoreStart | None = None
    problem: MemstoreError | None = None
    is_over = False
    try:
        while True:
            if is_over or not is_new:
                try:
                    folder = holder_folder(config, start.node_labels if start is not None else None)
                    link = HolderLink(folder, nonce=nonce, job=job, rank=launch.rank)
                    if is_new and launch.rank == 0:
                        warn_of_new_store(config, job, start.where if start is not None else "")
                    return link
                except (TransportError, ConfigError) as exc:
                    problem = exc
            waited_s = time.monotonic() - began_s
            if waited_s > limit_s:
                raise _not_there(config, problem, start)
            may_create = launch.world_size == 1 and not isinstance(problem, ConfigError)
            if start is None and (is_new or waited_s > min(START_AFTER_S, limit_s / 2)):
                start = begin_start(config, address=address, may_create=may_create, limit_s=limit_s - waited_s)
            elif start is not None and not is_over and start.poll():
                if start.then is not None:
                    start.give_up()
                    start = start.then()
                    continue
                is_over = True
                _check_start(start, problem, is_new=is_new)
            time.sleep(RETRY_S)
    finally:
        if start is not None:
            start.give_up()


def warn_of_new_store(config: Config, job: str, where: str) -> None:
    """Say loudly that a store was begun, on which cluster, and which others are here: its name may be mistyped."""
    others = others_here(config, job)
    on = f" on {where}" if where else ""
    more = f"; {others}" if others else ""
    log.warning("memstore: store %r was not on this machine and has been started%s%s", config.store, on, more)


def _check_start(start: StoreStart, problem: MemstoreError | None, *, is_new: bool) -> None:
    """Raise the error of a start, unless waiting may help: a holder that was here may still come back."""
    if start.error is None:
        return
    error = type(start.error)(f"{start.where}: {start.error}") if start.where else start.error
    if is_new or isinstance(error, ConfigError):
        raise error
    if isinstance(problem, ConfigError):  # several holders are here, and Ray does not name ours either
        raise problem
    log.warning("memstore: the holder is not back, and Ray cannot start one: %s", error)


def _not_there(config: Config, problem: MemstoreError | None, start: StoreStart | None) -> PeerUnreachable:
    """Return the error of a rank that found no holder in time: the folder it watched, and how far Ray came."""
    asked = ""
    if start is not None:
        asked = f" {start.where or 'Ray'}: {start.error or start.doing}."
        asked = asked[:1] + asked[1].upper() + asked[2:]
    return PeerUnreachable(
        f"no holder of store {config.store!r} on this machine within {config.connect_timeout_s:g} s "
        f"(connect_timeout_s){f': {problem}' if problem is not None else ''}.{asked}"
    )


def _join(
    launch: Launch,
    job: str,
    nonce: str,
    config: Config,
    fresh: bool,
    takeover: bool,
    shard: tuple[int | None, int | None],
    groups: dict[str, int],
) -> Join:
    return Join(
        job=job,
        rank=launch.rank,
        world_size=launch.world_size,
        key=launch.key,
        launcher=launch.launcher,
        nonce=nonce,
        pid=os.getpid(),
        config=config.job_fields(),
        fresh=fresh,
        takeover=takeover,
        shard=shard[0],
        shards=shard[1],
        limit_s=0.0,
        in_place=_in_place_now(launch),
        groups=groups,
    )


def connect(
    job: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    attempt: str | None = None,
    address: str | None = None,
    config: Config | None = None,
    fresh: bool = False,
    takeover: bool = False,
    shard_rank: int | None = None,
    shard_count: int | None = None,
    rehearse: Callable[[], Any] | str | None = None,
    groups: Mapping[str, int] | None = None,
) -> Store:
    """Join a job as one rank; collective: returns when all ranks of the launch are there (R20).

    Args:
        job: Name of the training run; the same after every restart.
        rank: This process's rank; default from Ray Train, torch.distributed or RANK.
        world_size: Number of ranks; default from Ray Train, torch.distributed or WORLD_SIZE.
        attempt: A string equal on all ranks and new for every launch, where the launcher gives none.
        address: Ray cluster to start an absent store in, and no other; default: the joined one, else RAY_ADDRESS.
        config: Job fields that differ from the store's defaults, and store fields to find or start the store.
        fresh: Start over, once and not again in place: older steps are dropped after the first commit unless pinned.
        takeover: Fence a launch of the job that is still alive.
        shard_rank: Which shard this rank holds, from 0; equal numbers mean equal state. All ranks name one, or none.
        shard_count: How many shards there are: 1 for data parallelism; for HSDP the size of the FSDP group.
        rehearse: As `build` of Store.rehearse: rank 0 asks a fresh process, beside the training, whether it would take
            the first step that was put, and logs what would not come back. It builds the state once more in memory.
        groups: The groups that this rank is in, each of which may be lost as one, such as {"pp": 3} for a pipeline that
            is evicted whole: no copies of a shard all lie within one of them if it can be helped. The one that matters
            most comes first, after `failure_domains`. All ranks name the same ones, or none.

    Raises:
        ConfigError, JobBusyError, FencedError, GatherTimeout, PeerUnreachable: see docs/operate/troubleshooting.md.
    """
    config = check_config(config)
    check_name("job", job)
    shard_rank, shard_count = check_shard(shard_rank, shard_count)
    groups = check_groups(groups)
    rehearsal = _asked_rehearsal(job, rehearse, shard_count)
    deadline_s = time.monotonic() + config.connect_timeout_s  # of all that follows
    launch = detect_launch(rank, world_size, attempt, env=os.environ, timeout_s=config.connect_timeout_s)
    nonce = f"{os.getpid()}-{process_start_time(os.getpid()) or 0}-{job}-{launch.rank}"
    link = open_link(config, launch, address=address, nonce=nonce, job=job, deadline_s=deadline_s)
    try:
        config = fitted_to_store(config, link.welcome)
        request = _join(launch, job, nonce, config, fresh, takeover, (shard_rank, shard_count), groups)
        joined = _joined(link, request, deadline_s)
        if launch.rank == 0:
            _say_what_lacks(config, job)
        store = Store(link, launch, config, joined, job=job)
        store.first_rehearsal = rehearsal if launch.rank == 0 else None
        end_former(store)
        WATCH.watch(link, config.persist_on_sigterm_s)
        return store
    except BaseException:
        link.close()
        raise


def _asked_rehearsal(job: str, build: Callable[[], Any] | str | None, shard_count: int | None) -> FirstRehearsal | None:
    """Return the rehearsal that connect() is asked for, if any; ConfigError in a rehearsal's own process."""
    if REHEARSAL_VARIABLE in os.environ:
        raise ConfigError(
            f"this process rehearses {os.environ[REHEARSAL_VARIABLE]} and joins no job, else it would fence the one "
            f"that trains: call connect({job!r}) outside of build(), under `if __name__ == '__main__':`"
        )
    if build is None:
        return None
    if shard_count is not None:
        raise ConfigError("connect(rehearse=) takes no shared shards: use `memstore rehearse FILE.py:NAME`")
    return FirstRehearsal(job, target_of(build))


def _joined(link: HolderLink, request: Join, deadline_s: float) -> Joined:
    """Join; where another launch is alive ask again for BUSY_S: it may have died a moment ago, which is seen soon."""
    until_s = time.monotonic() + BUSY_S
    while True:
        limit_s = max(LEAST_S, deadline_s - time.monotonic())
        try:
            return ask_with_all(link, replace(request, limit_s=limit_s), limit_s=limit_s)
        except JobBusyError:
            if time.monotonic() > min(until_s, deadline_s):
                raise
            time.sleep(RETRY_S)


def _say_what_lacks(config: Config, job: str) -> None:
    """Log what a job may do without, and had better not."""
    for words in (DURABLE_OFF if config.durable is None else "", native_problem()):
        if words:
            log.warning("memstore %s: %s", job, words)


def _in_place_now(launch: Launch) -> InPlace | None:
    """Return what this rank knows of a recovery in place, with the time until now."""
    in_place = launch.in_place
    return in_place and replace(in_place, build_s=time.monotonic() - launch.since_s)


def newest_step_here() -> int | None:
    """Return the newest step that a Store of this process has put or restored; None if there is none."""
    stores = [known() for known in list(_STORES.values())]
    newest = max((store.puts.steps.last for store in stores if store is not None), default=-1)
    return newest if newest >= 0 else None


def end_former(store: Store) -> None:
    """Fence and close what this process opened before as this rank: holders speak to its newest link alone (D133)."""
    link = store.puts.link
    for known in list(_STORES.values()):  # in one step, as no walk through a WeakSet is
        former = known()
        if former is None or (former.puts.link.folder, former.puts.link.nonce) != (link.folder, link.nonce):
            continue
        if former is not store and former.attempt <= store.attempt:
            former.puts.link.fence_by(store.attempt)
            former.close()
    number = id(store)
    _STORES[number] = weakref.ref(store, lambda _: _STORES.pop(number, None))


def check_shard(shard_rank: int | None, shard_count: int | None) -> tuple[int | None, int | None]:
    """Return both as plain ints; ConfigError unless `shard_rank` is from 0 to `shard_count` - 1, or none is given."""
    rank, count = check_given_whole("shard_rank", shard_rank), check_given_whole("shard_count", shard_count)
    if (rank is None) != (count is None) or (rank is not None and count is not None and rank >= count):
        raise ConfigError(
            f"shard_rank={shard_rank!r} of shard_count={shard_count!r}: name both, shard_rank from 0 to "
            "shard_count - 1, such as 0 of 1 where every rank holds the same",
            field="shard_rank",
            value=repr(shard_rank),
        )
    return rank, count


def check_groups(groups: Mapping[str, int] | None) -> dict[str, int]:
    """Return the groups as plain ints by name; ConfigError for what cannot name groups of ranks."""
    if groups is None:
        return {}
    if not isinstance(groups, Mapping) or len(groups) > GROUPS_MAX:
        said = f"{len(groups)} kinds" if isinstance(groups, Mapping) else repr(groups)[:40]
        raise ConfigError(
            f"groups={said}: name at most {GROUPS_MAX} kinds of groups and this rank's number in each, such as "
            '{"pp": 3}; only those that are lost as one count',
            field="groups",
            value=said,
        )
    return {check_name("groups", name): check_whole(f"groups[{name!r}]", number) for name, number in groups.items()}


def fitted_to_store(config: Config, welcome: Welcome) -> Config:
    """Return the config with the store's defaults for its missing fields; ConfigError if that cannot work here."""
    check_store_fields(config, welcome.store)
    config = config.with_defaults(welcome.job_defaults)
    check_sigterm(config.persist_on_sigterm_s, config.durable)
    return config


def check_store_fields(config: Config, running: dict[str, Any]) -> None:
    """Raise ConfigError if the caller set a store field to something else than the running store has (R5)."""
    default, mine = Config().store_fields(), config.store_fields()
    running = {name: plain(value) for name, value in running.items()}
    differing = [
        f"{name}={mine[name]!r} (running: {running[name]!r})"
        for name in mine
        if mine[name] != default[name] and mine[name] != running.get(name) and name not in ("arena_bytes", "port")
    ]
    if differing:
        raise ConfigError(
            f"store {config.store!r} runs with other settings: {', '.join(differing)}. Use the running ones, another "
            f"store name, or stop it first: {config.commands('`memstore down`')}"
        )
