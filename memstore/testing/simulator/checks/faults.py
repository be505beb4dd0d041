"""How each fault of a scenario is done, and whether a strict scenario may do it now."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from memstore.testing.simulator.checks.scenario import Fault
from memstore.testing.simulator.rank.history import KINDS
from memstore.testing.simulator.world import files

if TYPE_CHECKING:
    from memstore.testing.simulator.host.holder import SimHolder
    from memstore.testing.simulator.rank.rank import SimRank
    from memstore.testing.simulator.world.world import Simulation

STEPS_S = (2.0, 60.0, 3600.0, 86_400.0)
SHORT_S = 4.0  # below repair_after_s and recovery_grace_s: nobody gives a host up for this
Inject = Callable[["Simulation", Fault], None]
INJECT: dict[str, Inject] = {}
NEEDS_QUIET = {
    "kill-host",
    "kill-rack",
    "wear-rack",
    "flap-host",
    "flip-at-rest",
    "rot-manifest",
    "durable-torn",
    "replace-arena",
    "remove-files",
}  # whatever their length


def fault(name: str) -> Callable[[Inject], Inject]:
    """Register a fault."""

    def add(inject: Inject) -> Inject:
        INJECT[name] = inject
        return inject

    return add


def inject(world: Simulation, each: Fault) -> None:
    """Do one fault, unless it would go beyond the promise of a strict scenario."""
    is_grave = each.kind in NEEDS_QUIET or each.for_s > SHORT_S
    if world.scenario.is_strict and is_grave and not world.is_quiet():
        world.note(f"fault {each.kind} left out: the store is not whole now")
        return
    world.note(f"fault {each.text().strip()}")
    world.injected[each.kind] = world.injected.get(each.kind, 0) + 1
    _blamed(world, each.kind, lambda: INJECT[each.kind](world, each))


def _blamed(world: Simulation, kind: str, work: Callable[[], object]) -> None:
    """What is lost by this work is the fault's doing, not the store's."""
    world.checker.cause = kind
    work()
    world.checker.after_event()
    world.checker.cause = ""


def _names(world: Simulation, each: Fault) -> list[str]:
    names = sorted(world.holders)
    return sorted({names[i % len(names)] for i in each.hosts})


def _holder(world: Simulation, each: Fault) -> SimHolder:
    return world.holders[_names(world, each)[0]]


def _rank(world: Simulation, each: Fault) -> SimRank | None:
    living = [r for r in world.ranks if not r.is_dead]
    return living[each.rank % len(living)] if living else None


@fault("kill-rank")
def _kill_rank(world: Simulation, each: Fault) -> None:
    rank = _rank(world, each)
    if rank is not None:
        world.kill_rank(rank, "killed")


@fault("leave-rank")
def _leave_rank(world: Simulation, each: Fault) -> None:
    """The launcher loses sight of a rank: it starts anew while that one trains on (R20, R21)."""
    rank = _rank(world, each)
    if rank is not None:
        rank.is_left = True
        world.at(each.for_s, lambda: world.kill_rank(rank, "found at last"))


@fault("differ")
def _differ(world: Simulation, each: Fault) -> None:
    """What a copier holds is not what its twins hold any more, for some steps (R34)."""
    rank = _rank(world, each)
    if rank is not None:
        rank.differs = each.count


@fault("freeze-rank")
def _freeze_rank(world: Simulation, each: Fault) -> None:
    rank = _rank(world, each)
    if rank is not None:
        rank.is_frozen = True
        world.at(each.for_s, lambda: world.thaw_rank(rank))


@fault("kill-holder")
def _kill_holder(world: Simulation, each: Fault) -> None:
    world.kill_holder(_holder(world, each).host_id)


@fault("crash-holder-at")
def _crash_holder_at(world: Simulation, each: Fault) -> None:
    _holder(world, each).memory.crash_in = each.count


@fault("freeze-holder")
def _freeze_holder(world: Simulation, each: Fault) -> None:
    holder = _holder(world, each)
    holder.is_frozen = True
    world.at(each.for_s, lambda: world.thaw_holder(holder))


@fault("replace-holder")
def _replace_holder(world: Simulation, each: Fault) -> None:
    """A frozen holder is killed by its successor, which waits for its lock (R2)."""
    holder = _holder(world, each)
    holder.is_frozen = True
    world.at(min(each.for_s, 2.0), lambda: world.replace_holder(holder))


@fault("kill-host")
def _kill_host(world: Simulation, each: Fault) -> None:
    for name in _names(world, each)[: world.scenario.replicas - 1]:
        world.kill_host(name, back_after_s=each.for_s)


@fault("preempt")
def _preempt(world: Simulation, each: Fault) -> None:
    """Notice, the end at its moment, and another machine of that name later; a strict scenario may spare it (R29)."""
    name = _names(world, each)[0]
    world.drains[name] = world.now + each.for_s

    def end() -> None:
        if world.drains.pop(name, None) is not None and (not world.scenario.is_strict or world.is_quiet()):
            _blamed(world, each.kind, lambda: world.kill_host(name, back_after_s=2.0))

    world.at(each.for_s, end)


def _rack(world: Simulation, each: Fault) -> list[str]:
    rack = _holder(world, each).info.labels.get("rack")
    if rack is None:
        return _names(world, each)[: world.scenario.replicas - 1]
    if world.scenario.is_strict and world.scenario.replicas > 2:
        return []  # with three copies over two racks a rack may hold two of them
    return [h for h, x in sorted(world.holders.items()) if x.info.labels.get("rack") == rack]


@fault("kill-rack")
def _kill_rack(world: Simulation, each: Fault) -> None:
    for name in _rack(world, each):
        world.kill_host(name, back_after_s=each.for_s)


@fault("wear-rack")
def _wear_rack(world: Simulation, each: Fault) -> None:
    """The hosts of a rack are lost one after another, each replaced by a blank one before the next goes (R29)."""
    world.wears_until_s = (
        world.now + len(world.holders) * each.for_s
    )  # a second grave fault would be beyond the promise
    for n, name in enumerate(_rack(world, each)):
        end = functools.partial(world.kill_host, name, back_after_s=min(0.2 * each.count, each.for_s))
        world.at(n * each.for_s, lambda end=end: _blamed(world, each.kind, end))  # type: ignore[misc]


@fault("end-job")
def _end_job(world: Simulation, each: Fault) -> None:
    """Every rank dies, and no launch follows before the store had time to be whole again (R29)."""
    world.is_job_over = True
    for rank in world.ranks:
        world.kill_rank(rank, "the job was ended")


@fault("flap-host")
def _flap_host(world: Simulation, each: Fault) -> None:
    name = _names(world, each)[0]
    world.kill_host(name, back_after_s=0.5)
    for n in range(1, 4):
        world.at(3.0 * n, lambda: world.flap(name))


@fault("reboot-all")
def _reboot_all(world: Simulation, each: Fault) -> None:
    """Every process of Ray dies at once; one host comes up late (R24)."""
    for controller in world.controllers:
        controller.stop()
    for rank in world.ranks:
        world.kill_rank(rank, "Ray was restarted")
    late = _names(world, each)[0]
    for name in sorted(world.holders):
        world.kill_holder(name, back_after_s=min(each.for_s, SHORT_S) + 2.0 if name == late else 0.5)
    world.at(0.5, world.start_controller)


@fault("partition")
def _partition(world: Simulation, each: Fault) -> None:
    left = _names(world, each)
    if world.scenario.is_strict and each.for_s > SHORT_S:
        left = left[: world.scenario.replicas - 1]
    right = [h for h in sorted(world.holders) if h not in left]
    world.network.split(left, [*right, *(c.name for c in world.controllers)])
    world.at(each.for_s, world.network.heal)


@fault("one-way")
def _one_way(world: Simulation, each: Fault) -> None:
    name = _names(world, each)[0]
    others = [*(h for h in world.holders if h != name), *(c.name for c in world.controllers)]
    world.network.cut.update((name, o) if each.count % 2 else (o, name) for o in others)
    world.at(each.for_s, world.network.heal)


@fault("slow-link")
def _slow_link(world: Simulation, each: Fault) -> None:
    world.network.slow[_names(world, each)[0]] = 10.0 * each.count
    world.at(each.for_s, world.network.heal)


@fault("flip-in-transit")
def _flip_in_transit(world: Simulation, each: Fault) -> None:
    world.network.flips += each.count


@fault("reset-in-transit")
def _reset_in_transit(world: Simulation, each: Fault) -> None:
    world.network.resets += each.count


@fault("double-reports")
def _double_reports(world: Simulation, each: Fault) -> None:
    world.network.doubles += each.count


@fault("flip-at-rest")
def _flip_at_rest(world: Simulation, each: Fault) -> None:
    memory = _holder(world, each).memory
    sealed = [n for n, h in enumerate(memory.headers) if int(h.state) == 3 and n not in memory.spoilt]
    for number in sealed[each.rank :][: each.count]:
        memory.spoil(number, world.now)


@fault("rot-manifest")
def _rot_manifest(world: Simulation, each: Fault) -> None:
    """Bits flip in the files of manifests under a living holder: nothing there says what the chunks are."""
    memory = _holder(world, each).memory
    memory.rotten.update(sorted(memory.manifests)[-each.count :])
    memory.version += 1


@fault("kill-controller")
def _kill_controller(world: Simulation, each: Fault) -> None:
    world.crash_controller(restart_after_s=min(each.for_s, 3.0))


@fault("freeze-controller")
def _freeze_controller(world: Simulation, each: Fault) -> None:
    """Frozen and given up: a successor starts, then the old one wakes and must find out (R17)."""
    controller = world.controllers[-1]
    controller.is_frozen = True
    world.at(each.for_s, lambda: setattr(controller, "is_frozen", False))
    world.at(min(each.for_s, 2.0), world.start_controller)


@fault("second-controller")
def _second_controller(world: Simulation, each: Fault) -> None:
    """A new controller starts while the old one runs, cut off from some hosts (R17)."""
    old = world.controllers[-1].name
    left = _names(world, each)
    world.start_controller()
    if each.for_s <= SHORT_S:
        world.network.split(left, [world.controllers[-1].name])
        world.network.split([h for h in world.holders if h not in left], [old])
        world.at(each.for_s, world.network.heal)


@fault("kv-away")
def _kv_away(world: Simulation, each: Fault) -> None:
    world.has_kv = False
    world.at(each.for_s, lambda: setattr(world, "has_kv", True))


@fault("memory-full")
def _memory_full(world: Simulation, each: Fault) -> None:
    memory = _holder(world, each).memory
    memory.is_full = True
    world.at(min(each.for_s, SHORT_S), lambda: setattr(memory, "is_full", False))


@fault("durable-broken")
def _durable_broken(world: Simulation, each: Fault) -> None:
    world.durable.problem = "Input/output error"
    world.at(each.for_s, lambda: setattr(world.durable, "problem", ""))


@fault("durable-slow")
def _durable_slow(world: Simulation, each: Fault) -> None:
    world.durable.delay_s = 3.0
    world.at(each.for_s, lambda: setattr(world.durable, "delay_s", 0.05))


@fault("rotate-key")
def _rotate_key(world: Simulation, each: Fault) -> None:
    """The key file is replaced on one host, on the others at the end."""
    key = f"{int(each.at_s * 1000):016x}"
    world.durable.keys[_names(world, each)[0]] = key
    world.at(each.for_s, lambda: world.durable.keys.update(dict.fromkeys(world.holders, key)))


@fault("durable-torn")
def _durable_torn(world: Simulation, each: Fault) -> None:
    world.durable.tears += each.count


@fault("add-host")
def _add_host(world: Simulation, each: Fault) -> None:
    if len(world.holders) < 6:
        world.add_host(f"h{len(world.holders)}", {})


@fault("step-clock")
def _step_clock(world: Simulation, each: Fault) -> None:
    """Wall clocks step, back or ahead, by up to a day; those of the controller's machine when its process ends."""
    step_s = (1 if each.count % 2 else -1) * STEPS_S[each.rank % len(STEPS_S)]
    for name in _names(world, each):
        world.memories[name].clock_ahead_s += step_s
        world.kill_holder(name)
    if each.for_s > 1.0:
        world.clock_ahead_s += step_s
        world.crash_controller(restart_after_s=1.0)


@fault("days-pass")
def _days_pass(world: Simulation, each: Fault) -> None:
    """Training goes on for days without a new connect, then every process dies at once and comes back (R5)."""
    world.idle_days_s += 2 * 86_400.0
    world.at(1.0, lambda: _reboot_all(world, each))


@fault("lose-number")
def _lose_number(world: Simulation, each: Fault) -> None:
    """A holder dies and the number of its life is lost: the next one begins below it (R3)."""
    name = _names(world, each)[0]
    world.kill_holder(name)
    world.memories[name].incarnation = 0


@fault("replace-arena")
@fault("remove-files")
def _take_files(world: Simulation, each: Fault) -> None:
    """A holder dies and its arena goes while ranks have it mapped (R8), or a living holder's files go (R35)."""
    files.take(world, each, _names(world, each))


def _ask_people(world: Simulation, each: Fault) -> None:
    """Nothing breaks by these: people ask for them."""
    world.history.act(each)


INJECT.update(dict.fromkeys(KINDS, _ask_people))
