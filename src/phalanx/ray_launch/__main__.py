"""The command itself."""

import os
import signal
import sys

from .agent import main

code = main(sys.argv[1:])
if code < 0:  # Slurm and shells tell a signal from an exit code
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
