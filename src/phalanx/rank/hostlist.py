"""Slurm's compressed lists: `rack[0-1]b[01-02],login` of hosts and `2(x3),1` of tasks per node.

The order is kept as written, since the first host is where rank 0 runs. Slurm's own limits hold: a
range has at most 65,536 members, and there are no steps such as `[0-8:2]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from math import prod

from ..errors import TopologyError

MAX_RANGE = 64 * 1024
MAX_HOSTS = 1_000_000

_TOKEN = re.compile(r"\[([^\[\]]*)\]|([^\s,\[\]]+)|(,)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(text: str) -> list[str]:
    """The hosts that a list stands for, in its order; an empty text is an empty list.

    Raises TopologyError, with the text, if it is not a list as Slurm writes them.
    """
    hosts: list[str] = []
    for choices in _items(text.strip()) if text.strip() else ():
        if prod(map(len, choices)) + len(hosts) > MAX_HOSTS:
            raise _malformed(text, f"more than {MAX_HOSTS} hosts")
        hosts.extend(map("".join, product(*choices)))
    return hosts


def expand_counts(text: str) -> list[int]:
    """Tasks on each node: `2(x3),1` is [2, 2, 2, 1]. Raises TopologyError if malformed."""
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= times <= MAX_HOSTS:
            raise TopologyError(f"cannot read tasks per node {_short(text)}: expected a form like '2(x3),1'")
        counts += [int(match[1])] * times
    return counts


def _items(text: str) -> Iterator[list[list[str]]]:
    """Each item between commas outside brackets, as the choices for each of its parts."""
    choices: list[list[str]] = []
    end = 0
    for token in _TOKEN.finditer(text + ","):
        group, plain, comma = token.groups()
        if token.start() != end or (comma and not choices):
            break
        end = token.end()
        if comma:
            yield choices
            choices = []
        elif plain:
            choices.append([plain])
        else:
            choices.append([number for part in group.split(",") for number in _numbers(part, text)])
    if end != len(text) + 1:
        raise _malformed(text, f"at {text[end : end + 20] or 'its end'!r}")


def _numbers(part: str, text: str) -> list[str]:
    """`08-11` is 08, 09, 10, 11: the lower bound's width is the least width of all."""
    match = _RANGE.fullmatch(part.strip())
    if match is None:
        raise _malformed(text, f"at {part!r} in brackets")
    low, high = match[1], match[2] or match[1]
    if not 0 <= int(high) - int(low) < MAX_RANGE:
        raise _malformed(text, f"range {part!r} runs backwards or has more than {MAX_RANGE} members")
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]


def _malformed(text: str, where: str) -> TopologyError:
    return TopologyError(
        f"cannot read host list {_short(text)}: {where}. Expected names and ranges like 'cn[01-04,7],login1'"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "…")
