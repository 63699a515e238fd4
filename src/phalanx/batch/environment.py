"""Lines of a batch script that prepare the environment: modules, proxies, temporary folders."""

from __future__ import annotations

import shlex

from ..config.slurm_schema import ModulesSettings, ProxySettings
from ..secret import looks_secret
from ..shell import Sh, Word, exports, word

# Caches that would otherwise lie in $HOME or on a file system that all nodes share.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def modules(settings: ModulesSettings) -> list[str]:
    """`module` commands in the order in which the settings were written."""
    lines = []
    for verb, words in settings.steps:
        if verb == "purge":
            lines.append("module --force purge" if words == ("force",) else "module purge")
        else:
            lines.append(f"module {verb} {' '.join(map(shlex.quote, words))}")
    return ["# Modules", *lines] if lines else []


def proxies(settings: ProxySettings) -> list[str]:
    """Each in both spellings, as programs differ in which they read."""
    variables = {"http_proxy": settings.http, "https_proxy": settings.https, "no_proxy": settings.no}
    both: dict[str, Word] = {}
    for name, value in variables.items():
        if value and looks_secret(value):  # it comes in the environment
            both[name.upper()] = Sh(f"${name}")
        elif value:
            both |= {name: word(value), name.upper(): word(value)}
    return ["# Proxies", *exports(both)] if both else []


def tmpdir(folder: str | None) -> list[str]:
    """A node-local folder for temporary files and compiler caches; each rank makes it on its node."""
    if not folder:
        return []
    caches = {name: Sh(f"$TMPDIR/{leaf}") for name, leaf in _CACHES.items()}
    return ["# Temporary files, on each node", *exports({"TMPDIR": word(folder), **caches}), 'mkdir -p "$TMPDIR"']
