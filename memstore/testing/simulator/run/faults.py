"""How each fault of a scenario is done, and whether a strict scenario may do it now."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from memstore.core.cluster.job import TRUSTED
from memstore.core.holder import lost_files
from memstore.core.holder.lost_files import FileLoss
from memstore.errors import CapacityError
from memstore.testing.faults.catalogue import KINDS, Fault, plays
from memstore.testing.simulator.host.holder import SimHolder
from memstore.testing.simulator.rank.rank import SimRank
from memstore.testing.simulator.run.cluster import SimCluster
from memstore.testing.simulator.world.virtual_time import Endless, Thread
from memstore.testing.simulator.world.world import CallFailed
from recovery.inventory import StepId

# -- taken files --------------------------------------------------------------------------------------
# Files of a host that go while its processes live: the arena's, or all names of its folder (R8, R35).
#
# A memory's list of slots stands for the arena's file. A process that has mapped it keeps that list, and a new file
# is another list.


LOOK_S = 0.3


def take_files(cluster: SimCluster, fault: Fault, names: list[str]) -> None:
    """Take the files of hosts away, in a strict scenario of no more hosts than the promise allows."""
    for name in names[: cluster.scenario.replicas - 1] if cluster.scenario.is_strict else names:
        if fault.kind == "replace-arena":
            cluster.kill_holder(name)
            cluster.memories[name].lose_folder()
        else:
            cluster.memories[name].is_removed = True
            cluster.at(LOOK_S, lambda name=name: _look(cluster, name, FileLoss()))  # type: ignore[misc]


def _look(cluster: SimCluster, name: str, loss: FileLoss) -> None:
    """Let a holder look at its files, until it has ended."""
    holder = cluster.holders.get(name)
    if cluster.memories[name].is_removed and holder is not None:
        if holder.is_serving:
            lost_files.look(SimFiles(cluster, name), loss)
        cluster.at(LOOK_S, lambda: _look(cluster, name, loss))


class SimFiles:
    """The files of a simulated holder's folder."""

    def __init__(self, cluster: SimCluster, name: str) -> None:
        self.cluster, self.name, self.memory = cluster, name, cluster.memories[name]

    def missing(self) -> list[str]:
        """Return what is gone."""
        return ["the folder"] if self.memory.is_removed else []

    def prepare(self) -> None:
        """Have room for all of it, unless a fault has filled the file system."""
        if self.memory.is_full:
            raise CapacityError("no room to write the folder again")

    def other_holder(self, error: Exception) -> bool:
        """Return False: a host has one folder here, and one holder."""
        return False

    def say_loss(self, names: str) -> None:
        """Note what is gone."""
        self.cluster.note(f"{self.name}: {names} removed")

    def last_word(self) -> None:
        """Do nothing: connections end with the holder."""

    def write_again(self) -> None:
        """Write again what the holder has open."""
        self.memory.write_again()

    def end(self, why: str) -> None:
        """End the holder; another one begins. What is not written again goes with it, and no fault is to blame."""
        if self.memory.is_removed:
            self.memory.wipe()
        self.cluster.note(f"{self.name}: {why}")
        self.cluster.kill_holder(self.name)


# -- people -------------------------------------------------------------------------------------------
# What people and readers ask for in the middle of a run: pins and leases, and their end.


ASKED = ("pin-step", "trust-step", "unpin-step", "lease-step")
STEPS_MAX = 4  # one of so many newest steps is pinned


