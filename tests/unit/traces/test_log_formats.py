from __future__ import annotations

import pytest

from keepstep.traces.log_formats import reading
from keepstep.traces.log_text import plain_text, speaker

LINES = {
    " iteration        2/    1200 | consumed samples: 96 | elapsed time per iteration (ms): 1851.0 | "
    "global batch size:    48 | loss scale: 1.0 |": ("Megatron", 2, 1.851, 48),
    "[default7]: iteration    12695/  115311 | consumed samples: 9841584 | elapsed time per iteration (s): 105.22 "
    "| learning rate: 5.969E-05 | global batch size:  2048 |": ("Megatron", 12695, 105.22, 2048),
    '"message": "[2024-02-27 15:45:08] iteration 13 / 118 | elapsed time per iteration(ms): 17658.3 | '
    'global batch size: 2880 |"': ("Megatron", 13, 17.6583, 2880),
    "iteration 7/ 9 | elapsed time per iteration (ms) : 1,049.9/1052.0 | throughput per GPU (TFLOP/s/GPU): 402.1 |": (
        "Megatron", 7, 1.0499, 0,
    ),
    "iteration= 1/ 317892 | consumed_samples= 768 | elapsed_time_per_iteration_ms=29574.1 | global_batch_size=768": (
        "Megatron", 1, 29.5741, 768,
    ),
    "step: 40 | elapsed time per iteration ( s ) : 2.5 | number of skipped iterations:   0 |\r": (
        "Megatron", 40, 2.5, 0,
    ),
    "[INFO|DP=0|PP=0|TP=0|node]: iteration: 12 / 100 | consumed_tokens: 1.2M | elapsed_time_per_iteration_ms: 2.17K "
    "| global_batch_size: 1.02K | lm_loss: 11": ("Megatron", 12, 2.17, 1020),
    "Training epoch 0, iteration 1/249 | lr: 3.922e-06 | global_batch_size: 8 | global_step: 1 | "
    "reduced_train_loss: 1.653 | train_step_timing in s: 2.505 | consumed_samples: 16": ("NeMo", 1, 2.505, 8),
    "Epoch 0: :  47%|████▋     | 7/15 [06:19<07:13, reduced_train_loss=11.50, global_step=5.000, "
    "consumed_samples=12288.0, train_step_timing in s=49.50]": ("NeMo", 5, 49.5, 0),
    "Epoch 0: : 100%|██████████| 2000/2000 [43:24:54<00:00, reduced_train_loss=0.139, global_step=2e+3, "
    "train_step_timing in s=68.70, val_loss=0.212][NeMo I 2024-06-17]": ("NeMo", 2000, 68.7, 0),
    "[2023-06-21 03:45:55,424] [INFO] [timer.py:199:stop] epoch=1/micro_step=926/global_step=1880, "
    "RunningAvgSamplesPerSec=6.6037, CurrSamplesPerSec=8.0, MemAllocated=7.79GB": ("DeepSpeed", 1880, 0.125, 0),
    "steps: 10 loss: 6.9121 iter time (s): 0.312 samples/sec: 820.151": ("DeepSpeed pipeline", 10, 0.312, 0),
    "\x1b[32m[rank0]:[titan] 2025-10-30 14:32:58,897 - root - INFO - \x1b[31mstep:  2  \x1b[32mloss:  6.1098  "
    "\x1b[33mmemory:  2.49GiB(3.14%)  \x1b[34mtps: 177,138  \x1b[36mtflops: 96.17": ("torchtitan", 2, 1 / 177138, 0),
    "Epoch 0:  22%|██▏       | 4/18 [00:17<01:02,  4.47s/it, loss=10.072, v_num=193315]": (
        "progress bar", 4, 4.47, 0,
    ),
    "  1%|▏         | 10/1000 [00:20<33:00,  2.00it/s]": ("progress bar", 10, 0.5, 0),
    "Epoch 1: : 1it [00:04,  4.36s/it, v_num=d3c7]": ("progress bar", 1, 4.36, 0),
    "Epoch 0/9 ━━━━━━ 10/100 0:00:12 • 0:01:20 1.25it/s v_num: 0 train_loss: 2.3": ("progress bar", 10, 0.8, 0),
}  # fmt: skip


@pytest.mark.parametrize("text", LINES)
def test_a_line_of_a_framework(text: str) -> None:
    found = reading(plain_text(text.encode()))
    assert found is not None
    name, number, seconds, batch = LINES[text]
    assert (found.format, found.number, found.batch) == (name, number, batch)
    assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "iteration 3/ 9 | elapsed time per iteration (ms): nan |",
        "iteration 3/ 9 | elapsed time per iteration (ms): 0.0 |",
        "print('elapsed time per iteration (ms): 3.0')",
        "Validation DataLoader 0:  22%|██▏ | 4/18 [00:17<01:02,  4.47s/it]",
        "Loading checkpoint shards: 100%|██████████| 2/2 [00:03<00:00,  1.60s/it]",
        "  0%|          | 0/18 [00:00<?, ?it/s]",
        "model-00001.safetensors:  12%|█▏ | 1.2G/9.9G [00:10<01:02, 120MB/s]",
        "the server answers with tps: 400",
        "[Rank 0] step=14000, skipped=25, lr=[0.001], mom=[0.9]",
    ],
)
def test_a_line_that_is_no_iteration(text: str) -> None:
    assert reading(text) is None


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("[rank5]:[titan] 2025", ("5", 5)),
        ("2024-08-23T22:22:51.874Z | [rank3]:[E Process", ("3", 3)),
        (" 12: iteration 3", ("12", 12)),
        ("[1,7]<stdout>: iteration", ("7", 7)),
        ("(MegatronPolicyWorker[rank=8] pid=3098870) step", ("8", 8)),
        ("[default7]: iteration 1", ("default7", None)),
        (" iteration 12/ 40", ("", None)),
        ("[2024-02-27 15:45:08] iteration 13", ("", None)),
    ],
)
def test_who_wrote_a_line(text: str, label: tuple[str, int | None]) -> None:
    assert speaker(text) == label


def test_a_step_beyond_all_numbers_is_no_reading() -> None:
    assert reading("global_step: 1e999 | train_step_timing in s: 1") is None
