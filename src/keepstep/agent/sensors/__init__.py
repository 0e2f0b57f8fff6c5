"""Sensors of the node: processes, host, sockets, GPUs, and NCCL's network links."""
