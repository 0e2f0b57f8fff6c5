"""What the agent does for the job besides watching: backups, checkpoints, holds, path probes, micro-batches."""
