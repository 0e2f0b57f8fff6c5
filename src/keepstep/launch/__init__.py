"""The per-node launcher behind ``keepstep run``: small, steady, without torch and numpy.

``command`` (what was asked for, and who plays which rank) -> ``launcher`` (the life of it: ``orders`` of the
controller, ``parting`` from the job) with ``workers``, ``node`` (agent, cache, checks) and ``controller`` (its process
and the connection to it). ``workers.guard`` ends what a launcher that was killed left behind.
"""
