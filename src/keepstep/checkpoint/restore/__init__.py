"""From a snapshot to the tensors of a training: which step to resume, from where, and filling them."""
