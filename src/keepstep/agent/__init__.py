"""The rim on a node: rings and sensors in, summaries, findings and states out.

``python -m keepstep.agent`` is the program. What it computes is pure and lives in ``iterations`` (events to
iterations), ``summarise`` (iterations to sums), ``watch`` (findings), ``clocks`` and ``states``; ``program`` and the
modules it uses are the only ones that touch processes, files and sockets.
"""
