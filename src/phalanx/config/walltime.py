"""Time limits as Slurm reads them: `90` is minutes, `30:00` minutes and seconds, `1-12` days and hours."""

from __future__ import annotations

import re

_FORMS = re.compile(
    r"(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
    r"|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)"
    r"|(?P<m>\d+)(?::(?P<s>\d+))?",
    re.ASCII,
)
_UNLIMITED = ("UNLIMITED", "INFINITE")
EXPECTED = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED"


def seconds(text: str) -> int | None:
    """The limit in seconds; None for no limit, as zero says too. Raises ValueError for what Slurm would not read."""
    if text.upper() in _UNLIMITED:
        return None
    match = _FORMS.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no time limit: expected {EXPECTED}")
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    days, hours = part["days"], part["dh"] + part["h"]
    minutes = part["dm"] + part["hm"] + part["m"]
    return ((days * 24 + hours) * 60 + minutes) * 60 + part["ds"] + part["hs"] + part["s"] or None
