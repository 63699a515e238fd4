"""`phalanx test`: pytest on every worker of a launch, for tests marked torch_dist, deepspeed_dist and so on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ..errors import MissingExtraError, PlanError, UsageError
from ..planning import cells, engines
from ..planning.plan import LaunchPlan
from ..planning.planner import make_plan
from ..planning.resources import Resources
from ..schedulers import local
from ..testing import junit, pairing, results
from .launch import Request, facts_for, plan_of, request_of
from .options import Scanned, scan
from .run import find_share, over_share, refuse_login_node

HELP = """\
usage: phalanx test [-m MARKER] [options] [KEY=VALUE]... [-- pytest arguments]

Run pytest on every worker of a launch, and give one verdict over all. MARKER is torch_dist, deepspeed_dist,
horovod_dist or ray_dist, or an expression with one of them, such as 'hpc and torch_dist'; without -m all
four run, one launch after the other, as far as their engines are installed. Each has a launcher that fits:
torchrun; srun in a job, else torchrun; mpirun in a job, else horovodrun; ray.

The main worker prints on the terminal, the others into logs_LAUNCHER/JOB/rank-N.log. A test that fails on
any worker fails the run; the exit code is pytest's if all workers agree on it, else 1.

      --launcher NAME    another launcher; one that can't start such tests is refused
      --nproc N          workers per node (unset, on one machine without GPUs: 2)
      --submit           as a Slurm job, of which the settings say the rest
      --wait             with --submit: show its output, wait for its end, give the verdict
      --preview          only print the job's script
      --junit FILE       all workers' results as one JUnit file, a testsuite each
      --test-timeout S   seconds that a test may take, after which its worker shows its stacks and ends (300)
  -c, --config FILE      settings file (YAML) of the site: partition, account, venv or container, …
      --jobid ID         over the running Slurm job ID;  --local: here, also on a login node
      --force            with --submit: also what looks impossible
      --KEY VALUE        any other setting, also KEY=VALUE, as for phalanx run
      --                 what follows is pytest's: files, -k, -x, …
  -h, --help             show this help

examples:
  phalanx test -m torch_dist --nproc 2 -- tests/hpc
  phalanx test -m 'hpc and deepspeed_dist' -c tests/sites/jsc.yaml --submit --wait --junit results.xml
  salloc -N 2 phalanx test -m horovod_dist --nproc 4"""

RANK = Path(__file__).resolve().parents[1] / "testing" / "rank.py"
_FLAGS = ("submit", "wait", "preview", "local", "force")
_VALUED = ("junit", "test-timeout", "jobid", "marker")
_TIMEOUT = "300"


@dataclass(frozen=True)
class Suite:
    """The tests of one kind: the command line that starts them, and its settings."""

    kind: pairing.Kind
    scanned: Scanned
    request: Request


def main(argv: Sequence[str]) -> int:
    """`argv` without `test`; the result is the exit code."""
    scanned, expression = _read(argv)
    if "help" in scanned.flags:
        print(HELP)
        return 0
    in_job = _in_job(scanned)
    suites = _suites(scanned, expression, in_job)
    if scanned.flags & {"submit", "preview"}:
        from .testjobs import submitted  # what talks to Slurm

        launches = submitted(suites, scanned.flags)
    else:
        launches = _launches(suites)
    return conclude(launches, scanned) if launches else 0


def _read(argv: Sequence[str]) -> tuple[Scanned, str | None]:
    """Options and the expression of markers; `args` are pytest's: all from the first word that is no option, and what
    follows `--`. (For sbatch -m is another option.)"""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    ours, more, expression = words[:end], words[end + 1 :], None
    for at, word in enumerate(ours):
        if word == "-m" or (word.startswith("-m") and not word.startswith("--")):
            value = ours[at + 1 : at + 2] if word == "-m" else [word[2:].removeprefix("=")]
            if not value or not value[0].strip():
                raise UsageError("option -m needs a marker: one of " + ", ".join(pairing.KINDS))
            expression, ours = value[0], ours[:at] + ours[at + (2 if word == "-m" else 1) :]
            break
    scanned = scan(ours, script=True, flags=_FLAGS, valued=_VALUED)
    own = (*((scanned.script,) if scanned.script else ()), *scanned.args, *more)
    for name, before in (("-m", "-m"), ("--junitxml", "--junit"), ("--junit-xml", "--junit")):
        if any(word == name or word.startswith(f"{name}=") for word in own):
            raise UsageError(f"{name} is among pytest's arguments: give {before} before --")
    return replace(scanned, script=None, args=own), expression or scanned.values.get("marker")


def _in_job(scanned: Scanned) -> bool:
    """Whether workers will run in a Slurm job. Raises UsageError for options that contradict each other."""
    flags = scanned.flags
    if "wait" in flags and not flags & {"submit", "preview"}:
        raise UsageError("--wait is for jobs: add --submit")
    if "junit" in scanned.values and "submit" in flags and "wait" not in flags:
        raise UsageError("--junit needs the results of the job: add --wait")
    if flags & {"submit", "preview"} and ("jobid" in scanned.values or "local" in flags):
        raise UsageError("--submit and --preview are for a job of its own: leave out --jobid and --local")
    return bool(flags & {"submit", "preview"}) or "jobid" in scanned.values or find_share(scanned) is not None


def _suites(scanned: Scanned, expression: str | None, in_job: bool) -> list[Suite]:
    """One for each kind of test. Kinds that nobody asked for by name are left out, loudly, where they can't run.

    Raises PlanError, MissingExtraError or UsageError for those that were, and if none is left.
    """
    wanted = pairing.expressions(expression)
    suites, reasons = [], []
    for marker, text in wanted.items():
        try:
            suites.append(_suite(scanned, pairing.KINDS[marker], text, in_job))
        except (PlanError, MissingExtraError) as error:
            if len(wanted) == 1:
                raise
            reasons.append(f"NOT RUN: {marker}: {error}")
    for reason in reasons:
        print(reason, file=sys.stderr)
    if not suites:
        raise PlanError("none of the distributed tests can run here, for the reasons above")
    return suites


def _suite(scanned: Scanned, kind: pairing.Kind, markers: str, in_job: bool) -> Suite:
    """The settings for one kind, checked as a pair of launcher and tests."""
    seconds = scanned.values.get("test-timeout", _TIMEOUT)
    if not seconds.isdecimal() or int(seconds) < 1:
        raise UsageError(f"--test-timeout {seconds!r}: expected a number of seconds from 1")
    plain = replace(scanned, script=str(RANK), args=("auto", markers, seconds, *scanned.args))
    config = request_of(plain, "test").loaded.config
    if config.exec_command or config.exec_file:
        raise PlanError("exec_command and exec_file stand in place of the launch: unset them for phalanx test")
    launcher = kind.launcher(in_job) if config.launcher == "auto" else config.launcher
    strategy = kind.strategy if config.strategy == "auto" else config.strategy
    settings = {"mode": "single", "launcher": launcher}
    settings |= {"strategy": strategy} if strategy != "auto" else {}  # tests may then choose, each its own
    settings |= {} if config.name or config.job_name else {"name": f"test-{kind.marker}"}
    if "preview" in scanned.flags:
        settings["submit_job"] = "false"
    if "preview" in scanned.flags or config.submit_job:  # the run directory keeps the script
        settings["save_script"] = "false"
    chosen = replace(plain, args=(launcher, *plain.args[1:]))
    request = request_of(chosen, "test", settings, f"-m {kind.marker}")
    facts = facts_for(request.loaded)
    alone = Resources(config, facts, not in_job).world_size == 1 and config.nproc_per_node is None
    if alone and _of_its_own(scanned, in_job):  # one process would pass all distributed tests for the wrong reason
        request = request_of(chosen, "test", {**settings, "nproc_per_node": "2"}, f"-m {kind.marker}")
    _check(kind, request, scanned, in_job)
    return Suite(kind, chosen, request)


def _of_its_own(scanned: Scanned, in_job: bool) -> bool:
    """Whether the launch isn't over an allocation, which has a size already."""
    return not in_job or bool(scanned.flags & {"submit", "preview"})