class People:
    """The requests of one simulation, each asked through a living rank."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster, self.promises = cluster, cluster.checker.promises
        self.count = 0

    def ask(self, fault: Fault) -> None:
        """Do one of `KINDS`, if there is a rank to ask through and something to ask for."""
        living = [r for r in self.cluster.ranks if not r.is_dead and r.holder is not None]
        if not living:
            return
        rank, number = living[fault.rank % len(living)], fault.count - 1
        pins = self.promises.pins
        committed = sorted(self.cluster.checker.observed.acked, reverse=True)
        self.count += 1
        if fault.kind == "pin-step" and committed:
            self._pin(rank, committed[number % min(STEPS_MAX, len(committed))], f"p{self.count}")
        elif fault.kind == "trust-step" and committed:
            self._pin(rank, committed[number % min(STEPS_MAX, len(committed))], TRUSTED)
        elif fault.kind == "lease-step" and committed:
            self._lease(rank, f"l{self.count}", fault.for_s)
        elif fault.kind == "unpin-step" and (names := sorted(pins.keys() - {TRUSTED})):
            name = names[number % len(names)]
            del pins[name]
            self._ask(rank, "unpin", lambda _: None, name=name)

    def _pin(self, rank: SimRank, step: StepId, name: str) -> None:
        self._ask(
            rank,
            "pin",
            lambda answer: self.promises.pinned(name, StepId(answer.attempt, answer.step)),
            step=step.step,
            of_attempt=step.attempt,
            name=name,
        )

    def _lease(self, rank: SimRank, name: str, for_s: float) -> None:
        """Lease the newest step, and end that, unless the rank's process or link does it first."""
        self._ask(rank, "lease_step", lambda _: None, step=None, lease=name, limit_s=600.0)
        if for_s:
            self.cluster.at(for_s, lambda: self._ask(rank, "end_lease", lambda _: None, lease=name))

    def _ask(self, rank: SimRank, verb: str, done: Callable[[Any], object], **body: Any) -> None:
        call_id = rank.ask(verb, **body)

        def wait() -> Thread:
            yield lambda: call_id in rank.replies or rank.is_dead
            answer = rank.replies.pop(call_id, None)
            what = "no answer" if answer is None else answer.error if isinstance(answer, CallFailed) else "done"
            self.cluster.note(f"rank {rank.rank}: {verb} {body.get('name') or body}: {what}")
            if what == "done":
                done(answer)

        self.cluster.spawn(wait(), Endless())


# -- faults -------------------------------------------------------------------------------------------


STEPS_S = (2.0, 60.0, 3600.0, 86_400.0)
LATE_S = 2.0  # at least so much later than the others a host comes back, where all were ended
LAUNCH_LATER_S = 2.0
SHORT_S = 4.0  # below dead_after_s and recovery_grace_s: no host is given up for this
AWAKE_S = 6.0  # for so long a process that was replaced goes on once it is awake
LINK_AWAY_S = 0.2  # a process connects again at once, most often before its holder knows that the link broke
Inject = Callable[[SimCluster, Fault], None]
INJECT: dict[str, Inject] = {}
fault = functools.partial(plays, table=INJECT)


class SimFaults:
    """The faults of one simulation."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster, self.people = cluster, People(cluster)

    def inject(self, each: Fault) -> None:
        """Do one fault, unless it would go beyond the promise of a strict scenario."""
        cluster, injected = self.cluster, self.cluster.checker.observed.injected
        is_grave = KINDS[each.kind].is_grave or (each.for_s > SHORT_S and each.kind not in ASKED)
        if cluster.scenario.is_strict and is_grave and not cluster.is_quiet():
            cluster.note(f"fault {each.kind} left out: the store is not whole now")
            return
        cluster.note(f"fault {each.text().strip()}")
        injected[each.kind] = injected.get(each.kind, 0) + 1
        if each.kind in ASKED:
            _blamed(cluster, each.kind, lambda: self.people.ask(each))
        else:
            _blamed(cluster, each.kind, lambda: INJECT[each.kind](cluster, each))


def _blamed(cluster: SimCluster, kind: str, work: Callable[[], object]) -> None:
    """Do something whose losses are the fault's doing, not the store's."""
    with cluster.checker.blaming(kind):
        work()


def _names(cluster: SimCluster, each: Fault) -> list[str]:
    names = sorted(cluster.holders)
    return sorted({names[i % len(names)] for i in each.hosts})


def _holder(cluster: SimCluster, each: Fault) -> SimHolder:
    return cluster.holders[_names(cluster, each)[0]]


def _rank(cluster: SimCluster, each: Fault) -> SimRank | None:
    living = [r for r in cluster.ranks if not r.is_dead]
    return living[each.rank % len(living)] if living else None


@fault("kill-rank")
def _kill_rank(cluster: SimCluster, each: Fault) -> None:
    rank = _rank(cluster, each)
    if rank is not None:
        cluster.kill_rank(rank, "killed")


@fault("leave-rank")
def _leave_rank(cluster: SimCluster, each: Fault) -> None:
    """Let the launcher lose sight of a rank: it starts another while that one trains on (R20, R21)."""
    rank = _rank(cluster, each)
    if rank is not None:
        rank.is_left = True
        cluster.at(each.for_s, lambda: cluster.kill_rank(rank, "found at last"))


@fault("zombie-rank")
def _zombie_rank(cluster: SimCluster, each: Fault) -> None:
    """Stop a process out of its launcher's reach: it is replaced, and wakes later, wherever it was (R21)."""
    rank = _rank(cluster, each)
    if rank is not None:
        rank.is_frozen = rank.is_left = True
        cluster.at(each.for_s, lambda: cluster.thaw_rank(rank))
        cluster.at(each.for_s + AWAKE_S, lambda: cluster.kill_rank(rank, "found at last"))


