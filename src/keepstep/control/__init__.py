"""The job's controller: hears agents and launchers, places nodes, turns findings into incidents and verdicts.

Start reading in ``controller.py`` (messages and time in, effects out, no I/O), then ``cases.py`` (what is wrong);
``control_server.py`` is the process around them.
"""
