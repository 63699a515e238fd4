"""A step of which not all tasks could be started: by the words of srun, slurmstepd and mpirun."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .launcher_output import Death

_BEGAN = re.compile(r"^phalanx: rank 0 of \d+ on ", re.MULTILINE)  # by init, once all ranks are there
_REFUSED = re.compile(
    r"srun: error: Task launch for StepId=\S+ failed on node (?P<node>\S+): (?P<why>.+)"
    r"|srun: error: (?P<step>task \d+ launch failed: .+|timeout waiting for task launch, .+|"
    r"Application launch failed: .+|Unable to (?:create (?:job )?step|confirm allocation|"
    r"allocate resources)\b.*|Only allocated \d+ nodes? asked for \d+|Invalid MPI type .+|Could not open std.+|"
    r"unrecognized --\S+ argument .+|Munge \w+ failed.+)"
    r"|srun: (?P<option>(?:unrecognized|invalid|ambiguous) option .+|option .+ requires an argument.*)"
    r"|(?P<daemon>ORTE was unable to reliably start one or more daemons|"
    r"An ORTE daemon has unexpectedly failed after launch)"
)
_EXECVE = re.compile(r"slurmstepd(?:-(?P<node>[^:\s]+))?: error: execve\(\): (?P<what>.+): (?P<why>[^:\n]+)$", re.M)
_NO_PROGRAM = re.compile(r"could not access\nor execute an executable:\s+Executable: (?P<what>.+)\nNode: (?P<node>\S+)")
_NO_COMMAND = re.compile(  # in the shell that evaluates a task's words there
    r"^(?:\S*/)?bash: line \d+: (?:exec: )?(?P<what>\S+): (?P<why>No such file or directory|command not found|"
    r"not found|Permission denied|cannot execute.*)$",
    re.MULTILINE,
)
_NO_COMMAND_CODE = re.compile(r"\bexit code:? +12[67]\b", re.IGNORECASE)
_NUMBERS = {os.strerror(number): number for number in errno.errorcode}  # slurmstepd's exit code for each

# What would help, by the reason: the first that fits. All are about what was asked for, so that the
# same job would fail again.
_REMEDIES: tuple[tuple[str, str], ...] = (
    ("MPI type|plugin", "set mpi to one that srun --mpi=list names"),
    ("option|argument|--", "correct srun_args or cpu_bind"),
    ("std(out|err|in) file", "name a file in srun_args that can be opened there"),
    (
        "Permission denied|Exec format|cannot execute",
        "make it a program that every node may run, or set python to another",
    ),
    ("No such file|found", "every node must have it: set venv, conda, python or modules, or mend the command"),
    ("cpu bind", "set cpu_bind=none, or start it outside of the step that holds the CPUs"),
    ("layout tasks|processors|cpu", "set ntasks_per_node and cpus_per_task to what each node of the job has"),
    ("gres|generic resource|gpu", "set gpus_per_node, gres or srun_args to what the job was given"),
    ("memory", "set mem, or srun_args, to what the job was given"),
    ("account|partition|qos", "set account, partition and qos to ones that you may use"),
    ("allocation|already complet|job id", "that allocation has ended, or is another user's: start anew"),
    ("asked for|node configuration|node name|nodes are busy|node count", "set nodes to what the job was given"),
)
_OF_THE_SITE = "tell those who run the cluster, and start it again"


@dataclass(frozen=True)
class Unlaunched:
    """`words`: what failed, on which node, for which reason, and what to change. `passing`: see
    `stops.Stop`."""

    words: str
    position: int
    node: str | None
    passing: bool


def unlaunched(text: str, tasks: list[Death], others: list[Death]) -> Unlaunched | None:
    """The first failure to start tasks, in the most telling words; `tasks` are the ends that srun
    told, `others` those that the launcher did. One before ranks began was an earlier step's, after
    which the user's own lines went on."""
    began = max((found.end() for found in _BEGAN.finditer(text)), default=0)
    found = [*_programs(text, tasks, began), *_refused(text, began)]
    if began and any(_was_running(death, text, began) for death in (*tasks, *others)):
        return None  # something that a rank had tried, and no step that couldn't start
    if not found:
        return None
    first = min(failure.position for failure in found)
    told = min(found, key=lambda failure: (failure.node is None, failure.position))
    return Unlaunched(told.words, first, told.node, told.passing)


def _was_running(death: Death, text: str, began: int) -> bool:
    """Whether a rank's or task's end is none of one that couldn't be started."""
    codes = {126, 127, *(_NUMBERS.get(hit["why"]) for hit in _EXECVE.finditer(text, began))}
    return death.position >= began and not death.late and death.code not in codes


def _refused(text: str, began: int) -> Iterator[Unlaunched]:
    for found in _REFUSED.finditer(text, began):
        said = found.groupdict()
        why = next(said[name] for name in ("why", "step", "option", "daemon") if said[name])
        yield _failure(said["node"], why, found.start())


def _programs(text: str, tasks: list[Death], began: int) -> Iterator[Unlaunched]:
    """What is to run can't be executed. srun may tell of the tasks' ends before the words come."""
    by_shell = _NO_COMMAND.finditer(text, began) if _NO_COMMAND_CODE.search(text, began) else ()
    hits = [*_EXECVE.finditer(text, began), *_NO_PROGRAM.finditer(text, began), *by_shell]
    for what, why in dict.fromkeys((hit["what"], _why(hit)) for hit in hits):
        same = [hit for hit in hits if (hit["what"], _why(hit)) == (what, why)]
        codes = (126, 127) if same[0].re is _NO_COMMAND else (_NUMBERS.get(why),)
        ends = [death for death in tasks if death.code in codes and death.position >= began]
        nodes = {hit.groupdict().get("node") for hit in same} - {None} or {death.host for death in ends}
        first = min([hit.start() for hit in same] + [death.position for death in ends])
        yield _failure(", ".join(sorted(filter(None, nodes))), why, first, f"{what}: ")


def _why(hit: re.Match[str]) -> str:
    return hit.groupdict().get("why") or "it can't be found or executed"


def _failure(nodes: str | None, why: str, position: int, what: str = "") -> Unlaunched:
    where = f" on {nodes}" if nodes else ""
    node = nodes.partition(",")[0] if nodes else None
    known = next((remedy for fits, remedy in _REMEDIES if re.search(fits, why, re.IGNORECASE)), None)
    other = f"leave {node} out (exclude={node}), or {_OF_THE_SITE}" if node else _OF_THE_SITE
    words = f"the launch failed{where}: {what}{why.strip()}; {known or other}"
    return Unlaunched(words, position, node, passing=known is None)
