"""The per-node launcher behind ``keepstep run``: small, steady, without torch and numpy.

``command`` turns what was asked for into a job, and says who plays which rank. ``launcher`` is the life of the job on
one node, with ``controller_orders`` and ``after_incarnation``. Its parts are in ``workers``, ``node`` (agent,
cache, checks) and ``controller`` (its process, and the connection to it). ``workers.guard`` ends what a launcher that
was killed has left behind.
"""
