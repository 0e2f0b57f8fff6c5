"""Jobs started by these tests must hear Ctrl-C, also when the tests themselves run in a shell's background."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what such a shell passes on, and what keepstep run respects
    signal.signal(signal.SIGINT, signal.default_int_handler)
