"""`memstore upgrade`: a store's holders are restarted with what is installed, host by host, then the controller (R40).

Whether that can be is decided by `core/format/releases.py` before anything is touched. Each host's arena stays, its
ranks wait for its next holder, and the next host's turn is once no job lacks more copies for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memstore.admin.cluster import ask, running_controller
from memstore.config import Config
from memstore.core.format.releases import Build, hosts_to_restart, refused_upgrade
from memstore.core.wire.calls import AskStatus
from memstore.core.wire.replies import Status
from memstore.errors import ConfigError, MemstoreError, PeerTimeout
from memstore.shell.on_ray.actors import RayMembership, live_nodes, this_build

CONTROLLER = "the controller's host"
LOOK_S = 60.0  # for all hosts: each begins a process and imports what is installed
POLL_S = 0.2
RESTART_S = 240.0  # another start ends, a process begins, another closes, the arena is digested


@dataclass(frozen=True, slots=True)
class UpgradePlan:
    """What runs, what is installed, and what an upgrade would restart; `refusal` is why it must not begin, or ""."""

    running: Mapping[str, Build]
    installed: Mapping[str, Build]
    hosts: list[str]
    has_controller: bool
    refusal: str


def plan_upgrade(config: Config, *, chosen: tuple[str, ...] = (), is_restart: bool = False) -> UpgradePlan:
    """Compare what runs with what is installed on each host; needs a joined Ray, and touches nothing.

    Raises:
        ConfigError: The store does not run there, or has no such host. MemstoreError: A host does not answer.
    """
    actor = running_controller(config)
    seen, alive = ray.get(actor.describe.remote(), timeout=LOOK_S), {node["NodeID"] for node in live_nodes()}
    records = {h: row for h, row in RayMembership(config.store).hosts().items() if row.get("node") in alive}
    if unknown := sorted({*chosen} - {*records}):
        raise ConfigError(f"no host {', '.join(unknown)} runs a holder: {', '.join(sorted(records))} do")
    running = {host: _build(row) for host, row in records.items()} | {CONTROLLER: _build(seen)}
    nodes = {host: str(row["node"]) for host, row in records.items()} | {CONTROLLER: str(seen["node"])}
    installed = _installed(nodes)
    wanted = hosts_to_restart(running, installed, chosen=chosen, is_restart=is_restart)
    refusal = config.commands(refused_upgrade(running, installed))
    return UpgradePlan(running, installed, [h for h in wanted if h != CONTROLLER], CONTROLLER in wanted, refusal)


def _build(row: Mapping[str, Any]) -> Build:
    return Build(row["version"], row["formats"]) if "formats" in row else Build()


def _installed(nodes: Mapping[str, str]) -> dict[str, Build]:
    """Return what is installed on each node, as a new process there imports it."""
    look = ray.remote(num_cpus=0)(this_build)
    calls = {
        host: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for host, node in nodes.items()
    }
    until_s, found = time.monotonic() + LOOK_S, {}
    for host, call in calls.items():
        try:
            found[host] = _build(ray.get(call, timeout=max(0.1, until_s - time.monotonic())))
        except Exception as error:
            why = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
            raise MemstoreError(f"{host} does not say which memstore is installed there: {why}") from error
    return found


def upgrade(config: Config, plan: UpgradePlan, *, timeout_s: float, say: Callable[[str], None]) -> None:
    """Restart what the plan names, each once all hosts are live and no job lacks more copies than at the beginning.

    Raises:
        ConfigError: The plan was refused. PeerTimeout: a turn took longer than `timeout_s`; says what was waited for.
            What follows it was not restarted, and another call goes on there.
    """
    if plan.refusal:
        raise ConfigError(plan.refusal)
    actor = running_controller(config)
    before = {job.job: job.newest.missing_copies for job in ask(AskStatus(), config=config).jobs if job.newest}
    turns = [*plan.hosts, *([CONTROLLER] if plan.has_controller else [])]
    hosts = [host for host in plan.running if host != CONTROLLER]
    for number, turn in enumerate([*turns, ""]):
        left = ", ".join(turns[number:])
        _wait(partial(_awaited, config, hosts, before), timeout_s, left)
        began_s = time.monotonic()
        if turn == CONTROLLER:
            pid = ray.get(actor.describe.remote(), timeout=RESTART_S)["pid"]
            ray.kill(actor, no_restart=False)
            _wait(partial(_without_controller, actor, pid), timeout_s, left)
        elif turn:
            try:
                ray.get(actor.restart_holder.remote(turn), timeout=RESTART_S)
            except ray.exceptions.RayError as error:
                why = str(getattr(error, "cause", None) or error).strip().splitlines()[-1]
                raise MemstoreError(f"the holder of {turn} was not replaced: {why}. Not restarted: {left}") from error
        if turn:
            say(f"{turn}: memstore {plan.installed[turn].version} runs, after {time.monotonic() - began_s:.1f} s")


def _wait(awaited: Callable[[], str], timeout_s: float, left: str) -> None:
    """Poll until nothing is awaited."""
    until_s = time.monotonic() + timeout_s
    while words := awaited():
        if time.monotonic() > until_s:
            rest = f"; not restarted yet: {left}. Call it again and it goes on there" if left else ""
            raise PeerTimeout(
                f"after {timeout_s:g} s {words}{rest}", operation="upgrade", waited_s=timeout_s, limit_s=timeout_s
            )
        time.sleep(POLL_S)


def _awaited(config: Config, hosts: list[str], before: Mapping[str, int]) -> str:
    try:
        return awaited(ask(AskStatus(), config=config), hosts, before)
    except MemstoreError as error:
        return f"the controller does not answer: {error}"


def awaited(status: Status, hosts: list[str], before: Mapping[str, int]) -> str:
    """Return what is not as it was before a host was restarted; "" if all of it is.

    Args:
        hosts: Those that are to run.
        before: The copies that each job lacked at the beginning.
    """
    rows = {row.host: row for row in status.hosts}
    for host in hosts:
        if host not in rows or rows[host].status != "live":
            return f"host {host} is {rows[host].status if host in rows else 'not there'}"
    for job in status.jobs:
        if job.newest is None:
            continue
        if job.newest.is_restoring:
            return f"job {job.job} is being restored"
        if job.newest.missing_copies > before.get(job.job, 0):
            return f"job {job.job} lacks {job.newest.missing_copies} copies of step {job.newest.committed_step}"
    return ""


def _without_controller(actor: Any, pid: int) -> str:
    """Return what the next controller lacks before it decides; "" if nothing."""
    try:
        seen = ray.get(actor.describe.remote(), timeout=POLL_S)
    except (ray.exceptions.RayError, TimeoutError):
        return "the controller has not begun again"
    if seen["pid"] == pid or not seen["is_serving"]:
        return "the controller is not serving yet"
    missing = [host for host in seen["hosts"].values() if host not in seen["connected"]]
    unknown = {*seen["nodes"]} - {*seen["hosts"], *seen["errors"]}  # it has not found, or started, their holders yet
    missing += [f"the holder of Ray node {node[:12]}" for node in unknown]
    return f"the controller awaits {', '.join(sorted(missing))}" if missing else ""