def _check(kind: pairing.Kind, request: Request, scanned: Scanned, in_job: bool) -> None:
    """All that is known to fail: the pair, the engine's packages and pytest where this Python runs the workers."""
    config, facts = request.loaded.config, facts_for(request.loaded)
    processes = Resources(config, facts, not in_job).world_size
    place = cells.Cell(config.launcher, config.strategy, "venv", cells.NODES[config.nodes > 1])
    pairing.check(kind, config.launcher, config.strategy, place, processes, in_job)
    plan = make_plan(config, facts, request.program, for_slurm=in_job)
    if scanned.flags & {"preview", "force"}:
        return
    engines.check(plan)
    if plan.runtime == "venv" and plan.python == sys.executable and find_spec("pytest") is None:
        raise MissingExtraError("'pytest' is not installed, which runs the tests: pip install 'phalanx[test]'")


def _launches(suites: list[Suite]) -> list[results.Launch]:
    """One after the other, until all have run or somebody stops the command."""
    launches: list[results.Launch] = []
    for suite in suites:
        if not launches or not launches[-1].stopped:
            launches.append(_launch(suite))
    return launches


def _launch(suite: Suite) -> results.Launch:
    """Run one suite now, here or over the allocation."""
    share = find_share(suite.scanned)
    if share is not None:
        plan, loaded = over_share(suite.request, share)
    else:
        refuse_login_node(suite.scanned, "phalanx test --submit", "phalanx test")
        plan, loaded = plan_of(suite.request), suite.request.loaded
    print(f"{suite.kind.marker}: {plan.world_size} workers by {plan.launcher}", file=sys.stderr, flush=True)
    outcome = local.launch(plan, loaded)
    return launch_of(suite, plan, outcome)


def launch_of(suite: Suite, plan: LaunchPlan, outcome: local.Outcome) -> results.Launch:
    """What a launch that has ended left behind."""
    return results.Launch(
        run_dir=outcome.run_dir,
        marker=suite.kind.marker,
        markers=suite.scanned.args[1],
        workers=results.read(outcome.run_dir, plan.world_size),
        nproc_per_node=plan.nproc_per_node,
        code=outcome.code,
        reason=outcome.lines,
        culprit=outcome.culprit,
        stopped=outcome.stopped,
    )


def conclude(launches: list[results.Launch], scanned: Scanned) -> int:
    """Print the verdict and write the JUnit file; the exit code. Where several kinds ran, one without tests is none."""
    for launch in launches:
        print("\n".join(results.verdict(launch)), file=sys.stderr, flush=True)
    if "junit" in scanned.values:
        junit.merge(launches, Path(scanned.values["junit"]))
    ran = [launch for launch in launches if not launch.empty] or launches
    codes = {launch.exit_code for launch in ran} - {0}
    return codes.pop() if len(codes) == 1 else int(bool(codes))
