"""What launchers say in the environment: each one's variables for rank, world size and place.

The first launcher in LAUNCHERS that gives a rank and a world size is believed.
Runs on Python 3.8 too, as all that `rank/entry.py` imports: no `|` of dicts, for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import TopologyError
from .hostlist import expand_counts, expand_hostlist

if TYPE_CHECKING:
    from typing import TypeAlias

FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
SIZES = ("world_size", "local_world_size", "num_nodes")

# The variables of each field, best first. OMPI_COMM_WORLD_NODE_RANK is not among them: it counts
# processes on a node, not nodes.
LAUNCHERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phalanx": {field: (f"PHALANX_{field.upper()}",) for field in FIELDS},
    "torchrun": {
        "rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_world_size": ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        "node_rank": ("GROUP_RANK", "NODE_RANK", "CROSS_RANK"),
        "num_nodes": ("GROUP_WORLD_SIZE", "NNODES", "CROSS_SIZE"),
    },
    "horovodrun": {
        "rank": ("HOROVOD_RANK",),
        "world_size": ("HOROVOD_SIZE",),
        "local_rank": ("HOROVOD_LOCAL_RANK",),
        "local_world_size": ("HOROVOD_LOCAL_SIZE",),
        "node_rank": ("HOROVOD_CROSS_RANK",),
        "num_nodes": ("HOROVOD_CROSS_SIZE",),
    },
    "openmpi": {
        "rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_world_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        "num_nodes": ("OMPI_MCA_orte_num_nodes",),
    },
    "mpich": {
        "rank": ("PMI_RANK",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
        "local_world_size": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    },
    "slurm": {
        "rank": ("SLURM_PROCID",),
        "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        "local_rank": ("SLURM_LOCALID",),
        "node_rank": ("SLURM_NODEID",),
        "num_nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    },
}

# From here on, step numbers are Slurm's own: batch script, extern, the shell of an interactive salloc.
_FIRST_SPECIAL_STEP = 0xFFFFFF00


@dataclass(frozen=True)
class Word:
    """A number and the variable it came from, so that errors can name it."""

    value: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


Words: TypeAlias = "dict[str, Word]"  # in quotes for Python 3.8


def meant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that say something: an empty one counts as unset, and so does Slurm's `(null)`."""
    said = {
        name: value
        for name, value in environ.items()
        if value.strip() and not (name.startswith("SLURM") and value.strip() == "(null)")
    }
    if "SLURM_STEPID" in said:  # the older name, which Slurm sets too
        said.setdefault("SLURM_STEP_ID", said["SLURM_STEPID"])
    return said


def believed(environ: Mapping[str, str]) -> tuple[str, Words]:
    """The first launcher that speaks, and its words; `single` if none does.

    Raises TopologyError for RANK or WORLD_SIZE left from another launch.
    """
    for source in LAUNCHERS:
        said = words(source, environ)
        if "rank" in said and "world_size" in said:
            _refuse_leftovers(source, said, environ)
            return source, said
        if source == "phalanx" and ("rank" in said or "world_size" in said):
            raise _half_said(said)
        if source == "slurm" and "rank" in said:  # alone it would train as if it were all
            raise TopologyError(f"{said['rank']} in a Slurm step, but its number of tasks is unknown: set SLURM_NTASKS")
    lone = words("torchrun", environ, ("rank", "world_size", "local_rank"))
    if "rank" in lone or ("world_size" in lone and lone["world_size"].value > 1):
        raise _half_said(lone)
    if "local_rank" in lone and lone["local_rank"].value > 0:
        raise TopologyError(
            f"{lone['local_rank']} but neither RANK nor WORLD_SIZE is set: set all three, or unset "
            "LOCAL_RANK for a single process"
        )
    return "single", {"rank": Word(0, "rank"), "world_size": Word(1, "world size")}


def words(source: str, environ: Mapping[str, str], fields: tuple[str, ...] = FIELDS) -> Words:
    """The fields that one launcher gives; none if it is not the launcher of this process."""
    if source == "slurm" and not in_slurm_step(environ):
        return {}
    said: Words = {}
    for field, names in LAUNCHERS[source].items():
        name = first_set(environ, *names)
        if name is not None and field in fields:
            said[field] = Word(integer(environ, name, least=int(field in SIZES)), name)
    return {**said, **_slurm_node(said, environ)} if source == "slurm" else said


def agreeing(place: Words, environ: Mapping[str, str]) -> Iterator[tuple[str, Words]]:
    """The launchers that give this very rank and world size, with their words."""
    for source, said in _speaking(environ):
        if all(said[field].value == place[field].value for field in ("rank", "world_size")):
            yield source, said


_STEPS_OWN = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this: in a batch script, Slurm sets SLURM_PROCID=0 without a step. Where the step's number
    did not arrive (through a container, say), words that only a step's tasks have tell it too."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step:
        known = any(environ.get(name) for name in _STEPS_OWN)
        return "SLURM_PROCID" in environ and (known or environ["SLURM_PROCID"] not in ("0", ""))
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in environ


