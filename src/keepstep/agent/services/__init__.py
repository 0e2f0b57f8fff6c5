"""Services that an agent provides: backups, checkpoints, holds, micro-batches and probes of paths."""
