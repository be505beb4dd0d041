"""The machines and processes of one simulation: what starts, dies, freezes and comes back."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping

from memstore.config import Config
from memstore.core.cluster.state import Rules
from memstore.core.holder import succession
from memstore.core.wire.ids import Endpoint
from memstore.core.wire.messages import HostInfo
from memstore.testing.simulator.checks.checker import Checker
from memstore.testing.simulator.checks.generations import MAX_RESTORES
from memstore.testing.simulator.host.holder import SimHolder
from memstore.testing.simulator.rank.in_place import InPlaceProcess, InPlaceRank
from memstore.testing.simulator.rank.rank import SimRank
from memstore.testing.simulator.run.controller import LEASE_S, SimController
from memstore.testing.simulator.world.memory import Crashed, DurableStorage, Memory
from memstore.testing.simulator.world.scenario import Scenario
from memstore.testing.simulator.world.virtual_time import Network, SimProcess, Thread, VirtualTime
from memstore.testing.simulator.world.world import AnyRank

CHUNK_BYTES = 64
RESTART_S = 1.0
PACE_BYTES_PER_S = 400  # of a host to durable storage: a rank's shard takes half a second
GRACE_S = 8.0
# Longer than any fault keeps all holders away, or launches; a record is up to EVERY_S old when a holder ends.
ORPHAN_TTL_S = 12.0 + succession.EVERY_S
BOOT = "boot"  # machines restart only in other faults, and then without their memory


class SimCluster:
    """The one `World`: virtual time, hosts, ranks, controllers, and the checks of all they do."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.time = VirtualTime(self._close)
        self.ids: Iterator[int] = itertools.count(1)
        self._trace = hashlib.sha256()
        self.notes: list[str] = []
        self.network = Network(random.Random(f"network {scenario.seed}"), self.at)
        self.rng = random.Random(f"world {scenario.seed}")
        self.durable = DurableStorage(usual_s=scenario.durable_s, delay_s=scenario.durable_s)
        self.has_kv = True
        self.launches_from_s = 0.0  # no launch begins before
        self.idle_days_s = 0.0  # time that passed and in which nothing was due
        self.clock_ahead_s = 0.0  # how far the wall clock of the controllers' machine was stepped
        self.drains: dict[str, float] = {}  # host -> the moment at which Ray will end it
        self.is_over = False
        self.wears_until_s = 0.0  # hosts of a rack go one after another until then
        self.is_job_over = False  # all ranks were ended, and no launch follows before every copy is back
        self.rules = Rules(
            recovery_grace_s=GRACE_S,
            lease_s=LEASE_S,
            outlast_s=LEASE_S,
            settle_s=3.0,
            failure_domains=("rack",) if scenario.racks else (),
            max_restores=MAX_RESTORES if scenario.is_in_place else 1000,
        )
        self.config = Config(
            replicas=scenario.replicas,
            scatter=scenario.scatter,
            parity=scenario.parity,
            keep_steps=scenario.keep_steps,
            in_flight=scenario.in_flight,
            connect_timeout_s=20.0,
            job_ttl_s=ORPHAN_TTL_S,
            durable="/durable" if scenario.has_durable else None,
            durable_every=scenario.durable_every,
            stall_budget_s=1.0,
            durable_bytes_per_s=PACE_BYTES_PER_S if scenario.is_paced else 0,
            durable_key_file="/key" if any(each.kind == "rotate-key" for each in scenario.faults) else None,
        ).job_fields()
        self.memories: dict[str, Memory] = {}
        self.holders: dict[str, SimHolder] = {}
        self.racks: dict[str, str] = {}  # by host, also of those that are lost; "": no label
        self.controllers: list[SimController] = []
        self.term = 0
        self.pids: dict[int, SimRank] = {}
        self.ranks: list[SimRank] = []
        self.processes: list[InPlaceProcess] = []  # of a job that recovers in place, the lost ones too
        self.in_recovery: list[Callable[[], None]] = []  # what happens while the next lost rank is replaced
        self.failing_loads = 0  # so many of the next gets fail as a rank loads what they brought
        self.late_launch_s = 0.0  # by which the next replacement is late
        self.checker = Checker(self)
        for n in range(scenario.hosts):
            self.add_host(f"h{n}", {"rack": f"r{n % scenario.racks}"} if scenario.racks else {})
        self.start_controller()

    # -- time ---------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self.time.now

    def at(self, delay_s: float, work: Callable[[], None]) -> None:
        """Do something after a delay."""
        self.time.at(delay_s, work)

    def spawn(self, work: Thread, process: SimProcess) -> None:
        """Run a generator as a thread of a process."""
        self.time.spawn(work, process)

    def _close(self, work: Thread) -> None:
        """End a thread of a dead process: its clean-up code must not touch any memory."""
        memory_states = [(m, m.is_cut) for m in self.memories.values()]
        for memory, _ in memory_states:
            memory.is_cut = True
        try:
            work.close()
        finally:
            for memory, was_cut in memory_states:
                memory.is_cut = was_cut

    def note(self, text: str) -> None:
        """Record a line for the page of a failing run, and count it in the run's fingerprint."""
        self.notes.append(f"{self.now:7.3f} {text}")
        self._trace.update(f"{self.now:.6f} {text}\n".encode())

    @property
    def fingerprint(self) -> str:
        """A hash of all notes: equal for two runs of the same scenario and code (I23)."""
        return self._trace.hexdigest()[:16]

    # -- hosts --------------------------------------------------------------------------------

    def add_host(self, name: str, labels: Mapping[str, str]) -> None:
        """Add a machine with empty memory."""
        self.memories[name], self.racks[name] = Memory(name, CHUNK_BYTES), labels.get("rack", "")
        info = HostInfo(
            name, 0, (Endpoint(f"10.0.0.{len(self.memories)}", 7000),), machine=f"m-{name}", labels=dict(labels)
        )
        self._start_holder(info)

    def _start_holder(self, info: HostInfo) -> None:
        fields = {key: getattr(info, key) for key in ("host_id", "endpoints", "machine", "labels")}
        memory = self.memories[info.host_id]
        info = HostInfo(incarnation=self.take_incarnation(info.host_id), **fields)
        holder = SimHolder(self, self.checker, info, memory)
        holder.state.idle_s = succession.idle_s(memory.seen, BOOT, self.now + self.idle_days_s)
        self._see(memory)
        self.holders[info.host_id] = holder
        for rank in self.ranks:
            if rank.host_id == info.host_id and not rank.is_dead:
                self.at(0.1, lambda r=rank: self.connect_rank(r))  # type: ignore[misc]
        for rank in self.former:  # each link comes back by itself, in any order
            if rank.host_id == info.host_id:
                self.at(self.network.rng.uniform(0.05, 0.3), lambda r=rank: self.connect_rank(r))  # type: ignore[misc]

    def see(self, holder: SimHolder) -> None:
        """Record in a host's memory that a holder runs there, if it is time to (R5)."""
        if holder.is_up and succession.is_due(holder.memory.seen_s, self.now + self.idle_days_s):
            self._see(holder.memory)

    def _see(self, memory: Memory) -> None:
        memory.seen_s = self.now + self.idle_days_s
        memory.seen = succession.record_of(BOOT, memory.seen_s)

    def take_incarnation(self, name: str, above: int = 0) -> int:
        """Return the number of the next holder of a host, counted in the host's memory (R3)."""
        memory = self.memories[name]
        memory.incarnation = succession.following(memory.incarnation, above)
        return memory.incarnation

    def kill_holder(self, name: str, *, back_after_s: float = RESTART_S) -> None:
        """End a holder's process; the controller sees the reset, and a successor takes the memory over."""
        holder = self.holders.get(name)
        if holder is None or not holder.is_up:
            return
        holder.is_up = False
        if self.memories[name].is_removed:  # what it had open, and has not written again, goes with it
            self.checker.after_event()  # what was dropped before was no fault's doing
            with self.checker.blaming("remove-files"):
                self.memories[name].lose_folder()
        self.memories[name].is_cut = True
        if holder.session is not None:
            self.at(0.01, holder.session.reset)
        self.at(back_after_s, lambda: self._bring_back(holder))
        for other in self.holders.values():
            if other is not holder and other.is_up:
                try:
                    self._drop_incoming(other, name)
                except Crashed as crash:  # at a write in this
                    self.note(f"holder {crash.memory.host_id} died at a write")
                    self.kill_holder(crash.memory.host_id)

    def _drop_incoming(self, holder: SimHolder, sender: str) -> None:
        """End the connections of a sender that died: what it had begun to send is given up (R13)."""
        for shard, name, _ in [k for k in holder.replicas.index.incoming if len(k) == 3 and k[1] == sender]:
            holder.replicas.abort_incoming(name, shard)

    def _bring_back(self, holder: SimHolder) -> None:
        if self.holders.get(holder.host_id) is holder and not holder.is_up:
            self._start_holder(holder.info)

    def replace_holder(self, holder: SimHolder) -> None:
        """Let a successor find a frozen holder, kill it and take over (R2)."""
        if self.holders.get(holder.host_id) is holder and holder.is_frozen:
            self.kill_holder(holder.host_id, back_after_s=0.1)

    def thaw_holder(self, holder: SimHolder) -> None:
        """Let a frozen holder go on; it reads now what waited in its sockets."""
        holder.is_frozen, holder.thawed_s = False, self.now
        for rank in [*self.ranks, *self.former]:  # those that connected in vain meanwhile
            if rank.host_id == holder.host_id and rank.holder is not holder:
                self.connect_rank(rank)

    def kill_host(self, name: str, *, back_after_s: float) -> None:
        """Take a machine away with its memory; another one takes its name later."""
        for rank in [*self.ranks, *self.former]:
            if rank.host_id == name:
                self.kill_rank(rank, "its host died")
        self.kill_holder(name, back_after_s=back_after_s)
        self.memories[name].wipe()

    def lose_host(self, name: str) -> None:
        """Take a machine away with its memory, and its name with it."""
        self.kill_host(name, back_after_s=math.inf)
        del self.holders[name]

    def flap(self, name: str) -> None:
        """Kill a host once more, if that is within the promise."""
        if not self.is_over and (not self.scenario.is_strict or self.is_quiet()):
            with self.checker.blaming("flap-host"):
                self.kill_host(name, back_after_s=0.5)

    # -- controllers --------------------------------------------------------------------------

    def start_controller(self) -> None:
        """Start a controller with a term above every other (R17)."""
        self.term += 1
        skew_s = self.rng.uniform(-100.0, 100.0) + self.clock_ahead_s
        self.controllers.append(SimController(self, self.checker, self.term, skew_s=skew_s))

    def crash_controller(self, *, restart_after_s: float) -> None:
        """End the newest controller; Ray starts another."""
        if self.controllers and self.controllers[-1].is_alive:
            self.controllers[-1].stop()
        self.at(restart_after_s, self.start_controller)

    def served(self) -> SimController | None:
        """Return the controller in charge if it serves."""
        newest = self.controllers[-1] if self.controllers else None
        is_serving = newest is not None and newest.is_alive and not newest.is_frozen and newest.machine.is_settled
        return newest if is_serving else None

    # -- ranks --------------------------------------------------------------------------------

    def is_alive(self, pid: int, start: int) -> bool:
        """Say whether a rank's process lives (R8)."""
        rank = self.pids.get(pid)
        return rank is not None and not rank.is_dead

    def start_rank(self, rank: SimRank) -> None:
        """Begin a process."""
        self.pids[rank.pid] = rank
        self.connect_rank(rank)
        self.spawn(self._life(rank), rank)

    def _life(self, rank: SimRank) -> Thread:
        yield from rank.life()
        holder = self.holders[rank.host_id]
        if holder.is_serving:
            holder.leave(rank.link)
        self.kill_rank(rank, "it ended")

    def start_process(self, process: InPlaceProcess, start_s: float) -> None:
        """Begin a process that recovers in place, once it has imported what it needs."""
        self.processes.append(process)
        self.pids[process.pid] = process.store
        self.spawn(self._life_in_place(process, start_s), process)
        self.spawn(process.watch(), process)

    def _life_in_place(self, process: InPlaceProcess, start_s: float) -> Thread:
        yield from process.life_of_it(start_s)
        self.kill_rank(process.store, "it ended")

    @property
    def former(self) -> list[InPlaceRank]:
        """Stores of living processes that are open beside those of `ranks`: left in place, or of a lost process."""
        stores = [store for process in self.processes if process.is_up for store in (*process.former, process.store)]
        return [store for store in stores if not store.is_closed and store not in self.ranks]

    def entered(self, rank: AnyRank) -> None:
        """Let a process that recovers in place use a new Store from now on."""
        for number, known in enumerate(self.ranks):
            if isinstance(rank, InPlaceRank) and isinstance(known, InPlaceRank) and known.process is rank.process:
                self.ranks[number] = rank
        if isinstance(rank, InPlaceRank):
            self.connect_rank(rank)

    def kill_rank(self, rank: SimRank, why: str) -> None:
        """End a process."""
        rank.is_dead, rank.why = True, rank.why or why

    def thaw_rank(self, rank: SimRank) -> None:
        """Let a frozen process go on; it finds its link as it is now."""
        rank.is_frozen = False
        if not rank.is_dead and rank.holder is not self.holders[rank.host_id]:
            self.connect_rank(rank)

    def connect_rank(self, rank: SimRank) -> None:
        """Let a rank connect to its host's holder, if both can and it is not connected."""
        holder = self.holders.get(rank.host_id)
        if rank.is_dead or rank.is_frozen or holder is None or rank.holder is holder:
            return
        if holder.is_serving:
            rank.connect(holder)

    # -- the promise --------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Say whether every host answers, no byte is spoilt, and the store claims every copy of its newest step."""
        controller = self.served()
        if controller is None or self.network.cut or self.network.silent or self.now < self.wears_until_s:
            return False
        if any(not h.is_serving or not h.memory.is_sound or h.session is None for h in self.holders.values()):
            return False
        if any(stored.missing for h in self.holders.values() for stored in h.replicas.index.shards.values()):
            return False  # found, and the report of it under way
        return self.checker.redundancy.is_claimed(controller)

    def heal(self) -> None:
        """End every fault."""
        self.note("all faults are healed")
        self.network.heal()
        self.has_kv, self.durable.problem, self.durable.tears = True, "", 0
        self.durable.delay_s = self.durable.usual_s
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
