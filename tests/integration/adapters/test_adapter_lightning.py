"""Lightning with its real Trainer: a fit that was broken off goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memstore.config import Config
from memstore.errors import ConfigError
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
    count, resumed = check_goes_on(case, config, whole, fails_at)
    assert count.batches == counted.batches == 10
    assert resumed.note == "saved"


@pytest.mark.parametrize(
    ("loader", "accumulated"), [("in_order", 1), ("by_sampler", 1), ("by_sampler", 2), ("shuffled", 1)]
)
def test_what_is_drawn_and_read_is_as_in_an_unbroken_fit(
    case: Any, config: Config, loader: str, accumulated: int
) -> None:
    """Dropout, noise of the reading process, shuffles, workers, accumulation; within and between epochs."""
    options: dict[str, Any] = {"trainer": {"accumulate_grad_batches": accumulated}}
    whole = case.Module()
    make = {"in_order": lambda: case.in_order(workers=1)}.get(loader, getattr(case, loader))
    case.fit(config, "whole", whole, loader=make(), **options)
    for fails_at in (6, 8) if accumulated == 1 else (3, 4):
        check_goes_on(case, config, whole, fails_at, make, **options)


def check_goes_on(
    case: Any, config: Config, whole: Any, fails_at: int, loader: Any = lambda: None, **options: Any
) -> tuple[Any, Any]:
    """Fit until a step fails, fit again from the store, compare the losses from there on with the unbroken fit's."""
    job = f"broken-{fails_at}"
    with pytest.raises(RuntimeError, match="planted"):
        case.fit(config, job, case.Module(fails_at), loader=loader(), **options)
    resumed = case.Module()
    checkpoints, count = case.fit(config, job, resumed, loader=loader(), **options)
    assert checkpoints.restored_step is not None
    assert fails_at - 2 <= checkpoints.restored_step <= fails_at
    assert resumed.losses == {step: whole.losses[step] for step in range(checkpoints.restored_step, 10)}
    return count, resumed


def test_a_second_fit_goes_on_in_the_data(case: Any, config: Config) -> None:
    """Lightning ends the iterator, and the workers, of every loader with a fit; the place stays."""
    data, module, whole = case.in_order(workers=1), case.Module(), case.Module()
    case.fit(config, "whole", whole, steps=6, loader=case.in_order(workers=1))
    case.fit(config, "twice", module, steps=3, loader=data)
    assert data._iterator is None
    case.fit(config, "twice", module, steps=6, loader=data)
    assert module.losses == whole.losses


def test_a_callback_that_averages_weights_goes_on(case: Any, config: Config) -> None:
    """It keeps them by the hooks of checkpoints, not by a state of its own."""
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")

    def average(job: str, fails_at: int | None = None) -> dict[str, torch.Tensor]:
        callback = averaging.EMAWeightAveraging(decay=0.5)
        module = case.Module(fails_at)
        case.fit(config, job, module, trainer={"callbacks": [callback]})
        return dict(module.state_dict())  # what is averaged, at the end of a fit

    whole = average("whole")
    with pytest.raises(RuntimeError, match="planted"):
        average("broken", 6)
    for name, tensor in average("broken").items():
        assert torch.equal(tensor, whole[name])


def test_data_without_a_length_is_refused(case: Any, config: Config) -> None:
    """Lightning reads one batch ahead of it; the remedy that the error names makes the length known."""

    class Endless(torch.utils.data.IterableDataset[torch.Tensor]):
        __iter__ = staticmethod(case.endless)

    loader = torch.utils.data.DataLoader(Endless(), batch_size=None)
    with pytest.raises(ConfigError, match=r"has no length.*limit_train_batches=<batches of an epoch>"):
        case.fit(config, "endless", case.Module(), steps=3, loader=loader)
    checkpoints, _ = case.fit(
        config, "endless", case.Module(), steps=3, loader=loader, trainer={"limit_train_batches": 2}
    )
    assert checkpoints.restored_step is None


def test_puts_come_every_n_optimizer_steps(case: Any, config: Config) -> None:
    """put_every=3 leaves the last multiple; a fit that has nothing left to do trains nothing."""
    config = config.with_fields({"put_every": 3})
    case.fit(config, "every", case.Module(), steps=8)
    module = case.Module()
    checkpoints, _ = case.fit(config, "every", module, steps=6)
    assert checkpoints.restored_step == 6
    assert not module.losses


def test_with_epoch_the_ends_of_epochs_are_put(case: Any, config: Config) -> None:
    """Epochs of 4 batches, two of which make a step: of 5 steps the fourth is what is left."""
    config = config.with_fields({"put_every": "epoch"})
    options: dict[str, Any] = {"trainer": {"accumulate_grad_batches": 2, "limit_train_batches": 4}}
    case.fit(config, "epochs", case.Module(), steps=5, **options)
    module = case.Module()
    checkpoints, _ = case.fit(config, "epochs", module, steps=6, **options)
    assert checkpoints.restored_step == 4
    assert sorted(module.losses) == [4, 5]


@pytest.mark.parametrize(
    ("strategy", "is_equal"), [("DDPStrategy", True), ("DeepSpeedStrategy", False), ("FSDPStrategy", False)]
)
def test_only_ranks_with_equal_models_share_a_shard(case: Any, strategy: str, is_equal: bool) -> None:
    """DeepSpeed's strategy is a subclass of DDP's, and each of its ranks has a part of the optimizer of its own."""
    from lightning.pytorch import strategies

    from memstore.adapters.lightning import holds_equal_models

    kind = getattr(strategies, strategy)
    assert holds_equal_models(kind.__new__(kind)) is is_equal
