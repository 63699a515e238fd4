"""`python -I -S begin.py SIGNAL PARENT COMMAND…`: becomes COMMAND, which gets SIGNAL when PARENT dies.

Ray blocks SIGINT in its processes, and so in their children, for whom it is undone here.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(number: int, parent: int, command: "list[str]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        sys.exit(128 + number)
    os.execvp(command[0], command)


def words(number: int, command: "list[str]") -> "list[str]":
    """The command line for a child of this process."""
    return [sys.executable, "-I", "-S", __file__, str(int(number)), str(os.getpid()), *command]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
