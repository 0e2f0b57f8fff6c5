"""Jobs started by these tests must hear Ctrl-C, also when the tests themselves run in a shell's background."""

import signal

# Such a shell passes on that it is ignored, and `keepstep run` respects that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
