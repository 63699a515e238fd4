"""Checkpoints of versions that had torch.compile's `_orig_mod` in the names of what it had taken."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

_PUT_IN = re.compile(r"(?:^|(?<=[./]))_orig_mod\.")


def matched(saved: Iterable[str], here: Collection[str]) -> dict[str, str]:
    """The names here of what was saved under names that differ by `_orig_mod` alone.

    A module of the script's may have that name, so that names which are the same here don't change.
    """
    saved = set(saved)
    lacking = {_PUT_IN.sub("", name): name for name in set(here) - saved}
    pairs = ((name, lacking.get(_PUT_IN.sub("", name))) for name in saved - set(here))
    return {name: found for name, found in pairs if found is not None}


def renamed(
    keys: Iterable[str], state: dict[str, Any], entries: Collection[str], names: Collection[str]
) -> dict[str, str]:
    """The keys here of a checkpoint's that are others now; what `state` has by names gets those of here.

    `entries` are the models' keys here, and `names` their parameters'.
    """
    groups = [group for optimizer in state["groups"] for group in optimizer]
    parameters = matched((name for group in groups for name in group["params"]), names)
    every = [*keys, *state["other"]]
    found = matched((key for key in every if key.startswith("model.")), entries)
    for key in every:
        optimizer, _, rest = key.partition("/")
        name, _, item = rest.rpartition("/")
        if optimizer.startswith("optim.") and name in parameters:
            found[key] = f"{optimizer}/{parameters[name]}/{item}"
    for group in groups:
        group["params"] = [parameters.get(name, name) for name in group["params"]]
    state["other"] = {found.get(key, key): value for key, value in state["other"].items()}
    return found
