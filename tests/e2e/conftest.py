"""Jobs started by these tests must hear signals, also when the tests run in the background or under nohup."""

import signal

# A shell's background passes on that Ctrl-C is ignored, nohup that SIGHUP is; `keepstep run` respects both.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
