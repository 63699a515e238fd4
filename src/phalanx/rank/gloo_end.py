"""The end of a process that used gloo, whoever started it: no thread of gloo's may still need the interpreter.

Such a thread lets go of a collective's tensors some time after the collective is done. For Python's own
tensors it needs the interpreter, and where that is ending already, the process aborts (SIGABRT, -6),
though its script went well. Nothing tells how far the threads are: so the interpreter is given up for a
moment, last of all that happens at the exit.
"""

from __future__ import annotations

import atexit
import sys

_FINISHES = 0.05  # s; the threads only wait for the interpreter, which sleeping gives up
_registered = False


def let_gloo_finish_at_exit() -> None:
    """To be called before others register callbacks for the exit: those run last to first."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_let_gloo_finish)


def _let_gloo_finish() -> None:
    if "torch.distributed" in sys.modules:
        import time

        time.sleep(_FINISHES)
