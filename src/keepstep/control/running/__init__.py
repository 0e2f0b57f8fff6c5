"""What an operator orders of a job that goes on training: thresholds, watching, traces, a step on storage."""
