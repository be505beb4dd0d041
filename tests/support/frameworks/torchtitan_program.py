"""torchtitan's own Trainer on the CPU: its debug model cut to two layers, its loader over texts that are written here.

torchtitan expects an accelerator; the names that it asks for one are answered here, and nothing else is changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import framework_rank
import torch


def run_on_the_cpu() -> None:
    """Answer what torchtitan asks of an accelerator; gloo knows no PREMUL_SUM, a CPU build of torch no triton."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.set_device = lambda device: None
    framework_rank.stub_triton()
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_a_sum(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_after_a_sum
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.utils as distributed

    peaks = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: peaks, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    distributed.set_pg_timeouts = lambda **_: None


def write_assets(folder: Path) -> None:
    """Write a tokenizer of single letters, and texts."""
    from tokenizers import Tokenizer, models

    letters = "abcdefghijklmnopqrstuvwxyz "
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<s>", "</s>"])}
    folder.mkdir(exist_ok=True)
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "texts").mkdir(exist_ok=True)
    texts = ["".join(letters[(n * k + k * k) % 27] for k in range(90 + n % 40)) for n in range(400)]
    (folder / "texts/data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def configuration(folder: Path) -> Any:
    import torchtitan.models.llama3 as llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()  # flex attention wants triton
    from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss

    config = llama3_debugmodel_ce_loss()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 64, 4, framework_rank.STEPS
    config.training.mixed_precision_param, config.training.disable_cuda_graphs = "float32", True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.tensor_parallel_degree = int(framework_rank.option("TP", "1"))
    config.debug.seed, config.debug.deterministic, config.debug.enable_structured_logging = 7, True, False
    config.validator.enable = False
    config.hf_assets_path, config.dataloader.dataset_path = str(folder), str(folder / "texts")
    config.dataloader.num_workers = int(framework_rank.option("WORKERS", "0"))
    if framework_rank.job():
        from memstore.adapters.torchtitan import MemstoreCheckpointManager

        config.checkpoint = MemstoreCheckpointManager.Config(
            enable=True,
            interval=1,
            job=framework_rank.job(),
            store=framework_rank.config(),
            last_save_model_only=framework_rank.option("LAST", "full") == "model",
            async_mode=framework_rank.option("ASYNC", "disabled"),
        )
    config.dump_folder = str(folder / "out")
    return config


def watch(trainer_class: Any, processor: Any) -> None:
    """Report the loss that the trainer logs, and the batches that it takes."""
    seen: list[torch.Tensor] = []
    train_step = trainer_class.train_step

    def log(self: Any, step: int, average: float, greatest: float, norm: float, **_: Any) -> None:
        framework_rank.report(step, average, *seen, torch.tensor(norm))

    def train(self: Any, batches: Any) -> None:
        seen.clear()

        def watched() -> Any:
            for batch in batches:
                seen.append(batch[0]["input"])
                yield batch

        train_step(self, watched())

    processor.log, trainer_class.train_step = log, train


if __name__ == "__main__":
    rank = framework_rank.enter()
    run_on_the_cpu()
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.tools.logging import init_logger
    from torchtitan.trainer import Trainer

    init_logger()
    watch(Trainer, MetricsProcessor)
    assets = Path.cwd() / f"assets-{rank}"
    write_assets(assets)
    trainer = configuration(assets).build()
    try:
        trainer.train()
    finally:
        trainer.close()
