"""Rank, world size and launch key: arguments, torch.distributed, Ray Train, the environment; contradictions (R20)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from memstore.errors import ConfigError
from memstore.shell.rank.launch import Launch, detect_launch, launcher_name, parent_name
from memstore.testing.clusters.processes import ProcessCluster

RANK_SCRIPT = """
import json, os, sys, datetime
import torch.distributed as dist
from memstore.errors import PeerTimeout
from memstore.shell.rank.launch import detect_launch
rank, path, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(path, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
if mode == "alone" and rank == 0:
    dist.destroy_process_group() if sys.stdin.readline() else None
    raise SystemExit
try:
    found = [detect_launch(env=os.environ, timeout_s=1.0 if mode == "alone" else 60.0) for _ in range(2)]
    print(json.dumps([vars(launch) for launch in found]))
except PeerTimeout as exc:
    print(json.dumps(str(exc)))
if mode == "both":
    dist.destroy_process_group()
else:
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def _no_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take Ray and torch.distributed out of sight, also if an earlier test imported them."""
    for name in ("ray", "ray.train", "torch.distributed"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def start_rank(rank: int, path: Path, mode: str, **env: str) -> subprocess.Popen[str]:
    """Start one process that joins a two-rank gloo group and prints what it detects."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "SLURM"))}
    return subprocess.Popen(
        [sys.executable, "-c", RANK_SCRIPT, str(rank), str(path), mode],
        env=clean | {"PYTHONPATH": str(ROOT)} | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_explicit_arguments_stand_alone() -> None:
    """Without any launcher the caller's rank, world size and attempt are the launch."""
    found = detect_launch(1, 4, "run-7", env={})
    assert (found.rank, found.world_size, found.key, found.source) == (1, 4, "run-7", "arguments")
    assert detect_launch(0, 2, env={}).key is None


def test_every_launch_of_a_single_rank_has_a_key_of_its_own() -> None:
    """It needs no other rank's agreement, so each connect() of one process is a launch."""
    keys = {detect_launch(0, 1, env={}).key, detect_launch(env={}).key}
    keys |= {detect_launch(env={"RANK": "0", "WORLD_SIZE": "1"}).key for _ in range(2)}
    assert len(keys - {None}) == 4
    assert detect_launch(0, 1, "run-7", env={}).key == "run-7"


def test_environment_gives_rank_without_key() -> None:
    """RANK and WORLD_SIZE place a rank; they are the same after a restart, so they are no key."""
    env = {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "3"}
    found = detect_launch(env=env)
    assert (found.rank, found.world_size, found.key, found.source) == (2, 4, None, "environment")
    assert detect_launch(attempt="a2", env=env).key == "a2"


def test_a_missing_argument_is_filled_from_the_environment() -> None:
    """An explicit rank that agrees is completed by the detected world size."""
    assert detect_launch(rank=2, env={"RANK": "2", "WORLD_SIZE": "4"}).world_size == 4


@pytest.mark.parametrize(
    ("rank", "world_size", "texts"), [(1, None, ("rank=1", "rank=2")), (None, 8, ("world_size=8", "world_size=4"))]
)
def test_contradiction_names_both_values(rank: int | None, world_size: int | None, texts: tuple[str, str]) -> None:
    """An explicit value that differs from the detected one is refused with both and with where the other came from."""
    with pytest.raises(ConfigError) as caught:
        detect_launch(rank, world_size, env={"RANK": "2", "WORLD_SIZE": "4"})
    for text in (*texts, "RANK / WORLD_SIZE"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("kwargs", "env", "text"),
    [
        ({}, {"SLURM_NTASKS": "8"}, "rank and world_size not known"),
        ({}, {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE=2 says"),
        ({}, {"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX=0 says"),
        ({}, {"MASTER_ADDR": "10.0.0.1"}, "rank and world_size not known"),
        ({"rank": 0}, {}, "world_size not known"),
        ({}, {"RANK": "0"}, "both be set"),
        ({}, {"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero'"),
        ({}, {"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"rank": 2, "world_size": 2}, {}, "rank=2 of world_size=2"),
        ({"rank": 0, "world_size": 0}, {}, "world_size=0"),
        ({"rank": True, "world_size": 2}, {}, "rank=True"),
        ({"rank": 0, "world_size": 1, "attempt": ""}, {}, "attempt=''"),
        ({"rank": 0, "world_size": 1, "attempt": 3}, {}, "attempt=3"),
    ],
)
def test_bad_input_is_refused_with_the_value(kwargs: dict[str, object], env: dict[str, str], text: str) -> None:
    """Anything that cannot be a place in a launch is one ConfigError that shows what was given."""
    with pytest.raises(ConfigError) as caught:
        detect_launch(env=env, **kwargs)  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_a_plain_script_is_rank_0_of_1_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A launcher of one process is none; a child of multiprocessing may be one of several."""
    alone: list[dict[str, str]] = [{}, {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {"OMPI_MCA_btl": "tcp"}]
    for env in alone:
        caplog.clear()
        found = detect_launch(env=env)
        assert (found.rank, found.world_size, found.source) == (0, 1, "alone")
        assert [record.getMessage() for record in caplog.records] == [
            "memstore: no launcher, rank= or world_size=: this process is rank 0 of 1"
        ]
    code = "from memstore.shell.rank.launch import detect_launch; detect_launch(env={})"
    start = f"m.get_context('spawn').Process(target=exec, args=({code!r},)).start()"
    run = subprocess.run(
        [sys.executable, "-c", f"import multiprocessing as m; {start}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "a parent that uses multiprocessing says that there may be several processes" in run.stderr


README_PRELUDE = """
import memstore.config
memstore.config.Config.__init__.__kwdefaults__["store"] = {store!r}  # not the store of the user that runs this test
state, STEPS = {{"step": 0}}, 3
def train_step(_): state["step"] += 1
"""


def test_the_first_loops_of_readme_and_quickstart_run_as_pasted(tmp_path: Path) -> None:
    """Under plain python, twice: the second one goes on and has nothing left to do."""
    loop = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    with ProcessCluster(tmp_path / "c", {"h1": {}}) as cluster:
        script = tmp_path / "train.py"
        shown = "\nprint(got.step if got else None, state['step'])\n"
        script.write_text(README_PRELUDE.format(store=cluster.config.store) + loop + shown)
        said = []
        for _ in range(2):
            run = subprocess.run(
                [sys.executable, str(script)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            assert run.returncode == 0, run.stderr
            assert run.stderr.count("this process is rank 0 of 1") == 1
            said.append(run.stdout.strip())
        assert said == ["None 3", "2 3"]  # into= fills the step as well
        page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
        prelude = README_PRELUDE.format(store=cluster.config.store).partition("state, STEPS")[0]
        script.write_text(prelude + page.split("```python\n")[1].split("```")[0].replace(", 100)", ", 10)"))
        for began, last in (("a new job", "step 9 loss"), ("Checkpoint(step=9, attempt=1, 12012032 bytes", "")):
            run = subprocess.run(
                [sys.executable, str(script)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            assert run.returncode == 0, run.stderr
            assert run.stdout.startswith(began)
            assert last in run.stdout.splitlines()[-1]


def test_launcher_names_tell_runs_apart_and_survive_restarts() -> None:
    """A run id names the launcher; torchrun's default id does not, and restart counters never matter."""
    assert launcher_name({"TORCHELASTIC_RUN_ID": "r1", "TORCHELASTIC_RESTART_COUNT": "0"}) == launcher_name(
        {"TORCHELASTIC_RUN_ID": "r1", "TORCHELASTIC_RESTART_COUNT": "1"}
    )
    assert launcher_name({"TORCHELASTIC_RUN_ID": "r1"}) != launcher_name({"TORCHELASTIC_RUN_ID": "r2"})
    assert launcher_name({"TORCHELASTIC_RUN_ID": "none"}) == launcher_name({})
    assert os.getppid() == 1 or f":{os.getppid()}:" in launcher_name({})  # of pid 1, see the next test
    assert launcher_name({"SLURM_JOB_ID": "11", "SLURM_STEP_ID": "0"}) == "slurm:11.0"


def test_a_parent_that_says_nothing_is_no_launcher() -> None:
    """pid 0 is a parent of another pid namespace, pid 1 adopts orphans; a reused pid has another start."""
    own, other = (40, 7), (41, 8)
    for unknown in ((0, None), (1, 3), (30, None)):
        assert parent_name("m", parent=unknown, own=own) != parent_name("m", parent=unknown, own=other)
        assert parent_name("m", parent=unknown, own=own) == parent_name("m", parent=unknown, own=own)
    assert parent_name("m", parent=(30, 5), own=own) == parent_name("m", parent=(30, 5), own=other)
    names = {parent_name(m, parent=(pid, start), own=own) for m in "mn" for pid in (30, 31) for start in (5, 6)}
    assert len(names) == 8
    assert not any(" " in name for name in names)  # an attempt's launchers are joined by spaces


CONTAINER_SCRIPT = """
import json, os, sys, memstore
config = memstore.Config(store=sys.argv[1], connect_timeout_s=20)
try:
    store = memstore.connect("train", rank=0, world_size=1, config=config)
except memstore.JobBusyError as error:
    print("busy", os.getppid(), error, flush=True)
    raise SystemExit
store.get()
store.put(0, {"a": 1}).wait("committed", 20)
print("trains", os.getppid(), flush=True)
sys.stdin.readline()
store.put(1, {"a": 2}).wait("committed", 20)
print("went on", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="enters a pid namespace")
def test_two_starts_in_one_container_are_two_launchers(tmp_path: Path) -> None:
    """Each comes from outside the pid namespace, so both have pid 0 as parent: the second does not fence the first."""
    with ProcessCluster(tmp_path, {"h1": {}}) as cluster:
        inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", "echo $$; exec sleep 600"]
        with subprocess.Popen(inside, stdout=subprocess.PIPE, text=True) as box:
            try:
                assert box.stdout is not None
                assert box.stdout.readline() == "1\n"
                children = Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split()
                enter = ["nsenter", "--target", children[0], "--pid", "--mount", sys.executable, "-c", CONTAINER_SCRIPT]
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                with subprocess.Popen([*enter, cluster.config.store], cwd=ROOT, **pipes) as first:
                    assert first.stdout is not None
                    assert first.stdout.readline() == "trains 0\n"
                    second = subprocess.run(
                        [*enter, cluster.config.store],
                        cwd=ROOT,
                        capture_output=True,
                        text=True,
                        timeout=120,
                        check=False,
                    )
                    assert second.stdout.startswith("busy 0 job 'train' is being trained"), second.stderr
                    assert first.communicate("\n", timeout=120)[0] == "went on\n"
            finally:
                box.kill()


class FakeTrainWorker:
    """Just enough of Ray inside a Train worker: initialised, in a placement group, with a context."""

    def __init__(self, *, group: str | None, is_worker: bool = True) -> None:
        self.group, self.is_worker = group, is_worker

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the fake in place of the real modules."""
        group = None if self.group is None else types.SimpleNamespace(id=bytes.fromhex(self.group))
        ray = types.SimpleNamespace(
            is_initialized=lambda: True,
            util=types.SimpleNamespace(get_current_placement_group=lambda: group),
            get_runtime_context=lambda: types.SimpleNamespace(get_job_id=lambda: "07000000"),
        )
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace(get_context=self.get_context))

    def get_context(self) -> types.SimpleNamespace:
        """Answer as Train does: a context inside of a worker, RuntimeError outside."""
        if not self.is_worker:
            raise RuntimeError("cannot be used outside of a Ray Train training function")
        return types.SimpleNamespace(
            get_world_rank=lambda: 3, get_world_size=lambda: 4, get_experiment_name=lambda: "llama"
        )


def test_ray_train_worker_is_keyed_by_its_placement_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a Ray Train worker the placement group is the key, before the environment and the caller's attempt."""
    FakeTrainWorker(group="ab12").install(monkeypatch)
    found = detect_launch(attempt="mine", env={"RANK": "0", "WORLD_SIZE": "1"})
    assert found == Launch(3, 4, "ray-pg:ab12", "ray-train:07000000:llama", "ray-train")
    with pytest.raises(ConfigError, match=r"rank=0 .*Ray Train's context says rank=3"):
        detect_launch(rank=0, env={})


@pytest.mark.parametrize("worker", [FakeTrainWorker(group=None), FakeTrainWorker(group="ab", is_worker=False)])
def test_ray_outside_of_train_is_not_a_launch(worker: FakeTrainWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver and an actor of the caller's own fall back to their arguments; their launcher is the Ray job."""
    worker.install(monkeypatch)
    found = detect_launch(1, 2, "k", env={})
    assert found == Launch(1, 2, "k", "ray-job:07000000", "arguments")


def test_a_ray_that_is_still_being_imported_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-imported module in sys.modules has no attributes yet and must not break the detection."""
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    assert detect_launch(0, 1, env={}).source == "arguments"


@pytest.mark.slow
def test_torch_key_is_equal_on_ranks_and_new_for_every_call(tmp_path: Path) -> None:
    """Two real gloo ranks get rank 0's key and rank 0's launcher, and another key the next time."""
    ranks = [start_rank(rank, tmp_path / "store", "both", TORCHELASTIC_RUN_ID=f"r{rank}") for rank in range(2)]
    first, second = (json.loads(process.communicate(timeout=90)[0].splitlines()[-1]) for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0]
    assert [launch["key"] for launch in first] == [launch["key"] for launch in second]
    assert first[0]["key"] != first[1]["key"]
    assert len(first[0]["key"]) == len("torch:") + 32
    assert [launch["rank"] for launch in (first[0], second[0])] == [0, 1]
    assert {launch["launcher"] for launch in (*first, *second)} == {"torchelastic:r0"}
    assert {launch["source"] for launch in (*first, *second)} == {"torch.distributed"}


@pytest.mark.slow
def test_torch_key_waits_no_longer_than_its_deadline(tmp_path: Path) -> None:
    """A rank whose rank 0 never calls gets PeerTimeout naming the call, long before the group's own timeout."""
    absent, waiting = (start_rank(rank, tmp_path / "store", "alone") for rank in range(2))
    out, _ = waiting.communicate(timeout=45)
    absent.communicate("go\n", timeout=45)
    assert "every rank must call memstore.connect()" in out
    assert "rank 1 of 2" in out
