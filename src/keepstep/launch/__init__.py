"""The per-node launcher behind ``keepstep run``: small, steady, without torch and numpy.

``job`` (what was asked for) -> ``placement`` (who plays which rank, with what environment and command) ->
``launcher`` (the life of it, with ``workers``, ``companions``, ``link``, ``streams``) -> ``root_cause``. ``guard``
ends what a launcher that was killed left behind.
"""
