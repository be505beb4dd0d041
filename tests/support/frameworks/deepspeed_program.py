"""DeepSpeed on the CPU: a model with a frozen layer and a buffer of each rank's own under ZeRO."""

from __future__ import annotations

import os

import framework_rank

rank = framework_rank.enter()
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed  # noqa: E402
import torch  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # collectives that it compiles when first used


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
        self.inner = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * batch.mean(0))
        result: torch.Tensor = self.inner(self.frozen(batch) - self.mean.to(batch.dtype))
        return result


def main() -> None:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    kind = framework_rank.option("TYPE", "bf16")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": int(framework_rank.option("ZERO", "1")),
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 64,
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        **({} if kind == "fp32" else {kind: {"enabled": True}}),
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    checkpoints = None
    if framework_rank.job():
        import memstore
        from memstore.adapters.deepspeed import EngineCheckpoints

        store = memstore.connect(framework_rank.job(), config=framework_rank.config())
        checkpoints = EngineCheckpoints(engine, store)
        client = checkpoints.load()
        if client is not None:
            assert client["note"] == f"step {engine.global_steps}"
    while engine.global_steps < framework_rank.STEPS:
        step = engine.global_steps + 1
        batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(step * 2 + rank))
        batch = batch.to(next(model.parameters()).dtype)
        loss = (engine(batch) - batch).float().square().mean()
        engine.backward(loss)
        engine.step()
        framework_rank.report(step, loss.item(), batch.float(), torch.tensor(engine.get_lr()))
        if checkpoints is not None:
            checkpoints.save({"note": f"step {step}"})
    if checkpoints is not None:
        store.flush()
        store.close()


if __name__ == "__main__":
    main()
