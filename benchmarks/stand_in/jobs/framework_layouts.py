"""Layouts of train.py that frameworks make: megatron-core's TP by stages by replicas, DeepSpeed's ZeRO-1.

Their hosts do not run ahead: Megatron waits for its device at each message between stages, as it does by default, and
both look at the gradient's norm in each step.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.stand_in.faults import Script
from benchmarks.stand_in.jobs.layouts import BATCH, Layout
from torch import nn

SEQUENCE, WORDS = 16, 64


def megatron_gpt(tensor: int, stages: int, width: int, **optimizer: Any) -> tuple[Any, Any, Any]:
    """The config of a GPT of one layer a stage, this rank's part of it in Megatron's DDP, and its optimizer.

    ``tensor``: tensor-parallel ranks. ``optimizer``: fields of Megatron's `OptimizerConfig`.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions, and there is no Triton
    warnings.filterwarnings("ignore", module="megatron")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=stages,
        hidden_size=width,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=WORDS,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).cuda()
    wanted = OptimizerConfig(lr=0.01, **optimizer)
    parallel = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=wanted.use_distributed_optimizer
    )
    module = DistributedDataParallel(config, parallel, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = module.no_sync
    made = get_megatron_optimizer(wanted, [module], use_gloo_process_groups=False)
    config.grad_scale_func = made.scale_loss
    return config, module, made


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer of torch's inside one of Megatron's."""
    (inner,) = getattr(optimizer, "chained_optimizers", [optimizer])
    return inner.optimizer


def gpt_loss(model: nn.Module, words: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """What Megatron's schedule wants of a forward pass of ``words`` ([1, SEQUENCE]), which predicts them."""
    places = torch.arange(SEQUENCE, device="cuda")[None]
    mask = torch.zeros(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda")
    return model(words, places, mask, labels=words), _mean


class Megatron(Layout):
    """GPT by megatron-core: 2 tensor-parallel ranks by 2 stages by replicas, with its distributed optimizer."""

    def __init__(self, arguments: argparse.Namespace, script: Script) -> None:
        self.script, self.step = script, 0
        stages = min(2, dist.get_world_size() // 2)
        _, self.module, self.optimizer = megatron_gpt(
            2, stages, arguments.width, use_distributed_optimizer=True
        )
        self._watch_backward(self.module.module.decoder.layers[0].mlp)
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._forward_backward = get_forward_backward_func()

    def make_optimizer(self) -> tuple[Any, torch.optim.Optimizer]:
        return self.optimizer, torch_optimizer(self.optimizer)

    def forward_backward(self) -> None:
        self.module.zero_grad_buffer()
        self.script.at(self.step, "forward")
        self._forward_backward(
            forward_step_func=self._forward,
            data_iterator=iter(lambda: None, 0),
            model=[self.module],
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=1,
        )

    @staticmethod
    def _forward(_: Iterator[Any], model: nn.Module) -> tuple[torch.Tensor, Any]:
        return gpt_loss(model, torch.zeros(1, SEQUENCE, dtype=torch.int64, device="cuda"))


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = losses.mean()
    return loss, {"loss": loss.detach()}


class DeepSpeed(Layout):
    """Replicas by DeepSpeed's engine, ZeRO stage 1."""

    def __init__(self, arguments: argparse.Namespace, script: Script) -> None:
        os.environ["DS_BUILD_OPS"] = "0"
        import deepspeed

        super().__init__(arguments, script)
        self._watch_backward(self.module[arguments.layers // 2])
        wanted = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 1, "reduce_bucket_size": int(arguments.bucket_mb * 2**18)},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "steps_per_print": 1 << 30,
        }
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01, fused=True)
        self.engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=self.optimizer, config=wanted, dist_init_required=False
        )

    def make_optimizer(self) -> tuple[Any, torch.optim.Optimizer]:
        return self.engine, self.optimizer

    def forward_backward(self) -> None:
        samples = torch.randn(BATCH, self.width, device="cuda", dtype=torch.bfloat16)
        self.script.at(self.step, "forward")
        self.engine.backward(self.engine(samples).float().sum())


FRAMEWORKS = {"megatron": Megatron, "deepspeed": DeepSpeed}
