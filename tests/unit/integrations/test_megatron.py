"""Shares in megatron-core: its own schedule and calculator in real processes, against training on one rank.

Its schedule allocates a counter on the GPU; without one the tests have it on the CPU. All else is megatron-core's.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.session.test_shares import Job

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

COUNT = 12
TRAIN = """
import json, os, sys
import torch, torch.distributed as dist
import keepstep
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.enums import ModelType
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.pipeline_parallel import schedules
from keepstep.integrations.megatron import MicroBatches

zeros = torch.zeros
torch.zeros = lambda *size, device=None, **kw: zeros(*size, device="cpu" if device == "cuda" else device, **kw)
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], int(os.environ["WORLD_SIZE"])),
                        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
parallel_state.initialize_model_parallel()
session = keepstep.Session()
replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
calculator.init_num_microbatches_calculator(session.rank, None, 36, 3, replicas)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8, dtype=torch.float64)
model.model_type = ModelType.encoder_or_decoder
model.set_input_tensor = lambda tensor: None
model.config = config = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=1, grad_scale_func=lambda loss: loss * 1.0
)
config.calculate_per_token_loss = os.environ["KIND"] == "tokens"
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.restore(model=model, optimizer=optimizer)
batches = MicroBatches(session, config, replica, replicas)

def forward(data_iterator, model):
    data = torch.arange(24, dtype=torch.float64).reshape(3, 8).sin() + next(data_iterator) / 12
    output = model(data)
    def loss(output):
        found = (output - data.cos()).square().sum()
        if config.calculate_per_token_loss:
            return found, torch.tensor(24, dtype=torch.int), {}
        return found / 24, {}
    return output, loss

def finalize(models, num_tokens, **_):
    if num_tokens is not None:
        dist.all_reduce(num_tokens)
    for parameter in models[0].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= replicas if num_tokens is None else num_tokens

config.finalize_model_grads_func = finalize
for step in session.steps(0, 1 << 30):
    stop = torch.tensor([float(session.rank == 0 and sys.stdin.readline() == "end\\n")])
    dist.broadcast(stop, 0)
    if stop:
        session._shares.finish()
        break
    calculator.update_num_microbatches(step * 36)
    numbers = batches.share()
    assert calculator.get_num_microbatches() == len(numbers)
    schedules.get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(numbers), model=model,
        num_microbatches=calculator.get_num_microbatches(), seq_length=1, micro_batch_size=3,
    )
    optimizer.step()
    optimizer.zero_grad()
    everybody = [None] * session.world_size
    dist.all_gather_object(everybody, list(numbers))
    if session.rank == 0:
        print(json.dumps([everybody, [one.tolist() for one in model.parameters()]]), flush=True)
dist.destroy_process_group()
"""


def flat(found: Any) -> list[float]:
    return [value for one in found for value in flat(one)] if isinstance(found, list) else [found]


@pytest.mark.parametrize("kind", ["micro-batches", "tokens"])
def test_unequal_shares_give_the_same_model(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.arange(24, dtype=torch.float64).reshape(3, 8).sin()
    data = torch.stack([rows + number / COUNT for number in range(COUNT)])
    job = Job(str(tmp_path), 2, TRAIN, KIND=kind)
    try:
        for step in range(6):
            if step in (1, 3):
                job.order(step, {1: [10, 2], 3: [4, 8]}[step])
            shares, found = job.step()
            assert sorted(shares[0] + shares[1]) == list(range(COUNT))
            (model(data) - data.cos()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert flat(found) == pytest.approx(flat([one.tolist() for one in model.parameters()]), rel=1e-9)
        assert [len(one) for one in shares] == [4, 8]
        assert job.end() == [0, 0]
    finally:
        job.close()


def test_without_a_calculator_it_says_what_to_call() -> None:
    from keepstep.integrations.megatron import MicroBatches

    config = SimpleNamespace(calculate_per_token_loss=False, grad_scale_func=None)
    session = SimpleNamespace(share=print)
    batches = MicroBatches(session, config, 0, 2)  # pyright: ignore[reportArgumentType] - is never asked
    with pytest.raises(ValueError, match="call init_num_microbatches_calculator first"):
        batches.share()
