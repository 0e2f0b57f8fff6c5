"""Being told of a run: webhooks, Slack, mail and experiment trackers, in the process of ``keepstep serve`` alone.

A notice is what somebody is told (`notice`), `telling` decides when, and each receiver has a thread of its own, a
tracker a process as well. What hangs costs the training nothing, and no other receiver waits for it.
"""
