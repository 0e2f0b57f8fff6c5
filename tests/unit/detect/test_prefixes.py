"""Prefixes of launchers, loggers and kernels are taken off, and tell who spoke, when and how loudly."""

from __future__ import annotations

import pytest

from keepstep.detect.prefixes import spoken


@pytest.mark.parametrize(
    ("line", "text", "rank", "node", "level"),
    [
        ("[rank3]: Traceback (most recent call last):", "Traceback (most recent call last):", 3, "", ""),
        ("[rank3]:   File x", "File x", 3, "", ""),
        ("[default3]: hello", "hello", None, "", ""),
        ("7: hello", "hello", 7, "", ""),
        ("[1,5]<stderr>:hello", "hello", 5, "", ""),
        ("[5]<stdout>:hello", "hello", 5, "", ""),
        ("[5]h-1:12:34 [0] NCCL WARN hello", "NCCL WARN hello", 5, "h-1", "warning"),
        ("[1,5]<stderr>:[h-1:4711] *** hello", "*** hello", 5, "h-1", ""),
        ("[h-1:3]: hello", "hello", None, "h-1", ""),
        ("[h-1][[29973,1],5][btl_tcp.c:626:f] hello", "hello", 5, "h-1", ""),
        ("2024-08-30 11:06:12,920: rank5[208865][MainThread]: hello", "hello", 5, "", ""),
        ("[pod/job-worker-1/pytorch] hello", "hello", None, "job-worker-1", ""),
        ("[NeMo E 2024-01-01 10:00:00 nemo_logging:349] rank 5: hello", "hello", 5, "", "error"),
        ("[ERROR|trainer.py:12] 2024-01-01 10:00:00,123 >> hello", "hello", None, "", "error"),
        ("[5] finished collective #2", "[5] finished collective #2", None, "", ""),
        ("(Worker pid=12, ip=10.0.0.7) hello", "hello", None, "10.0.0.7", ""),
        ("(Trainer rank=4 pid=12) hello", "hello", 4, "", ""),
        ("[2024-04-18 15:55:06] CRITICAL [olmo.util:158, rank=6] hello", "hello", 6, "", "error"),
        ("[rank=6] hello", "hello", 6, "", ""),
        ("[a, local_rank=6] hello", "[a, local_rank=6] hello", None, "", ""),
        ("node-3: hello", "hello", None, "node-3", ""),
        ("[RANK 3] hello", "hello", 3, "", ""),
        ("bench.node-1.D0 [stderr] [rank3]: hello", "hello", 3, "", ""),
        ("bench.node-1.D0 [stderr]", "", None, "", ""),
        # a library, a step, a format, or a source file is no host
        ("[W socket.cpp:697] [c10d] hello", "[c10d] hello", None, "", "warning"),
        ("[c10d] hello", "[c10d] hello", None, "", ""),
        ("[c10d_logger.py:79] hello", "hello", None, "", ""),
        ("[epoch3] hello", "[epoch3] hello", None, "", ""),
        ("[step-12]: hello", "[step-12]: hello", None, "", ""),
        ("fp16: hello", "fp16: hello", None, "", ""),
        ("[gpu-114] hello", "hello", None, "gpu-114", ""),
        ("RuntimeError: hello", "RuntimeError: hello", None, "", ""),
        ("2024-08-23T22:22:51.874Z | [rank3]:[E ProcessGroupNCCL.cpp:5] [Rank 3] x", "x", 3, "", "error"),
        ("2024-08-23T22:22:51.874Z stderr F hello", "hello", None, "", ""),
        ("[2025-02-24 14:09:34 TP14] hello", "hello", None, "", ""),
        ("[E606 15:20:10.1 ProcessGroupNCCL.cpp:616] hello", "hello", None, "", "error"),
        ("E1119 08:26:02.715000 28705 site-packages/torch/api.py:882] hello", "hello", None, "", "error"),
        ("2018-12-14 01:13:58.7: E tensorflow/core/aws_logging.cc:60] hello", "hello", None, "", "error"),
        ("2024-01-01 10:00:00,123 - root - INFO - hello", "hello", None, "", "info"),
        ("[2024-01-01 10:00:00,123] [WARNING] [runner.py:1:fetch] hello", "hello", None, "", "warning"),
        ("h-1:12:34 [5] NCCL WARN hello", "NCCL WARN hello", None, "h-1", "warning"),
        ("h-1:12:34 [5] NCCL INFO hello", "NCCL INFO hello", None, "h-1", "info"),
        ("[Fri Aug 30 11:43:09 2024] NVRM: hello", "NVRM: hello", None, "", ""),
        ("Aug 30 11:43:09 gpu-114 kernel: [12345.678901] NVRM: hello", "NVRM: hello", None, "gpu-114", ""),
        ("[12345.678901] NVRM: hello", "NVRM: hello", None, "", ""),
        (" 67%|██  | 1463/2188 [50:34<23:33,  1.95s/it]hello", "hello", None, "", ""),
        ("\x1b[31mhello\x1b[0m", "hello", None, "", ""),
        ("    | Traceback", "Traceback", None, "", ""),
        ("    * 1 x OSError: y", "OSError: y", None, "", ""),
        ("/a/b.py:3: UserWarning: hello", "/a/b.py:3: UserWarning: hello", None, "", "warning"),
    ],
)
def test_prefixes(line: str, text: str, rank: int | None, node: str, level: str) -> None:
    said = spoken(line)
    assert (said.text, said.speaker.rank, said.speaker.node, said.level) == (text, rank, node, level)


def test_times_are_read() -> None:
    assert spoken("2024-01-01T00:00:01.5Z x").time_s == 1704067201.5
    assert spoken("[Mon Jan  1 00:00:01 2024] x").time_s == 1704067201.0
    assert spoken("[   12.500000] x").boot_s == 12.5
    assert spoken("Jan  1 00:00:01 h kernel: x").time_s is None, "the year is not told"
    assert spoken("2024-13-01 00:00:01 x").time_s is None
