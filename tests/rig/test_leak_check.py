"""The check after every test sees what a test can leave behind; without this, a green run would prove nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import conftest
import pytest

from memstore.testing.clusters.processes import wait_for
from memstore.testing.clusters.scratch import scratch_folder


@contextmanager
def child() -> Iterator[str]:
    """Run a process that waits for its input to end."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"!")
        assert process.stdout.read(1) == b"!"  # it runs: before that it may have no command line yet
        yield f"process {process.pid} cat"


@contextmanager
def tcp_listener() -> Iterator[str]:
    """Listen on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f":{listener.getsockname()[1]:04X}"


@contextmanager
def unix_listener() -> Iterator[str]:
    """Listen on an abstract Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0leak-{os.getpid()}")
        listener.listen()
        yield f"unix listener @leak-{os.getpid()}"


@contextmanager
def store_folder() -> Iterator[str]:
    """Make a store's folder under /dev/shm."""
    top = conftest.SHM_DIR / f"memstore-leak-p{os.getpid()}"
    (top / "store").mkdir(parents=True)
    try:
        yield str(top / "store")
    finally:
        shutil.rmtree(top)


@contextmanager
def named_thread() -> Iterator[str]:
    """Run a daemon thread with a name of ours until ordered to end."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(30,), name="memstore-link", daemon=True)
    thread.start()
    try:
        yield "thread memstore-link"
    finally:
        end.set()
        thread.join(10)


@pytest.mark.parametrize("leak", [child, tcp_listener, unix_listener, store_folder, named_thread])
def test_each_kind_of_leak_is_seen_and_its_end_too(leak: object) -> None:
    """What was started is reported by name while it is there, and no longer afterwards."""
    before = set().union(*(check() for check in conftest._CHECKS))
    with leak() as expected:  # type: ignore[operator]
        left = conftest.left_behind(before, settle_s=0)
    assert any(expected in what for what in left), left
    assert conftest.left_behind(before) == set()


def test_a_store_that_another_family_uses_is_not_ours(tmp_path: Path) -> None:
    """A folder held open by a process that is no descendant belongs to another run on this machine."""
    held = tmp_path / "memstore-0" / "store"
    held.mkdir(parents=True)
    command = ["bash", "-c", f"exec 9>{held}/lock; echo held; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        stranger = -1  # the head of a family to which the holder of the file does not belong
        assert conftest.is_of_others(str(held), stranger)
        assert not conftest.is_of_others(str(held), os.getpid())
    assert not conftest.is_of_others(str(held), stranger)


def test_a_process_of_a_test_that_has_died_meanwhile_ends() -> None:
    """A test killed while its processes start leaves none of them behind."""
    command = [sys.executable, "-m", "memstore.testing.clusters.process_main"]
    spec = json.dumps({"role": "controller", "parent": 1})
    assert subprocess.run(command, input=spec, text=True, timeout=120, check=False).returncode == 1


def runs_whole(folder: Path, program: str) -> subprocess.Popen[str]:
    """Start a test run of its own in a folder: one module, under a copy of this suite's conftest."""
    text = Path(conftest.__file__).read_text().replace("SETTLE_S = 30.0", "SETTLE_S = 0.1")
    (folder / "conftest.py").write_text(text)
    (folder / "test_leaks.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-c", "/dev/null"]
    return subprocess.Popen(
        [*command, "--rootdir", str(folder), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_leaking_test_fails(tmp_path: Path) -> None:
    """A whole run in which one test leaves a child behind ends with that test's error, naming the child."""
    run = runs_whole(
        tmp_path,
        "import subprocess\n"
        "def test_leaks():\n"
        "    global process\n"
        "    process = subprocess.Popen(['sleep', '20'])\n"
        "def test_ends():\n"
        "    process.kill(), process.wait()\n",
    )
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 1
    assert "1 error" in said
    assert "sleep 20" in said


@pytest.mark.slow
def test_two_runs_at_once_do_not_report_each_others_stores(tmp_path: Path) -> None:
    """A store that another run makes while a test goes on, and that is open nowhere, is no leak of that test."""
    begun, made = tmp_path / "begun", tmp_path / "made"
    run = runs_whole(
        tmp_path,
        "import pathlib, time\n"
        "from memstore.shell.arena.folder import make_folder\n"
        "from memstore.testing.clusters.scratch import scratch_store_name\n"
        "def test_meanwhile_others_make_stores():\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n"
        f"    while not pathlib.Path({str(made)!r}).exists():\n"
        "        time.sleep(0.01)\n"
        "def test_leaves_a_store():\n"
        "    global store\n"
        "    store = make_folder('/dev/shm', store=scratch_store_name('left'), host='h').parent\n"
        "def test_removes_it():\n"
        "    (store / 'h').rmdir(), store.rmdir()\n",
    )
    wait_for(lambda: begun.exists() or run.poll() is not None, "the other run's test")
    with scratch_folder() as folder:
        made.touch()
        said, _ = run.communicate(timeout=120)
    assert "ERROR at teardown of test_leaves_a_store" in said
    assert f"left-p{run.pid}-" in said
    assert folder.parent.name not in said
    assert "3 passed, 1 error" in said
