"""Lightning with its real Trainer: a fit that was broken off goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memstore.config import Config
from memstore.testing.clusters.processes import ProcessCluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Lightning's imports warn about themselves


@pytest.fixture(scope="module")
def case() -> Any:
    pytest.importorskip("lightning.pytorch", reason="pip install -e '.[frameworks]'")
    import lightning_case

    return lightning_case


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    with ProcessCluster(tmp_path / "store", {"h1": {}}, replicas=1) as cluster:
        monkeypatch.setenv("MEMSTORE_HOST", "h1")
        yield cluster.config


@pytest.mark.parametrize("fails_at", [3, 6, 8])
def test_a_fit_goes_on_where_it_broke_off(case: Any, config: Config, fails_at: int) -> None:
    """Broken off within and between epochs: losses, schedule, callbacks and hooks are as in an unbroken fit."""
    whole = case.Module()
    _, counted = case.fit(config, "whole", whole)
    broken = case.Module(fails_at)
    with pytest.raises(RuntimeError, match="planted"):
        case.fit(config, "broken", broken)
    resumed = case.Module()
    checkpoints, count = case.fit(config, "broken", resumed)
    assert checkpoints.restored_step is not None
    assert fails_at - 2 <= checkpoints.restored_step <= fails_at
    assert resumed.losses == {step: whole.losses[step] for step in range(checkpoints.restored_step, 10)}
    assert count.batches == counted.batches == 10
    assert resumed.note == "saved"


def test_puts_come_every_n_optimizer_steps(case: Any, config: Config) -> None:
    """every_n_steps=3 leaves the last multiple; a fit that has nothing left to do trains nothing."""
    case.fit(config, "every", case.Module(), steps=8, every_n_steps=3)
    module = case.Module()
    checkpoints, _ = case.fit(config, "every", module, steps=6, every_n_steps=3)
    assert checkpoints.restored_step == 6
    assert not module.losses


@pytest.mark.parametrize(
    ("strategy", "is_equal"), [("DDPStrategy", True), ("DeepSpeedStrategy", False), ("FSDPStrategy", False)]
)
def test_only_ranks_with_equal_models_share_a_shard(case: Any, strategy: str, is_equal: bool) -> None:
    """DeepSpeed's strategy is a subclass of DDP's, and each of its ranks has a part of the optimizer of its own."""
    from lightning.pytorch import strategies

    from memstore.adapters.lightning import holds_equal_models

    kind = getattr(strategies, strategy)
    assert holds_equal_models(kind.__new__(kind)) is is_equal
