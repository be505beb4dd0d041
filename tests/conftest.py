"""One clean environment for every test, and a check after each that it left nothing behind.

What counts as left: a child process, a listening socket of this process, a thread that is ours or would keep the
process alive, a store's folder under /dev/shm, a network link. Fixtures of a wider scope are set up before the check
begins, so a cluster that a module shares is not held against its tests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest import runner

from memstore.testing.clusters import processes
from memstore.testing.clusters.nursery import Nursery
from memstore.testing.clusters.scratch import maker_pid
from memstore.testing.faults.object_servers import CLOUDS, NO_AZURITE, HttpFaults, ObjectServer, azurite
from memstore.testing.nemesis.load_meter import LoadMeter
from memstore.testing.ranks.rank_process import RankNursery

# Before any test imports Ray, which reads them once. Ray turns token authentication on by itself in some ways of
# starting and not in others; a cluster half with and half without it does not form.
os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # else Ray warns about a change to come, and warnings are errors
    OMP_NUM_THREADS="1",  # sums in one order on every machine
    RAY_TMPDIR=f"/tmp/memstore-ray-{os.getpid()}",  # where Ray writes which cluster is the newest: each run has its own
)
# What a launcher or a shell may have left; a test that wants one of them sets it.
_FOREIGN = ("MEMSTORE_", "TORCHELASTIC_", "SLURM_", "MASTER_", "LOCAL_")
for _name in [n for n in os.environ if n.startswith(_FOREIGN) or n in ("RANK", "WORLD_SIZE", "RAY_ADDRESS", "COLUMNS")]:
    del os.environ[_name]

# A shell that starts a run in the background has Ctrl-C ignored there, and in the processes that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With it each of a thousand processes would compile all sources again, for as long as they take to run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# pytest writes PYTEST_CURRENT_TEST four times a test, and glibc before 2.41 may move the environment under a getenv()
# of another thread, such as gRPC's, which outlive Ray in this process: that was a segmentation fault.
runner._update_current_test_var = lambda item, when: None

SHM_DIR = Path("/dev/shm")
SETTLE_S = 30.0  # a killed process or a closed listener takes a moment to be gone
_KEPT_BY_PYTHON = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # one per process, until it ends

with contextlib.suppress(ImportError):
    from hypothesis import settings

    # The same examples in every run; a busy machine is no reason to fail one.
    settings.register_profile("memstore", derandomize=True, deadline=None)
    settings.load_profile("memstore")


_RAY_GROUP = "ray"  # two Ray clusters at once would starve each other, and be taken for one another
_SIMULATOR = "tests/simulator/"
_SHARED = contextlib.ExitStack()  # holds the cluster that tests share


def pytest_itemcollected(item: pytest.Item) -> None:
    """Put the tests that start Ray into one group, before xdist reads the groups of what was collected."""
    if item.get_closest_marker("ray"):
        item.add_marker(pytest.mark.xdist_group(_RAY_GROUP))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest group first and the smallest pieces last, so that all workers end at about the same time.

    Of the tests on Ray those that share a cluster come first: it ends before another one begins.
    """

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        is_on_ray = item.get_closest_marker("ray") is not None
        return not is_on_ray, is_on_ray and not _shares_cluster(item), item.nodeid.startswith(_SIMULATOR)

    items.sort(key=place)


