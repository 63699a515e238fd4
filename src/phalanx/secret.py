"""Which variables hold secrets: they travel in the environment alone, never in a script, a plan or an argument."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

_NAME = re.compile(r"(?:^|_)(?:API_?KEY|ACCESS_?KEY|SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)

HIDDEN = "<secret: in the environment only>"
_Value = TypeVar("_Value")


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret: WANDB_API_KEY, HF_TOKEN, AWS_SECRET_ACCESS_KEY, …"""
    return _NAME.search(name) is not None


def without(variables: Mapping[str, _Value]) -> dict[str, _Value]:
    """The variables that may be written down."""
    return {name: value for name, value in variables.items() if not is_secret(name)}


def only(variables: Mapping[str, _Value]) -> dict[str, _Value]:
    """The others."""
    return {name: value for name, value in variables.items() if is_secret(name)}