@fault("lose-two")
def _lose_two(cluster: SimCluster, each: Fault) -> None:
    """End the processes of two ranks at once."""
    for _ in range(2):
        _kill_rank(cluster, each)


@fault("lose-both")
def _lose_both(cluster: SimCluster, each: Fault) -> None:
    """End a rank and the holder of its host at once, as the kernel does for want of memory."""
    rank = _rank(cluster, each)
    if rank is not None:
        cluster.kill_rank(rank, "killed")
        cluster.kill_holder(rank.host_id)


@fault("die-in-recovery")
def _die_in_recovery(cluster: SimCluster, each: Fault) -> None:
    """While the next lost rank is replaced, end one process after the other: replacements or survivors."""
    for number in range(min(each.count, 3)):
        at_s = (number + 0.5) * min(each.for_s, SHORT_S)
        who = replace(each, rank=each.rank + number)
        cluster.in_recovery.append(lambda at_s=at_s, who=who: cluster.at(at_s, lambda: _kill_rank(cluster, who)))  # type: ignore[misc]


@fault("controller-in-recovery")
def _controller_in_recovery(cluster: SimCluster, each: Fault) -> None:
    """End the controller while the next lost rank is replaced."""
    at_s, back_s = 0.4 * each.count, min(each.for_s, 3.0)
    cluster.in_recovery.append(lambda: cluster.at(at_s, lambda: cluster.crash_controller(restart_after_s=back_s)))


@fault("holder-in-recovery")
def _holder_in_recovery(cluster: SimCluster, each: Fault) -> None:
    """End a holder, or freeze it, while the next lost rank is replaced."""
    work = functools.partial(_kill_holder if each.rank % 2 else _freeze_holder, cluster, replace(each, for_s=SHORT_S))
    cluster.in_recovery.append(lambda: cluster.at(0.4 * each.count, work))


@fault("late-launch")
def _late_launch(cluster: SimCluster, each: Fault) -> None:
    """Let the next lost rank be replaced late."""
    cluster.in_recovery.append(lambda: setattr(cluster, "late_launch_s", each.for_s))


@fault("break-link")
def _break_link(cluster: SimCluster, each: Fault) -> None:
    """Break a rank's link to its living holder; what is on its way is lost, and the rank connects again (R8)."""
    rank = _rank(cluster, each)
    if rank is not None:
        rank.link = rank.holder = None
        cluster.at(LINK_AWAY_S, lambda: cluster.connect_rank(rank))


@fault("late-hello")
def _late_hello(cluster: SimCluster, each: Fault) -> None:
    """Let a holder serve a link only after its process has given it up and has connected again (R8)."""
    rank = _rank(cluster, each)
    if rank is not None:
        _connect_again(cluster, rank, late_s=LINK_AWAY_S + each.for_s)
        cluster.at(LINK_AWAY_S, lambda: _connect_again(cluster, rank))


def _connect_again(cluster: SimCluster, rank: SimRank, late_s: float = 0.0) -> None:
    if not rank.is_dead:
        rank.link = rank.holder = None
        cluster.holders[rank.host_id].late_s = late_s
        cluster.connect_rank(rank)


@fault("put-raises")
def _put_raises(cluster: SimCluster, each: Fault) -> None:
    """Let puts of a rank raise before anything is copied; it trains on, and no message says so (R12)."""
    rank = _rank(cluster, each)
    if rank is not None:
        rank.raises = each.count


@fault("load-fails")
def _load_fails(cluster: SimCluster, each: Fault) -> None:
    """End a rank; in the launch that follows one of its ranks cannot load what its get brings, and all try to put."""
    cluster.failing_loads += 1
    _kill_rank(cluster, each)


