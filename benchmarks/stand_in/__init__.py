"""Runs CUDA jobs where there is no GPU: on stand-ins for CUDA and NCCL, under the CUDA build of torch.

Whatever is measured there is measured on a stand-in, and has to be called so. docs/design/stand-in-gpu.md.
"""
