"""Megatron's GPTModel, DistributedOptimizer and pipeline schedule; its own save_checkpoint and load_checkpoint.

The loop is what megatron/training/training.py does around them; its pretrain() needs CUDA from its first line on.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import framework_rank

rank = framework_rank.enter()
import megatron_cpu  # noqa: E402

megatron_cpu.run_on_the_cpu()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.training import global_vars  # noqa: E402
from megatron.training.arguments import parse_args  # noqa: E402
from megatron.training.checkpointing import load_checkpoint, save_checkpoint  # noqa: E402

TP, PP = int(framework_rank.option("TP", "1")), int(framework_rank.option("PP", "1"))
LAYERS, WIDTH, HEADS, WORDS, LENGTH = 4, 32, 4, 128, 16


def take_arguments() -> Any:
    """Let Megatron parse its arguments."""
    sys.argv[1:] = [
        "--use-distributed-optimizer", "--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-algo",
        framework_rank.option("ALGO", "fully_parallel"), "--tensor-model-parallel-size", str(TP),
        "--pipeline-model-parallel-size", str(PP), "--num-layers", str(LAYERS), "--hidden-size", str(WIDTH),
        "--num-attention-heads", str(HEADS), "--max-position-embeddings", str(LENGTH), "--micro-batch-size", "2",
        "--ckpt-format", "torch_dist",
    ]  # fmt: skip
    args = parse_args()
    args.use_dist_ckpt, args.padded_vocab_size = True, WORDS
    args.data_parallel_size = dist.get_world_size() // (TP * PP)
    args.global_batch_size = args.micro_batch_size * args.data_parallel_size * 2
    args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    global_vars.set_args(args)
    init_num_microbatches_calculator(rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
    return args


def build() -> tuple[Any, Any, Any]:
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(config, ddp_config, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.01, use_distributed_optimizer=True, clip_grad=1.0
        ),
        [ddp],
    )
    config.grad_scale_func = optimizer.scale_loss
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=4,
        lr_decay_steps=40,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=40,
        wd_incr_style="constant",
    )
    return ddp, optimizer, schedule


class Training:
    """One rank's loop."""

    def __init__(self) -> None:
        self.args = take_arguments()
        self.ddp, self.optimizer, self.schedule = build()
        self.forward_backward = get_forward_backward_func()
        self.seen: list[torch.Tensor] = []

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = step * 1000 + parallel_state.get_data_parallel_rank() * 10 + len(self.seen)
        words = torch.randint(0, WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        self.seen.append(words)
        return words[:, :-1], words[:, 1:]

    def train(self, step: int) -> None:
        self.seen = []

        def forward(batches: Any, model: Any) -> Any:
            words, labels = self.batch(step)
            mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
            result = model(words, torch.arange(LENGTH)[None].expand(2, -1), mask, labels=labels)
            return result, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        done = self.forward_backward(
            forward_step_func=forward,
            data_iterator=iter([0] * 8),
            model=[self.ddp],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        self.schedule.step(increment=1)
        self.args.consumed_train_samples += self.args.global_batch_size
        loss = sum(float(part["loss"]) for part in done) if done else 0.0
        framework_rank.report(step, loss, *self.seen, torch.tensor(float(norm)))


def fill(optimizer: Any) -> None:
    """Give torch's Adam its state: without Apex and TransformerEngine Megatron cannot load into an empty one."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for tensor in group["params"]:
                moments = {"exp_avg": torch.zeros_like(tensor), "exp_avg_sq": torch.zeros_like(tensor)}
                part.optimizer.state[tensor] = {**moments, "step": torch.tensor(0.0)}


def take_steps(optimizer: Any) -> None:
    """Count Adam's steps on: Megatron restores the number in the groups, where Apex and TransformerEngine have it."""
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for tensor in group["params"]:
                part.optimizer.state[tensor]["step"] = torch.tensor(float(group["step"]))


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(TP, PP)
    model_parallel_cuda_manual_seed(7)
    training, context = Training(), {}
    first = 1
    if framework_rank.job():
        import memstore
        from memstore.adapters.megatron import LocalCheckpointManager

        store = memstore.connect(framework_rank.job(), config=framework_rank.config())
        context["local_checkpoint_manager"] = LocalCheckpointManager(store, encode=pickle.dumps, decode=pickle.loads)
        if context["local_checkpoint_manager"].find_latest() != -1:
            fill(training.optimizer)
        with torch.no_grad():
            step, _ = load_checkpoint(
                [training.ddp], training.optimizer, training.schedule, checkpointing_context=context
            )
        if step:
            take_steps(training.optimizer)
        first = step + 1
    for step in range(first, framework_rank.STEPS + 1):
        training.train(step)
        if context:
            save_checkpoint(
                step,
                [training.ddp],
                training.optimizer,
                training.schedule,
                0,
                checkpointing_context=context,
                non_persistent_ckpt=True,
            )
    if context:
        store.flush()
        store.close()


if __name__ == "__main__":
    main()
