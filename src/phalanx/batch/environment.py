"""Lines of a batch script that prepare the environment: modules, proxies, temporary folders."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ..config.slurm_schema import ModulesSettings, ProxySettings
from ..secret import looks_secret
from ..shell import Sh, Word, exports, word

# Caches that would otherwise lie in $HOME or on a file system that all nodes share.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


# Where module systems (Lmod, Environment Modules) define `module`, for shells that read no profile.
_FIND = r"""
for init in "${MODULESHOME:-}/init/bash" "${LMOD_PKG:-}/init/bash" \
  /etc/profile.d/{modules,lmod,z00_lmod,z00-lmod}.sh /usr/share/{lmod/lmod,modules}/init/bash; do
  # shellcheck source=/dev/null
  command -v module >/dev/null || [ ! -r "$init" ] || . "$init"
done
"""
_KNOWN = "command -v module >/dev/null"
_MISSING = (
    "error: modules are set, and nothing defines the command module here: "
    "set shebang to /bin/bash -l, or put the line that defines it into before (source .../init/bash)"
)


def modules(settings: ModulesSettings, before: list[str], on_error: str = "") -> list[list[str]]:
    """Parts of the script: `module` commands in the order in which the settings were written, and
    the user's lines `before`, which come after them, unless only these lines define `module`."""
    commands = list(_module_commands(settings))
    if not commands:
        return [before]
    head = ["# Modules", *_FIND.strip().splitlines()]
    leave = f"{on_error}; exit 2" if on_error else "exit 2"
    must = [f"{_KNOWN} || {{", f'  echo "{_MISSING}" >&2', f"  {leave}", "}"]
    if not before:
        return [[*head, *must, *commands]]
    load = ["load_modules() {", *(f"  {command}" for command in commands), "}"]
    now = f"if {_KNOWN}; then load_modules; load_modules() {{ :; }}; fi"
    late = ["# Modules, where only the lines before define the command", *must, "load_modules"]
    return [[*head, *load, now], before, late]


def _module_commands(settings: ModulesSettings) -> Iterator[str]:
    for verb, words in settings.steps:
        if verb == "purge":
            yield "module --force purge" if words == ("force",) else "module purge"
        else:
            yield f"module {verb} {' '.join(map(shlex.quote, words))}"


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
