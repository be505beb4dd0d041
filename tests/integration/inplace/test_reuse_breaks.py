"""Training that breaks off anywhere goes on with the model it has, bit-equal to a run that never broke."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT
from reuse_program import BREAKS, LAYOUTS, LOST, STEPS
from variants import later

PROGRAM = ROOT / "tests" / "support" / "reuse_program.py"
PLAYED = {"tensor-parallel", "scattered"}
pytestmark = pytest.mark.timeout(300)


def ranks_of(layout: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Play a layout's ranks; return what each found, and what was logged."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), layout],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(LAYOUTS[layout][0])], done.stderr


@pytest.mark.parametrize("layout", [*sorted(PLAYED), *later(*sorted(LAYOUTS.keys() - PLAYED))])
def test_a_model_goes_on_from_wherever_it_broke_off(layout: str, tmp_path: Path) -> None:
    """It broke off in forward, backward, clip_grad_norm_ and the optimizer's step; one rank was replaced each time.

    The survivors' tensors are those that they had (the program asserts it), and nothing of an old group is left. With
    "scattered" no rank can keep its model.
    """
    found, logged = ranks_of(layout, tmp_path)
    is_reused = layout != "scattered"
    for rank, one in enumerate(found):
        assert one["losses"] == one["unbroken"]
        assert len(one["losses"]) == STEPS
        assert one["different"] == []
        assert [error.split(":")[0] for error in one["errors"]] == list(BREAKS.values())
        assert one["builds"] == (1 if is_reused and rank != LOST else len(BREAKS) + 1)
        if is_reused:
            assert one["counts"][-1] <= one["counts"][0], "a thread or socket of an old group is left"
    assert ("builds model again" in logged) == (not is_reused)
    assert is_reused or "give parallelize_module() and distribute_tensor() src_data_rank=None" in logged