@fault("differ")
def _differ(cluster: SimCluster, each: Fault) -> None:
    """Let a writer put other bytes than the ranks with the same shard, for some steps (R34)."""
    rank = _rank(cluster, each)
    if rank is not None:
        rank.differs = each.count


@fault("freeze-rank")
def _freeze_rank(cluster: SimCluster, each: Fault) -> None:
    rank = _rank(cluster, each)
    if rank is not None:
        rank.is_frozen = True
        cluster.at(each.for_s, lambda: cluster.thaw_rank(rank))


@fault("kill-holder")
def _kill_holder(cluster: SimCluster, each: Fault) -> None:
    cluster.kill_holder(_holder(cluster, each).host_id)


@fault("crash-holder-at")
def _crash_holder_at(cluster: SimCluster, each: Fault) -> None:
    _holder(cluster, each).memory.crash_in = each.count


@fault("freeze-holder")
def _freeze_holder(cluster: SimCluster, each: Fault) -> None:
    holder = _holder(cluster, each)
    holder.is_frozen = True
    cluster.at(each.for_s, lambda: cluster.thaw_holder(holder))


@fault("replace-holder")
def _replace_holder(cluster: SimCluster, each: Fault) -> None:
    """Freeze a holder, which is then killed by the successor that waits for its lock (R2)."""
    holder = _holder(cluster, each)
    holder.is_frozen = True
    cluster.at(min(each.for_s, 2.0), lambda: cluster.replace_holder(holder))


@fault("kill-host")
def _kill_host(cluster: SimCluster, each: Fault) -> None:
    for name in _names(cluster, each)[: cluster.scenario.replicas - 1]:
        cluster.kill_host(name, back_after_s=each.for_s)


@fault("lose-host")
def _lose_host(cluster: SimCluster, each: Fault) -> None:
    """Lose hosts for good, while more are left than a shard has copies; other machines join later, or none.

    The next launch waits as long, or for nothing: repair comes before it, or beside its first puts.
    """
    cluster.launches_from_s = max(cluster.launches_from_s, cluster.now + each.for_s * (each.rank % 2))
    for name in _names(cluster, each)[: cluster.scenario.replicas - 1]:
        if len(cluster.holders) <= cluster.scenario.replicas:
            return
        labels = cluster.holders[name].info.labels
        cluster.lose_host(name)
        if each.count % 2:
            cluster.at(each.for_s, lambda labels=labels: cluster.add_host(f"h{len(cluster.memories)}", labels))  # type: ignore[misc]


@fault("preempt")
def _preempt(cluster: SimCluster, each: Fault) -> None:
    """Announce the end of a host, end it at that moment, and bring another of its name later (R29).

    A strict scenario spares the host if its end would be beyond the promise.
    """
    name = _names(cluster, each)[0]
    cluster.drains[name] = cluster.now + each.for_s

    def end() -> None:
        if cluster.drains.pop(name, None) is not None and (not cluster.scenario.is_strict or cluster.is_quiet()):
            _blamed(cluster, each.kind, lambda: cluster.kill_host(name, back_after_s=2.0))

    cluster.at(each.for_s, end)


def _rack(cluster: SimCluster, each: Fault) -> list[str]:
    rack = _holder(cluster, each).info.labels.get("rack")
    if rack is None:
        return _names(cluster, each)[: cluster.scenario.replicas - 1]
    if cluster.scenario.is_strict and cluster.scenario.replicas > 2:
        return []  # with three copies over two racks a rack may hold two of them
    return [h for h, x in sorted(cluster.holders.items()) if x.info.labels.get("rack") == rack]


@fault("kill-rack")
def _kill_rack(cluster: SimCluster, each: Fault) -> None:
    for name in _rack(cluster, each):
        cluster.kill_host(name, back_after_s=each.for_s)


@fault("wear-rack")
def _wear_rack(cluster: SimCluster, each: Fault) -> None:
    """Lose the hosts of a rack one after another, each replaced by a blank one before the next goes (R29)."""
    # Until then a second grave fault would be beyond the promise.
    cluster.wears_until_s = cluster.now + len(cluster.holders) * each.for_s
    for n, name in enumerate(_rack(cluster, each)):
        end = functools.partial(cluster.kill_host, name, back_after_s=min(0.2 * each.count, each.for_s))
        cluster.at(n * each.for_s, lambda end=end: _blamed(cluster, each.kind, end))  # type: ignore[misc]


