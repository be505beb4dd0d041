"""Virtual time, machines, processes and the launcher of one simulation; everything that happens is an event here.

After every event the checker looks at what changed. When the scenario's time is over all faults are healed, and the
store has `LIVENESS_S` to be whole and to go on committing (I16).
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Protocol, TypeVar

from memstore.config import Config
from memstore.core.cluster.state import Rules
from memstore.core.wire.messages import Heard, HostInfo
from memstore.testing.simulator.checks.checker import Checker, Violation
from memstore.testing.simulator.checks.faults import inject
from memstore.testing.simulator.checks.kept_copies import why_not_kept
from memstore.testing.simulator.checks.scenario import Scenario
from memstore.testing.simulator.host.durable import Durable
from memstore.testing.simulator.host.holder import REAP_S, SimHolder
from memstore.testing.simulator.rank.history import History
from memstore.testing.simulator.rank.natural import Natural
from memstore.testing.simulator.rank.rank import SimRank
from memstore.testing.simulator.world import files
from memstore.testing.simulator.world.control import DIAL_S, LEASE_S, Controller
from memstore.testing.simulator.world.launcher import launches
from memstore.testing.simulator.world.memory import Crashed, Memory
from memstore.testing.simulator.world.network import Network

Wait = float | Callable[[], bool]
T = TypeVar("T")
CHUNK_BYTES = 64
POLL_S = 0.05
BEAT_S = 0.5
SCRUB_S = 4.0
RESTART_S = 1.0
LIVENESS_S = 90.0
REFILL_S = 60.0  # the copies of a job without ranks are complete again within this
GRACE_S = 8.0
ORPHAN_TTL_S = 12.0  # longer than any fault keeps all holders away, or launches
COMMITS_WANTED = 3


class Process(Protocol):
    """Who runs a generator: it stops for good when its process is over, and waits while that is paused."""

    @property
    def is_up(self) -> bool:
        """False once it is dead."""

    @property
    def is_frozen(self) -> bool:
        """True while it is stopped."""


class Simulation:
    """One run; a clock for those who need one."""

    is_up, is_frozen = True, False  # it runs the launcher's generator itself

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.events_count = 0
        self.ids = itertools.count(1)
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._trace = hashlib.sha256()
        self.notes: list[str] = []
        self.injected: dict[str, int] = {}
        self.network = Network(random.Random(f"network {scenario.seed}"), self.at)
        self.rng = random.Random(f"world {scenario.seed}")
        self.durable = Durable()
        self.has_kv = True
        self.idle_days_s = 0.0  # time that passed and in which nothing was due
        self.clock_ahead_s = 0.0  # the wall clock of the machine where controllers start, by which faults step it
        self.drains: dict[str, float] = {}  # what Ray says of its nodes: host -> the moment of its end
        self.is_over = False
        self.wears_until_s = 0.0  # hosts of a rack go one after another
        self.is_job_over = False  # all ranks were ended, and no launch follows before every copy is back
        self.starts_over = False  # everything was lost, beyond the promise: the user says connect(fresh=True)
        self.rules = Rules(
            orphan_ttl_s=ORPHAN_TTL_S, recovery_grace_s=GRACE_S, lease_s=LEASE_S, outlast_s=LEASE_S, settle_s=3.0,
            failure_domains=("rack",) if scenario.racks else (),
        )  # fmt: skip
        self.config = Config(
            replicas=scenario.replicas, keep_steps=scenario.keep_steps, connect_timeout_s=20.0, max_restores=1000,
            durable="/durable" if scenario.has_durable else None, durable_every=3, stall_budget_s=1.0,
            durable_key_file="/key" if any(each.kind == "rotate-key" for each in scenario.faults) else None,
        ).job_fields()  # fmt: skip
        self.memories: dict[str, Memory] = {}
        self.holders: dict[str, SimHolder] = {}
        self.controllers: list[Controller] = []
        self.term = 0
        self.pids: dict[int, SimRank] = {}
        self.ranks: list[SimRank] = []
        self.checker = Checker(self)
        self.history, self.natural = History(self), Natural(self)
        for n in range(scenario.hosts):
            self.add_host(f"h{n}", {"rack": f"r{n % scenario.racks}"} if scenario.racks else {})
        self.start_controller()
        self._periods()
        self.spawn(launches(self), self)
        for each in scenario.faults:
            self.at(each.at_s, lambda f=each: inject(self, f))  # type: ignore[misc]

    def _periods(self) -> None:
        self._every(DIAL_S, lambda: _each(self.controllers, Controller.tick))
        self._every(LEASE_S / 3, lambda: _each(self.controllers, Controller.renew))
        self._every(BEAT_S, lambda: _each(self.holders.values(), _beat))
        self._every(REAP_S, lambda: _each(self.holders.values(), SimHolder.reap))
        self._every(REAP_S, lambda: _each(self.holders.values(), self.see))
        self._every(SCRUB_S, lambda: _each(self.holders.values(), SimHolder.scrub))
        self._every(1.0, self.checker.look_at_redundancy)

    # -- time ---------------------------------------------------------------------------------

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), work))

    def _every(self, every_s: float, work: Callable[[], object]) -> None:
        def again() -> None:
            self.at(every_s, again)
            work()

        self.at(every_s, again)

    def spawn(self, work: Generator[Wait, None, None], process: Process) -> None:
        """Run a generator as a thread of a process: it yields seconds, or a condition to wait for."""

        def step() -> None:
            if not process.is_up:
                self._silently_close(work)
                return
            if process.is_frozen:
                self.at(POLL_S, step)
                return
            try:
                wait = next(work)
            except StopIteration:
                return
            if callable(wait):
                poll(wait)
            else:
                self.at(wait, step)

        def poll(is_done: Callable[[], bool]) -> None:
            if process.is_up and (process.is_frozen or not is_done()):
                self.at(POLL_S, lambda: poll(is_done))
            else:
                step()

        self.at(0.0, step)

    def _silently_close(self, work: Generator[Wait, None, None]) -> None:
        """The process is dead: its clean-up code must not touch anything any more."""
        memory_states = [(m, m.is_cut) for m in self.memories.values()]
        for memory, _ in memory_states:
            memory.is_cut = True
        try:
            work.close()
        finally:
            for memory, was_cut in memory_states:
                memory.is_cut = was_cut

    def _run_until(self, end_s: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        while self._queue and self._queue[0][0] <= end_s:
            self.now, _, work = heapq.heappop(self._queue)
            self.events_count += 1
            try:
                work()
            except Crashed as crash:
                self.note(f"holder {crash.memory.host_id} died at a write")
                self.kill_holder(crash.memory.host_id)
            self.checker.after_event()
            if is_done():
                return True
        self.now = end_s
        return is_done()

    def run(self) -> Simulation:
        """Play the scenario, heal, demand liveness, look at everything once more. Raises Violation."""
        self._run_until(self.scenario.duration_s)
        self.heal()
        self._demand_copies()
        self.checker.healed()
        if not self._run_until(self.now + LIVENESS_S, self.checker.is_live):
            raise Violation("I16", f"not whole {LIVENESS_S:g} s after the last fault: {self.checker.why_not_live()}")
        self.is_over = True
        for rank in self.ranks:
            self.kill_rank(rank, "the end")
        self._run_until(self.now + 10.0)
        self.checker.at_the_end()
        return self

    def _demand_copies(self) -> None:
        """With no rank alive kept steps get all their copies as well; then the job is launched again (R29)."""
        if self.is_job_over and not self._run_until(self.now + REFILL_S, lambda: not why_not_kept(self.checker)):
            raise Violation("R29", f"{REFILL_S:g} s after the last fault, all ranks dead: {why_not_kept(self.checker)}")
        self.is_job_over = False

    def note(self, text: str) -> None:
        """Keep a line for a failing run's page, and its mark for the run's fingerprint."""
        self.notes.append(f"{self.now:7.3f} {text}")
        self._trace.update(f"{self.now:.6f} {text}\n".encode())

    @property
    def fingerprint(self) -> str:
        """Equal for two runs of the same scenario and code (I23)."""
        return self._trace.hexdigest()[:16]

    # -- machines -----------------------------------------------------------------------------

    def add_host(self, name: str, labels: Mapping[str, str]) -> None:
        """A new machine with empty memory."""
        self.memories[name] = Memory(name, CHUNK_BYTES)
        info = HostInfo(name, 0, f"10.0.0.{len(self.holders)}", 7000, machine=f"m-{name}", labels=dict(labels))
        self._start_holder(info)

    def _start_holder(self, info: HostInfo) -> None:
        fields = {key: getattr(info, key) for key in ("host_id", "address", "port", "machine", "labels")}
        holder = SimHolder(
            self, HostInfo(incarnation=self.take_incarnation(info.host_id), **fields), self.memories[info.host_id]
        )
        memory = self.memories[info.host_id]
        memory.idle_s = self.now + self.idle_days_s - memory.seen_s
        self.holders[info.host_id] = holder
        for rank in self.ranks:
            if rank.host_id == info.host_id and not rank.is_dead:
                self.at(0.1, lambda r=rank: self._reconnect(r))  # type: ignore[misc]

    def see(self, holder: SimHolder) -> None:
        """A holder notes that it is there (R5)."""
        if holder.is_up:
            holder.memory.seen_s = self.now + self.idle_days_s

    def take_incarnation(self, name: str, above: int = 0) -> int:
        """Count a holder's life in its host's memory (R3)."""
        memory = self.memories[name]
        memory.incarnation = max(memory.incarnation, above) + 1
        return memory.incarnation

    def _reconnect(self, rank: SimRank) -> None:
        holder = self.holders[rank.host_id]
        if not rank.is_dead and not rank.is_frozen and holder.is_serving and rank.holder is not holder:
            rank.connect(holder)

    def kill_holder(self, name: str, *, back_after_s: float = RESTART_S) -> None:
        """The holder's process dies; the controller sees the reset, and a successor takes the memory over."""
        holder = self.holders[name]
        if not holder.is_up:
            return
        holder.is_up = False
        files.died(self, self.memories[name])
        self.memories[name].is_cut = True
        if holder.session is not None:
            session = holder.session
            self.at(0.01, lambda: session.controller.lose(name, "connection reset"))
        self.at(back_after_s, lambda: self._bring_back(holder))
        for other in self.holders.values():  # one of them may die at a write in this
            if other is not holder and other.is_up:
                self._drop_drafts(other, name)

    def _drop_drafts(self, holder: SimHolder, sender: str) -> None:
        """Its connections ended: what it had begun to send is given up (R13)."""
        for shard, name, _ in [k for k in holder.vault.shelf.drafts if len(k) == 3 and k[1] == sender]:
            holder.vault.abort_draft(name, shard)

    def _bring_back(self, holder: SimHolder) -> None:
        if self.holders[holder.host_id] is holder and not holder.is_up:
            self._start_holder(holder.info)

    def replace_holder(self, holder: SimHolder) -> None:
        """A successor finds a frozen holder, kills it and takes over (R2)."""
        if self.holders[holder.host_id] is holder and holder.is_frozen:
            self.kill_holder(holder.host_id, back_after_s=0.1)

    def thaw_holder(self, holder: SimHolder) -> None:
        """It goes on; what waited in its sockets is read now."""
        holder.is_frozen, holder.thawed_s = False, self.now
        for rank in self.ranks:  # who connected in vain meanwhile
            if rank.host_id == holder.host_id and rank.holder is not holder:
                self._reconnect(rank)

    def kill_host(self, name: str, *, back_after_s: float) -> None:
        """The machine is gone with its memory; another one takes its name later."""
        for rank in self.ranks:
            if rank.host_id == name:
                self.kill_rank(rank, "its host died")
        self.kill_holder(name, back_after_s=back_after_s)
        self.memories[name].wipe()

    def flap(self, name: str) -> None:
        """The host dies once more, if that is within the promise."""
        if not self.is_over and (not self.scenario.is_strict or self.is_quiet()):
            self.checker.cause = "flap-host"
            self.kill_host(name, back_after_s=0.5)
            self.checker.after_event()
            self.checker.cause = ""

    # -- controllers ----------------------------------------------------------------------------

    def start_controller(self) -> None:
        """A controller with a term above every other (R17)."""
        self.term += 1
        skew_s = self.rng.uniform(-100.0, 100.0) + self.clock_ahead_s
        self.controllers.append(Controller(self, self.term, skew_s=skew_s))

    def crash_controller(self, *, restart_after_s: float) -> None:
        """The newest controller dies; Ray starts another."""
        if self.controllers and self.controllers[-1].is_alive:
            self.controllers[-1].stop()
        self.at(restart_after_s, self.start_controller)

    def is_newest(self, controller: Controller) -> bool:
        """Say whether nobody has taken a higher term."""
        return controller.term == self.term

    def served(self) -> Controller | None:
        """The controller in charge, if it serves."""
        newest = self.controllers[-1] if self.controllers else None
        is_serving = newest is not None and newest.is_alive and not newest.is_frozen and newest.catalog.is_settled
        return newest if is_serving else None

    # -- processes ----------------------------------------------------------------------------

    def is_alive(self, pid: int, start: int) -> bool:
        """Say whether a rank's process lives (R8)."""
        rank = self.pids.get(pid)
        return rank is not None and not rank.is_dead

    def kill_rank(self, rank: SimRank, why: str) -> None:
        """The process is gone."""
        rank.is_dead, rank.why = True, rank.why or why

    def thaw_rank(self, rank: SimRank) -> None:
        """It goes on where it was stopped, and finds its link as it is now."""
        rank.is_frozen = False
        holder = self.holders[rank.host_id]
        if not rank.is_dead and rank.holder is not holder:
            self._reconnect(rank)

    def start_rank(self, rank: SimRank) -> None:
        """A process begins."""
        self.pids[rank.pid] = rank
        self._reconnect(rank)
        self.spawn(self._life(rank), rank)

    def _life(self, rank: SimRank) -> Generator[Wait, None, None]:
        yield from rank.life()
        self.kill_rank(rank, "it ended")

    # -- the promise --------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """True if every host answers, no byte is spoilt, and the store claims every copy of its newest step."""
        controller = self.served()
        if controller is None or self.network.cut or self.now < self.wears_until_s:
            return False
        if any(not h.is_serving or not h.memory.is_sound or h.session is None for h in self.holders.values()):
            return False
        return self.checker.claims_redundancy(controller)

    def heal(self) -> None:
        """Every fault stops."""
        self.note("all faults are healed")
        self.network.heal()
        self.has_kv, self.durable.problem, self.durable.delay_s, self.durable.tears = True, "", 0.05, 0
        self.drains.clear()
        for name, holder in sorted(self.holders.items()):
            self.memories[name].is_full, self.memories[name].crash_in = False, None
            if holder.is_frozen:
                self.thaw_holder(holder)
        for rank in self.pids.values():
            if rank.is_left:
                self.kill_rank(rank, "found at last")
        for rank in self.ranks:
            if rank.is_frozen:
                self.thaw_rank(rank)
        for controller in self.controllers:
            controller.is_frozen = False
        if not self.controllers[-1].is_alive:
            self.start_controller()


def _each(those: Iterable[T], work: Callable[[T], None]) -> None:
    for one in list(those):
        work(one)


def _beat(holder: SimHolder) -> None:
    if holder.is_serving and holder.session is not None:
        holder.tell(Heard(holder.host_id, clock_s=holder.session.clock_s))
