"""The agent of a node: it turns rings and sensors into summaries, findings and states for the controller.

The program is ``python -m keepstep.agent``. Its computations are pure functions and classes in ``ranks``, for example
``iterations`` (events to iterations), ``summarise`` (iterations to sums) and ``watch`` (findings). Processes, files and
sockets are used by ``program``, ``sensors`` and ``services``.
"""