def _shares_cluster(item: pytest.Item) -> bool:
    return "shared_cluster" in getattr(item, "fixturenames", ())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the cluster that tests share before the first one that starts its own: a process joins one Ray cluster."""
    if item.get_closest_marker("ray") and not _shares_cluster(item):
        _SHARED.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run Ray tests beside one another: pytest 9.2 ignores the groups of pytest-xdist 3.8."""
    ray = [item.nodeid for item in session.items if item.get_closest_marker("ray")]
    if getattr(session.config.option, "loadgroup", False) and not all(name.endswith(f"@{_RAY_GROUP}") for name in ray):
        pytest.exit("this pytest and this pytest-xdist make no groups: install those of constraints.txt", returncode=3)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give a worker a group or else a module at a time, whose tests share clusters; the simulator's share nothing."""
    from xdist.scheduler import LoadScopeScheduling

    class Modules(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.endswith(f"@{_RAY_GROUP}"):
                return _RAY_GROUP
            return nodeid if nodeid.startswith(_SIMULATOR) else nodeid.partition("::")[0]

    return Modules(config, log)


@functools.cache
def cluster_nursery() -> Nursery:
    """Return the process that forks holders and controllers; it ends with this process."""
    return Nursery("memstore.testing.clusters.process_main")


processes.shared_nursery = cluster_nursery


def live_children() -> set[str]:
    """Return "pid command" of this process's children that still run, and of what its nursery forked."""
    nursery_pids = {str(cluster_nursery().pid)} if cluster_nursery.cache_info().currsize else set()
    found = set()
    for task in (path for pid in ("self", *nursery_pids) for path in Path(f"/proc/{pid}/task").iterdir()):
        with contextlib.suppress(OSError):
            for pid in {*(task / "children").read_text().split()} - nursery_pids:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if state not in "ZX" and not any(name in command for name in _KEPT_BY_PYTHON):
                    found.add(f"process {pid} {command.strip()[:120]}")
    return found


def listening_sockets() -> set[str]:
    """Return the TCP and Unix sockets of this process that listen."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    if not inodes:
        return set()
    found = set()
    for table, state_at, state, inode_at in (("tcp", 3, "0A", 9), ("tcp6", 3, "0A", 9), ("unix", 3, "00010000", 6)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[state_at] == state and fields[inode_at] in inodes:
                found.add(f"{table} listener {fields[1] if table != 'unix' else ' '.join(fields[7:])}")
    return found


def store_folders() -> set[str]:
    """Return the stores (and what else is called memstore) under /dev/shm."""
    return {str(path) for top in SHM_DIR.glob("memstore-*") for path in (top.iterdir() if top.is_dir() else [top])}


def busy_threads() -> set[str]:
    """Return threads that are ours by name or keep the process alive."""
    return {
        f"thread {t.name}"
        for t in threading.enumerate()
        if t is not threading.main_thread() and (t.name.startswith("memstore") or not t.daemon)
    }


def parents_of_all() -> dict[int, int]:
    """Return the parent of every process that lives now."""
    parents = {}
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(proc.name)] = int((proc / "stat").read_text().rpartition(")")[2].split()[1])
    return parents


def is_stranger(pid: int, parents: Mapping[int, int], family_pid: int) -> bool:
    """Return whether a live process does not descend from `family_pid`."""
    ancestor = pid
    while ancestor in parents and ancestor != family_pid:
        ancestor = parents[ancestor]
    return pid in parents and ancestor != family_pid


def is_of_others(path: str, family_pid: int) -> bool:
    """Return whether `path` belongs to another run, of which several may go on at once on this machine.

    The names of the kit's stores tell the process that made them. Of another name it is asked whether a process that
    does not descend from `family_pid` has a file of `path` open.
    """
    parents = parents_of_all()
    maker = maker_pid(path)
    if maker is not None:
        return is_stranger(maker, parents, family_pid)
    for pid in parents:
        with contextlib.suppress(OSError):
            if is_stranger(pid, parents, family_pid) and any(
                os.readlink(link).startswith(path + "/") for link in Path(f"/proc/{pid}/fd").iterdir()
            ):
                return True
    return False


def rig_links() -> set[str]:
    """Return the network links of this process's rigs; their namespaces end with the children that keep them."""
    return {f"link {name}" for name in os.listdir("/sys/class/net") if name.startswith(f"ms-{os.getpid()}-")}


_CHECKS: tuple[Callable[[], set[str]], ...] = (live_children, listening_sockets, store_folders, busy_threads, rig_links)


def left_behind(before: set[str], settle_s: float = SETTLE_S) -> set[str]:
    """Return what is there now and was not before, once it had `settle_s` to go away."""
    deadline = time.monotonic() + settle_s
    # another run's, though at some moments, as while its holder restarts, no process has it open
    foreign: set[str] = set()
    while True:
        left = set().union(*(check() for check in _CHECKS)) - before - foreign
        others = {what for what in left if what.startswith(str(SHM_DIR)) and is_of_others(what, os.getpid())}
        foreign |= others
        if left == others or time.monotonic() > deadline:
            return left - others
        time.sleep(0.02)  # nothing announces that another process's listener or folder is gone


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves processes, listeners, threads or stores; give the environment back as it was."""
    environment = dict(os.environ)
    before = set().union(*(check() for check in _CHECKS))
    yield
    os.environ.clear()
    os.environ.update(environment)
    left = left_behind(before)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(sorted(left)), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _session_leaves_nothing_behind() -> Iterator[None]:
    """The same for the whole run, when fixtures of every scope have ended."""
    before = set().union(*(check() for check in _CHECKS))
    yield
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        pytest.fail("Ray is still initialised at the end of the run: a fixture does not shut it down", pytrace=False)
    left = left_behind(before)
    if cluster_nursery.cache_info().currsize:
        cluster_nursery().close()
        cluster_nursery.cache_clear()
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
    if left:
        pytest.fail("the run left behind:\n  " + "\n  ".join(sorted(left)), pytrace=False)


@pytest.fixture(scope="session")
def _nursery() -> Iterator[RankNursery]:
    with RankNursery() as nursery:
        yield nursery


@pytest.fixture
def nursery(_nursery: RankNursery) -> Iterator[RankNursery]:
    """Forks real rank processes; those of a test end with it."""
    yield _nursery
    _nursery.kill_all()


@pytest.fixture(scope="session")
def load_meter() -> Iterator[LoadMeter]:
    """How late the machine is, so that no bound on a stall breaks by load alone."""
    with LoadMeter() as meter:
        yield meter


@pytest.fixture(scope="session")
def dcp_nursery() -> Iterator[RankNursery]:
    """Forks ranks that have imported torch.distributed."""
    with RankNursery("memstore.testing.ranks.dcp_ranks") as nursery:
        yield nursery


@pytest.fixture(scope="module", params=CLOUDS)
def object_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectServer | None]:
    """Start a server of each cloud's storage in turn, Azure's where Azurite is installed; none for "directory"."""
    if request.param == "directory":
        yield None
        return
    pytest.importorskip("obstore")
    if request.param == "az" and not azurite():
        pytest.skip(NO_AZURITE)
    with ObjectServer(request.param, tmp_path_factory.mktemp("objects")) as server:
        yield server


@pytest.fixture(scope="module")
def http_faults(object_server: ObjectServer) -> Iterator[HttpFaults]:
    """Put a layer before the server that fails on request."""
    with HttpFaults(object_server) as faults:
        yield faults


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[object]:
    """Start four hosts in two racks, an EmbeddedCluster with a store, for all tests that lose no host."""
    pytest.importorskip("ray")
    from memstore.testing.clusters.embedded import EmbeddedCluster
    from memstore.testing.clusters.scratch import racks

    with _SHARED:
        yield _SHARED.enter_context(EmbeddedCluster(racks(4), cpus_per_host=4))


@pytest.fixture(scope="module")
def site() -> Iterator[object]:
    """Start three hosts in two racks, an EmbeddedSite for all drills of a file; h1 is Ray's head and cannot be lost."""
    pytest.importorskip("ray")
    from memstore.drills.sites.site import EmbeddedSite
    from memstore.testing.clusters.embedded import EmbeddedCluster
    from memstore.testing.clusters.scratch import racks

    with EmbeddedCluster(racks(3)) as cluster:
        site = EmbeddedSite(cluster)
        yield site
        site.close()
