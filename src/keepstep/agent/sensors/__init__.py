"""What the node itself tells: processes, host, sockets, GPUs, NCCL transfers."""
