"""keepstep keeps every rank of a large distributed training job in step.

This module stays empty on purpose: it is imported inside every worker (see ``keepstep._autoload``).
"""

__version__ = "0.1.0"
