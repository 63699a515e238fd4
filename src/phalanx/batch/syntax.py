"""Whether the shell text of settings is complete: an open quote or here-document would swallow the
rest of the batch script, the launch with it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

from ..errors import PlanError
from ..planning.shellwords import ends_unwaited

_PATIENCE = 10.0  # seconds


def check(texts: Mapping[str, str | None]) -> None:
    """Raise PlanError for text, by the name of its setting, that bash can't read to its end."""
    for name, text in texts.items():
        said = _complaint(text) if text and text.strip() else None
        if said is not None:
            raise PlanError(
                f"{name} is no complete shell text, and would break the script after it: {said}. "
                "Expected every quote, here-document, if and loop in it to end in it"
            )


def check_waited_for(texts: Mapping[str, str | None]) -> None:
    """Raise PlanError for a launch whose last command the shell doesn't wait for: the job would end
    with 0 before it, and take it along."""
    for name, text in texts.items():
        if text and ends_unwaited(text):
            raise PlanError(
                f"{name} ends with &: the job would not wait for what that starts, and end it at "
                "once. Leave the & out, or end with a line `wait $!`"
            )


def _complaint(text: str) -> str | None:
    """bash's first words on the text, which it reads and doesn't run; None if it has none, or isn't
    here."""
    told = ("BASH_ENV", "SHELLOPTS", "BASHOPTS")
    environ = {name: value for name, value in os.environ.items() if name not in told}
    try:
        done = subprocess.run(
            ["bash", "--norc", "-n", "-O", "extglob"], input=text.rstrip("\n") + "\n",
            env={**environ, "LC_ALL": "C"}, capture_output=True, text=True, errors="replace",
            timeout=_PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    # Other words are not about the text: the linker's on LD_PRELOAD, bash's on its environment.
    said = re.search(r"^bash: (line \d+: .*)", done.stderr, re.MULTILINE)
    return said[1] if said else None
