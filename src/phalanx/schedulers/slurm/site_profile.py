"""What a cluster says of itself, as a commented site profile."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...config.yamlfile import write
from . import client
from .client import Partition

_GPU_TYPE = re.compile(r"(?:^|,)gpu:([A-Za-z][^:,(]*):\d")


@dataclass(frozen=True)
class Findings:
    """The answers; what nobody could answer is empty. `links` and `gpus` are one compute node's, if it was asked."""

    cluster: str
    version: str
    partitions: tuple[Partition, ...]
    gpu_types: tuple[str, ...]
    accounting: bool
    mpi: str
    accounts: tuple[str, ...]
    modules: str
    tmp_folder: str
    links: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()


def look(environ: Mapping[str, str], node: bool = False) -> Findings:
    """Ask sinfo, scontrol and sacctmgr and, with `node`, a step on one compute node.

    Raises PlanError without Slurm, SchedulerError if it doesn't answer.
    """
    client.require("sinfo")
    settings = _settings(_said("scontrol", "show", "config"))
    gres = _said("sinfo", "--noheader", "--format=%G")
    links = _said("srun", "--nodes=1", "--ntasks=1", "--time=1", "ip", "-o", "link").splitlines() if node else []
    gpus = _said("srun", "--nodes=1", "--ntasks=1", "--time=1", "nvidia-smi", "-L").splitlines() if node else []
    user = environ.get("USER") or environ.get("LOGNAME") or ""
    return Findings(
        cluster=settings.get("ClusterName", ""),
        version=settings.get("SLURM_VERSION", ""),
        partitions=tuple(client.partitions()),
        gpu_types=tuple(dict.fromkeys(kind for line in gres.splitlines() for kind in _GPU_TYPE.findall(line))),
        accounting="none" not in settings.get("AccountingStorageType", "none"),
        mpi=settings.get("MpiDefault", "none"),
        accounts=_accounts(user),
        modules="Lmod" if "LMOD_CMD" in environ else "Environment Modules" if "MODULESHOME" in environ else "",
        tmp_folder=settings.get("TmpFS", "/tmp"),
        links=tuple(name for line in links if (name := _link(line))),
        gpus=tuple(line for line in gpus if line.startswith("GPU ")),
    )


def _said(*words: str) -> str:
    """A program's answer, or nothing: what can't be found out is left to the reader."""
    if shutil.which(words[0]) is None:
        return ""
    done = client.run(words, timeout=120)
    return done.stdout if done.returncode == 0 else ""


def _settings(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _accounts(user: str) -> tuple[str, ...]:
    listed = _said("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account") if user else ""
    return tuple(dict.fromkeys(filter(None, listed.splitlines())))


def _link(line: str) -> str | None:
    """A fast network's interface in `ip -o link`: InfiniBand or Slingshot by their usual names."""
    match = re.match(r"\d+: ([^:@]+)", line)
    return match[1] if match and match[1].startswith(("ib", "hsn")) else None


def profile(found: Findings) -> str:
    """The findings as a settings file; what isn't sure stands in it as a comment."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Findings) -> Iterator[str]:
    yield f"# Site profile of {found.cluster or 'this cluster'} (Slurm {found.version}), from what it says of itself."
    yield "# Correct it, then: export PHALANX_SITE=<this file>"
    yield ""
    yield from _choice("account", found.accounts, "the account that is charged; sbatch may have a default")
    yield from _partitions(found.partitions)
    yield from _gpus(found)
    yield ""
    yield "# Whether sacct knows of jobs that ended long ago."
    yield f"sacct: {'true' if found.accounting else 'false'}"
    yield ""
    yield "# srun --mpi for MPI programs; `srun --mpi=list` names what there is."
    yield f"mpi: {found.mpi}" if found.mpi not in ("none", "") else "# mpi: pmix"
    yield ""
    yield "# The fast network, for NCCL and gloo; unset, they choose. A suffix if nodes have other names on it."
    yield f"interface: {','.join(found.links)}" if found.links else "# interface: ib0"
    yield "# host_suffix: i"
    yield ""
    yield f"# Environment modules: {found.modules or 'no module command was seen'}."
    yield "# modules: {purge: true, load: [CUDA, NCCL]}"
    yield ""
    yield "# Node-local temporary files and compiler caches."
    yield f"# tmpdir: !sh {_plain_folder(found.tmp_folder)}/$USER-$SLURM_JOB_ID"
    yield "# Run directories, on a file system that all nodes see."
    yield "# run_root: /scratch/my_project/runs"
    yield '# proxy: {http: "http://proxy:3128", https: "http://proxy:3128", no: localhost}'


def _plain_folder(folder: str) -> str:
    return folder if re.fullmatch(r"/[\w./-]*", folder) else "/tmp"


def _choice(key: str, values: tuple[str, ...], about: str) -> Iterator[str]:
    """One value is taken; of several the reader chooses."""
    yield f"# {about}"
    if len(values) == 1:
        yield write({key: values[0]}).rstrip()
    else:
        yield from (f"# {write({key: value}).rstrip()}" for value in values or ("my_project",))


def _partitions(partitions: tuple[Partition, ...]) -> Iterator[str]:
    yield ""
    yield "# Partitions: nodes, CPUs, GPUs and memory of a node, longest time."
    for one in partitions:
        longest = "no limit" if one.seconds is None else f"{one.seconds / 3600:g} h"
        size = f"{one.nodes} nodes, {one.cpus_per_node} CPUs, {one.gpus_per_node} GPUs, {one.memory_mb} MB, {longest}"
        yield f"#   {one.name}{' (default)' if one.default else ''}: {size}"
    default = next((one.name for one in partitions if one.default), None)
    yield f"partition: {default}" if default else "# partition: NAME"


def _gpus(found: Findings) -> Iterator[str]:
    if not any(one.gpus_per_node for one in found.partitions):
        return
    yield ""
    yield "# How GPUs are asked for: gpus-per-node, gres or gpus-per-task."
    yield "gpu_request: gpus-per-node"
    yield from (f"# {line}" for line in found.gpus)
    if found.gpu_types:
        yield from (f"# gpu_type: {kind}" for kind in found.gpu_types)
