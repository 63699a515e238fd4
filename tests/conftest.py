"""What all tests rely on."""

import signal

# A suite that was started in the background ignores Ctrl-C, and so would everything that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