def without_slurm_step(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment less what srun told its task, itself or through its PMI plugin."""
    hidden = {"SLURM_PROCID"}
    if environ.get("PMI_RANK") == environ.get("SLURM_PROCID"):
        hidden.update(("PMI_RANK", "PMI_SIZE"))
    return {name: value for name, value in environ.items() if name not in hidden}


def first_set(environ: Mapping[str, str], *names: str) -> str | None:
    """The first of the variables that is set."""
    return next((name for name in names if name in environ), None)


def integer(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    """A variable's whole number; TopologyError if it is none, or less than `least`."""
    text = environ[name].strip()
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise TopologyError(f"{name}={environ[name]!r}: expected a whole number from {least}. Correct or unset it")
    return int(text)


def _speaking(environ: Mapping[str, str]) -> Iterator[tuple[str, Words]]:
    for source in LAUNCHERS:
        try:
            said = words(source, environ)
        except TopologyError:  # only the believed launcher's words must be without fault
            continue
        if "rank" in said and "world_size" in said:
            yield source, said


def _slurm_node(said: Words, environ: Mapping[str, str]) -> Words:
    """The number of nodes and of this node's tasks, which Slurm also gives as lists over nodes."""
    found: Words = {}
    hosts = environ.get("SLURM_STEP_NODELIST")
    if "num_nodes" not in said and hosts:
        found["num_nodes"] = Word(len(expand_hostlist(hosts)), f"SLURM_STEP_NODELIST={hosts!r}, nodes")
    nodes = said.get("num_nodes") or found.get("num_nodes")
    name = first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is None:
        return {**found, **_even_nodes(said, nodes, environ)}
    counts = expand_counts(environ[name])
    if nodes is None:
        nodes = found["num_nodes"] = Word(len(counts), f"{name}={environ[name]!r}, nodes")
    if len(counts) == 1:
        counts *= nodes.value
    if "world_size" not in said:
        found["world_size"] = Word(sum(counts), f"{name}={environ[name]!r}, tasks")
    if "node_rank" not in said:
        return found
    if len(counts) != nodes.value:
        raise TopologyError(f"{name}={environ[name]!r} is for {len(counts)} nodes, but {nodes}")
    check_below(said["node_rank"], nodes)
    return {**found, "local_world_size": Word(counts[said["node_rank"].value], name)}


def _even_nodes(said: Words, nodes: Word | None, environ: Mapping[str, str]) -> Words:
    """Equally full nodes, where the tasks per node that were asked for leave no other way."""
    if "SLURM_NTASKS_PER_NODE" not in environ or "world_size" not in said:
        return {}
    size = Word(integer(environ, "SLURM_NTASKS_PER_NODE", least=1), "SLURM_NTASKS_PER_NODE")
    count, rest = divmod(said["world_size"].value, size.value)
    if rest or (nodes is not None and nodes.value != count):
        return {}
    return {"local_world_size": size, "num_nodes": nodes or Word(count, "number of nodes")}


def _refuse_leftovers(source: str, said: Words, environ: Mapping[str, str]) -> None:
    """RANK and WORLD_SIZE exported once, in a batch script say, are the same in every task."""
    if source == "phalanx" or "TORCHELASTIC_RUN_ID" in environ:
        return
    if source == "torchrun":
        for _, other in _speaking(environ):
            _refuse_second_rank(said, other)
        _refuse_more_tasks(said, environ)
        return
    for field, word in words("torchrun", environ, ("rank", "world_size")).items():
        if word.value != said[field].value:
            raise TopologyError(f"{word} but {said[field]}: unset {word.name} before the launch")


def _refuse_second_rank(said: Words, other: Words) -> None:
    if other["world_size"].value == said["world_size"].value and other["rank"].value != said["rank"].value:
        raise TopologyError(
            f"{said['rank']} but {other['rank']}, with {said['world_size']} and {other['world_size']}: one "
            "process with two ranks. Unset RANK and WORLD_SIZE before the launch, or set them in each task"
        )


def _refuse_more_tasks(said: Words, environ: Mapping[str, str]) -> None:
    """Agents are as many tasks as there are ranks, or fewer; but each task may have a launch of ours for itself."""
    tasks, ranks = words("slurm", environ, ("world_size",)).get("world_size"), said["world_size"]
    ours = environ.get("PHALANX_EXPECTED_WORLD_SIZE") == str(ranks.value)
    if tasks is not None and tasks.value > ranks.value > 1 and not ours:
        raise TopologyError(
            f"{ranks} but {tasks}: more tasks than ranks, so several would be the same rank. Unset RANK and WORLD_SIZE "
            "before the launch, or set them in each task"
        )


def _half_said(said: Words) -> TopologyError:
    there, other = ("rank", "WORLD_SIZE") if "rank" in said else ("world_size", "RANK")
    name = said[there].name
    missing = name[: -len(there)] + other
    return TopologyError(f"{said[there]} but {missing} is not set: set both, or unset {name} for a single process")


def check_below(index: Word, size: Word) -> None:
    """An index must be less than its size; the error names both variables."""
    if index.value >= size.value:
        raise TopologyError(
            f"{index} but {size}: expected 0 to {size.value - 1}. Correct both, or unset them if they "
            "are left from another launch"
        )
