"""What a launcher's words in `training_cmd` say, as settings: they hold where nothing is set, and else must agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import JobConfig, Loaded
from ..config.loader import DEFAULT
from ..errors import UsageError
from ..planning.program import Program

ORIGIN = "training_cmd"
_LEFT, _UNSAID = "*", ""  # a variable of Slurm's stands there; the launcher has a default of its own


def with_said(loaded: Loaded, program: Program) -> Loaded:
    """The settings with those that a launcher's words mean. Raises UsageError where both say different things."""
    if not program.said:
        return loaded
    update: dict[str, Any] = {}
    for key, text in _in_settings_words(loaded.config, program.said).items():
        value = _agreed(loaded, key, text)
        if value is not None:
            update[key] = value
    config = loaded.config.model_copy(update=update)
    return replace(loaded, config=config, origins={**loaded.origins, **dict.fromkeys(update, ORIGIN)})


def _in_settings_words(config: JobConfig, said: Mapping[str, str]) -> dict[str, str]:
    """Ranks in all are ranks per node, or a number of tasks where nodes hold different ones."""
    found = dict(said)
    nodes = int(found["nodes"]) if found.get("nodes", "").isdecimal() else config.nodes
    total = found.pop("total", _LEFT)
    if total.isdecimal() and int(total) % nodes:
        found["ntasks"] = total
    elif total.isdecimal():
        found["nproc_per_node"] = str(int(total) // nodes)
    if found.get("launcher") == "horovodrun" and nodes > 1:
        found["launcher"] = "srun"  # which starts Horovod's ranks on several nodes, without ssh
    return {key: text for key, text in found.items() if text != _LEFT or key == "nproc_per_node"}


def _agreed(loaded: Loaded, key: str, text: str) -> Any:
    """The value to set; None where the settings have it already."""
    now, origin = getattr(loaded.config, key), loaded.origins.get(key, DEFAULT)
    unset = origin == DEFAULT or now in (None, "auto")
    if text in (_LEFT, _UNSAID):
        if unset and (text == _UNSAID or not _ranks_known(loaded.config)):
            raise UsageError(
                "training_cmd starts ranks by a launcher and doesn't say how many a node: set nproc_per_node, or give "
                "the script alone (training_cmd: train.py)"
            )
        return None
    if unset:
        return int(text) if text.isdecimal() else text
    if str(now) != text:
        raise UsageError(f"training_cmd says {key}={text}, and {key} is {now} ({origin}): give one of them")
    return None


def _ranks_known(config: JobConfig) -> bool:
    return bool(config.gpus_per_node or config.gpus_per_task or config.gres or config.ntasks_per_node > 1)