@fault("end-job")
def _end_job(cluster: SimCluster, each: Fault) -> None:
    """End every rank; no launch follows before the store had time to be whole again (R29)."""
    cluster.is_job_over = True
    for rank in [*cluster.ranks, *cluster.former]:
        cluster.kill_rank(rank, "the job was ended")


@fault("flap-host")
def _flap_host(cluster: SimCluster, each: Fault) -> None:
    name = _names(cluster, each)[0]
    cluster.kill_host(name, back_after_s=0.5)
    for n in range(1, 4):
        cluster.at(3.0 * n, lambda: cluster.flap(name))


@fault("reboot-all")
def _reboot_all(cluster: SimCluster, each: Fault) -> None:
    """End every process of Ray at once; one host comes up late (R24)."""
    for controller in cluster.controllers:
        controller.stop()
    for rank in [*cluster.ranks, *cluster.former]:
        cluster.kill_rank(rank, "Ray was restarted")
    late = _names(cluster, each)[0]
    for name in sorted(cluster.holders):
        cluster.kill_holder(name, back_after_s=min(each.for_s, SHORT_S) + LATE_S if name == late else 0.5)
    cluster.at(0.5, cluster.start_controller)


@fault("partition")
def _partition(cluster: SimCluster, each: Fault) -> None:
    left = _names(cluster, each)
    if cluster.scenario.is_strict and each.for_s > SHORT_S:
        left = left[: cluster.scenario.replicas - 1]
    right = [h for h in sorted(cluster.holders) if h not in left]
    cluster.network.split(left, [*right, *(c.name for c in cluster.controllers)])
    cluster.at(each.for_s, cluster.network.heal)


@fault("one-way")
def _one_way(cluster: SimCluster, each: Fault) -> None:
    name = _names(cluster, each)[0]
    others = [*(h for h in cluster.holders if h != name), *(c.name for c in cluster.controllers)]
    cluster.network.cut.update((name, o) if each.count % 2 else (o, name) for o in others)
    cluster.at(each.for_s, cluster.network.heal)


@fault("slow-link")
def _slow_link(cluster: SimCluster, each: Fault) -> None:
    cluster.network.slow[_names(cluster, each)[0]] = 10.0 * each.count
    cluster.at(each.for_s, cluster.network.heal)


@fault("silent-peers")
def _silent_peers(cluster: SimCluster, each: Fault) -> None:
    """Let requests between hosts and their peers wait for an answer, while the controller receives all reports."""
    names = _names(cluster, each)
    cluster.network.silent.update(names)
    cluster.at(each.for_s, lambda: cluster.network.silent.difference_update(names))


@fault("flip-in-transit")
def _flip_in_transit(cluster: SimCluster, each: Fault) -> None:
    cluster.network.flips += each.count


@fault("reset-in-transit")
def _reset_in_transit(cluster: SimCluster, each: Fault) -> None:
    cluster.network.resets += each.count


@fault("double-reports")
def _double_reports(cluster: SimCluster, each: Fault) -> None:
    cluster.network.doubles += each.count


@fault("flip-at-rest")
def _flip_at_rest(cluster: SimCluster, each: Fault) -> None:
    memory = _holder(cluster, each).memory
    sealed = [n for n, h in enumerate(memory.headers) if int(h.state) == 3 and n not in memory.spoilt]
    for number in sealed[each.rank :][: each.count]:
        memory.spoil(number, cluster.now)


@fault("rot-manifest")
def _rot_manifest(cluster: SimCluster, each: Fault) -> None:
    """Flip bits in the files of manifests under a living holder; the slots alone do not say whose chunks they hold."""
    memory = _holder(cluster, each).memory
    memory.rotten.update(sorted(memory.manifests)[-each.count :])
    memory.version += 1


@fault("kill-controller")
def _kill_controller(cluster: SimCluster, each: Fault) -> None:
    cluster.crash_controller(restart_after_s=min(each.for_s, 3.0))


