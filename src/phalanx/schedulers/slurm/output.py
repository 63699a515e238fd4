"""Where a job's output lies: sbatch's file name patterns, and the files that its script asked for."""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

_PATTERN = re.compile(r"%(?P<width>\d*)(?P<letter>[A-Za-z%])")
_NUMBERS = "aAbjJnst"  # those that a width pads with zeros
_NO_ARRAY = "4294967294"  # what Slurm writes for %a of a job that is no array
_DIRECTIVE = re.compile(r"^#SBATCH +(?:--(?P<name>output|error|chdir)[= ]|-(?P<short>[oeD]) *)(?P<value>.+)$")
_SHORT = {"o": "output", "e": "error", "D": "chdir"}


def expand_pattern(pattern: str, known: Mapping[str, str]) -> str:
    """A file name as Slurm makes it of sbatch's `--output` and its like; `known` has a text for each letter.

    Letters that aren't known stay, so a name can be expanded before the job has a number (`%x`, `%u`) and again
    when it has one (`%%` only becomes `%` when nothing is left to replace). A backslash turns all patterns off.
    """
    if "\\" in pattern:
        return pattern.replace("\\", "")
    left = [match for match in _PATTERN.finditer(pattern) if match["letter"] not in known and match["letter"] != "%"]

    def text(match: re.Match[str]) -> str:
        width, letter = match["width"], match["letter"]
        if letter == "%":
            return match[0] if left else "%"
        if letter not in known:
            return match[0]
        return known[letter].zfill(min(int(width), 10)) if width and letter in _NUMBERS else known[letter]

    return _PATTERN.sub(text, pattern)


def unknown_patterns(pattern: str, known: Mapping[str, str]) -> list[str]:
    """The patterns that `expand_pattern` would leave, as they stand: `%j`, `%3a`."""
    if "\\" in pattern:
        return []
    found = _PATTERN.finditer(pattern)
    return [match[0] for match in found if match["letter"] not in known and match["letter"] != "%"]


def before_submission(job_name: str) -> dict[str, str]:
    """What is known of a job that has no number yet."""
    return {"x": job_name, "u": _user()}


def of_batch_script(job_id: str, number: str, job_name: str, host: str = "") -> dict[str, str]:
    """What the patterns of a batch script's output stand for. `job_id` may be an array's task, `12_3`; `number` is
    what Slurm itself counts by."""
    base, _, task = job_id.partition("_")
    array = task.isdecimal()
    values = {
        "j": number,
        "J": number,
        "A": base.partition("+")[0] if array else number,
        "a": task if array else _NO_ARRAY,
        "b": str(int(task) % 10) if array else "4",
        "n": "0",
        "t": "0",
        "s": "batch",
        **before_submission(job_name),
    }
    return values | ({"N": host.partition(".")[0]} if host else {})


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in some containers
        return "nobody"


def asked_for(script: Path) -> dict[str, str]:
    """`output`, `error` and `chdir` of a batch script's directives; the last of each counts, as for sbatch."""
    found: dict[str, str] = {}
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        if line and not line.startswith("#"):
            break  # directives end at the first command
        match = _DIRECTIVE.match(line)
        if match:
            words = shlex.split(match["value"], comments=True)
            found[match["name"] or _SHORT[match["short"]]] = words[0] if words else ""
    return found


def files(run_dir: Path, submitted_in: Path, known: Mapping[str, str]) -> list[Path]:
    """The job's output, and its errors where they have a file of their own, by the script in the run directory.

    Where there is none, `sbatch FILE` was given a saved script: Slurm's own default holds.
    """
    asked = asked_for(run_dir / "job.sh")
    folder = Path(submitted_in, asked.get("chdir", ""))
    default = "slurm-%j.out" if known["a"] == _NO_ARRAY else "slurm-%A_%a.out"
    if (run_dir / "job.sh").exists():
        default = f"{str(run_dir).replace('%', '%%')}/{default}"
    output = Path(folder, expand_pattern(asked.get("output", default), known))
    error = Path(folder, expand_pattern(asked["error"], known)) if "error" in asked else output
    return [output] if error == output else [output, error]