@fault("freeze-controller")
def _freeze_controller(cluster: SimCluster, each: Fault) -> None:
    """Freeze a controller and start a successor; then the old one wakes and must find out (R17)."""
    controller = cluster.controllers[-1]
    controller.is_frozen = True
    cluster.at(each.for_s, lambda: setattr(controller, "is_frozen", False))
    cluster.at(min(each.for_s, 2.0), cluster.start_controller)


@fault("second-controller")
def _second_controller(cluster: SimCluster, each: Fault) -> None:
    """Start a new controller, cut off from some hosts, while the old one runs (R17)."""
    old = cluster.controllers[-1].name
    left = _names(cluster, each)
    cluster.start_controller()
    if each.for_s <= SHORT_S:
        cluster.network.split(left, [cluster.controllers[-1].name])
        cluster.network.split([h for h in cluster.holders if h not in left], [old])
        cluster.at(each.for_s, cluster.network.heal)


@fault("kv-away")
def _kv_away(cluster: SimCluster, each: Fault) -> None:
    cluster.has_kv = False
    cluster.at(each.for_s, lambda: setattr(cluster, "has_kv", True))


@fault("memory-full")
def _memory_full(cluster: SimCluster, each: Fault) -> None:
    memory = _holder(cluster, each).memory
    memory.is_full = True
    cluster.at(min(each.for_s, SHORT_S), lambda: setattr(memory, "is_full", False))


@fault("durable-broken")
def _durable_broken(cluster: SimCluster, each: Fault) -> None:
    cluster.durable.problem = "Input/output error"
    cluster.at(each.for_s, lambda: setattr(cluster.durable, "problem", ""))


@fault("durable-slow")
def _durable_slow(cluster: SimCluster, each: Fault) -> None:
    cluster.durable.delay_s = 3.0
    cluster.at(each.for_s, lambda: setattr(cluster.durable, "delay_s", cluster.durable.usual_s))


@fault("rotate-key")
def _rotate_key(cluster: SimCluster, each: Fault) -> None:
    """Replace the key file on one host, and on the others at the end."""
    key = f"{int(each.at_s * 1000):016x}"
    cluster.durable.keys[_names(cluster, each)[0]] = key
    cluster.at(each.for_s, lambda: cluster.durable.keys.update(dict.fromkeys(cluster.holders, key)))


@fault("durable-torn")
def _durable_torn(cluster: SimCluster, each: Fault) -> None:
    cluster.durable.tears += each.count


@fault("add-host")
def _add_host(cluster: SimCluster, each: Fault) -> None:
    if len(cluster.holders) < 6:
        cluster.add_host(f"h{len(cluster.memories)}", {})


@fault("step-clock")
def _step_clock(cluster: SimCluster, each: Fault) -> None:
    """Step the wall clocks of hosts back or ahead by up to a day, and perhaps that of the next controller."""
    step_s = (1 if each.count % 2 else -1) * STEPS_S[each.rank % len(STEPS_S)]
    for name in _names(cluster, each):
        cluster.memories[name].clock_ahead_s += step_s
        cluster.kill_holder(name)
    if each.for_s > 1.0:
        cluster.clock_ahead_s += step_s
        cluster.crash_controller(restart_after_s=1.0)


@fault("days-pass")
def _days_pass(cluster: SimCluster, each: Fault) -> None:
    """Let days pass without a connect; then end every process. Launch once all hosts are back, or before (R5)."""
    cluster.idle_days_s += 2 * 86_400.0
    back_s = 1.0 + min(each.for_s, SHORT_S) + LATE_S
    cluster.launches_from_s = cluster.now + (back_s + LAUNCH_LATER_S if each.count % 2 else back_s - LATE_S / 2)
    cluster.at(1.0, lambda: _reboot_all(cluster, each))


@fault("lose-number")
def _lose_number(cluster: SimCluster, each: Fault) -> None:
    """End a holder and lose its incarnation: the next holder begins below it (R3)."""
    name = _names(cluster, each)[0]
    cluster.kill_holder(name)
    cluster.memories[name].incarnation = 0


@fault("replace-arena")
@fault("remove-files")
def _take_files(cluster: SimCluster, each: Fault) -> None:
    """Take the arena of a dead holder while ranks have it mapped (R8), or the files of a living one (R35)."""
    take_files(cluster, each, _names(cluster, each))
