"""Series with stand-ins for Slurm: what differs between members, what is left out, and what is run once more."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from phalanx.cli import retry
from phalanx.cli.main import main
from phalanx.config import load_config
from phalanx.processes import started
from phalanx.records import RecordWriter
from phalanx.schedulers import local_notes, series
from phalanx.schedulers.local_notes import Note, Runner
from phalanx.schedulers.slurm import jobs
from phalanx.schedulers.slurm.jobs import OurJob, select

SBATCH = r"""#!/bin/bash
n=$(($(cat "$STUB/count" 2>/dev/null || echo 0) + 1)); echo "$n" >"$STUB/count"
printf '%s\0' "$@" >"$STUB/$((1000 + n)).argv"; echo "$((1000 + n))"
"""
FORGOTTEN = "#!/bin/bash\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
NO_HOROVOD = """#!/bin/bash
[ "$3" = horovod ] || echo /there
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with a script, on a machine where sbatch takes jobs, numbered from 1001, that Slurm then forgets."""
    for name in [name for name in os.environ if name.startswith(("PHALANX_", "SLURM_", "OMP_"))]:
        monkeypatch.delenv(name)
    programs, stub, folder = tmp_path / "bin", tmp_path / "stub", tmp_path / "work"
    for path in (programs, stub, folder):
        path.mkdir()
    texts = {"sbatch": SBATCH, "sinfo": "#!/bin/bash\necho 'main*|up|8|64|256000|1-00:00:00|gpu:a100:4'\n"}
    texts |= dict.fromkeys(("squeue", "sacct", "scontrol", "scancel"), FORGOTTEN)
    texts["python-without-horovod"] = NO_HOROVOD
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB", str(stub))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text("")
    return folder


def argv(job):
    return Path(os.environ["STUB"], f"{job}.argv").read_text().split("\0")[:-1]


def submitted(capsys, *words):
    """Ids by run directory, and what was said."""
    assert main(["submit", "-t", "5", "--cpus-per-task", "1", *words]) == 0
    said = capsys.readouterr()
    return {Path(argv(job)[-1]): job for job in said.out.split()}, said.err


def end(run_dir, job, code):
    """What a job's script leaves behind."""
    (run_dir / "jobs" / f"{job}.start").write_text(f"{time.time() - 1}\n")
    (run_dir / "jobs" / f"{job}.exit").write_text(f"{code}\n")


TEST = ("--mode", "scaling-test", "--scalability-nodes", "1,2", "--nproc", "2", "job_name=s")


def test_members_differ_in_strategy_nodes_and_name_only(work, capsys):
    words = ("--strategies", "ddp,fsdp", "lr_scaling.rule=linear", "seed=7", "scaling=weak", "train.py", "--lr", "0.1")
    runs, _ = submitted(capsys, *TEST, *words)
    settings = [yaml.safe_load((run / "config.yaml").read_text()) for run in runs]
    own = {"strategy", "nodes", "name", "job_name"}
    assert [{name: one.pop(name) for name in own} for one in settings] == [
        {"strategy": strategy, "nodes": nodes, "name": name, "job_name": name}
        for strategy in ("ddp", "fsdp")
        for nodes in (1, 2)
        for name in [f"s-{strategy}-{nodes}x2"]
    ]
    assert settings == [settings[0]] * 4
    assert settings[0]["lr_scaling"] == {"rule": "linear"}
    assert settings[0]["scaling"] == "weak"
    assert not {"mode", "strategies", "scalability_nodes", "repeats"} & set(settings[0])  # a member is one run
    commands = {re.sub(r".*phalanx.worker ", "", (run / "job.sh").read_text(), flags=re.DOTALL) for run in runs}
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("output", "files"),
    [
        ("out.txt", {"s-ddp-1x2-r1-out.txt", "s-ddp-1x2-r2-out.txt", "s-ddp-2x2-r1-out.txt", "s-ddp-2x2-r2-out.txt"}),
        ("l/%x.out", {"l/r1-%x.out", "l/r2-%x.out"}),
        ("l/%x-%j.out", {"l/%x-%j.out"}),
        (None, set()),
    ],
)
def test_repeats_share_a_name_and_no_file(work, capsys, output, files):
    words = [f"output={output}"] if output else []
    runs, _ = submitted(capsys, *TEST, "--strategies", "ddp", "--repeats", "2", *words, "train.py")
    assert [run.parent.name for run in runs] == ["s-ddp-1x2", "s-ddp-2x2"] * 2  # a repeat comes after all others
    assert len(set(runs)) == 4
    lines = [re.findall(r"^#SBATCH --output=(.*)$", (run / "job.sh").read_text(), re.MULTILINE) for run in runs]
    assert {name for found in lines for name in found} == files
    given = {word for job in runs.values() for word in argv(job) if word.startswith("--output=")}
    assert len(given) == (0 if output else 4)


def test_a_default_strategy_without_its_package_is_left_out_with_a_word(work, capsys):
    python = "python=python-without-horovod"
    for words in (["submit", "--preview", "--launcher", "srun"], ["plan"]):
        assert main([*words, "--mode", "runall", "--nproc", "2", "job_name=s", python, "train.py"]) == 0
        said = capsys.readouterr()
        assert set(re.findall(r"s-(\w+)-1x2", said.out)) == {"ddp", "deepspeed"}
        assert "leaves out horovod: strategy horovod needs horovod, which python-without-horovod doesn't" in said.err
        assert "phalanx env create" in said.err
    assert main(["submit", "--mode", "runall", "--strategies", "ddp,horovod", "--nproc", "2", python, "train.py"]) == 2
    assert "strategy horovod needs horovod" in capsys.readouterr().err
    assert not (work / "runs").exists()


def config(*words):
    return load_config((), words, {}).config


def sizes(found):
    return [(size.nodes, size.nproc) for size in found]


def test_sizes_here_are_powers_of_two_and_all_there_is():
    test = config("mode=scaling-test")
    assert sizes(series.sizes_here(test, cpus=64, gpus=6)) == [(1, 1), (1, 2), (1, 4), (1, 6)]
    assert sizes(series.sizes_here(test, cpus=2, gpus=0)) == [(1, 1), (1, 2)]
    assert sizes(series.sizes_here(test, cpus=1, gpus=0)) == [(1, 1)]
    assert sizes(series.sizes_here(config("mode=scaling-test", "device=cpu"), 4, 1)) == [(1, 1), (1, 2), (1, 4)]
    assert sizes(series.sizes_here(config("mode=scaling-test", "scalability_nproc=3,1"), 4, 1)) == [(1, 3), (1, 1)]
    assert sizes(series.sizes_here(config("mode=runall"), 4, 1)) == [(1, None)]


def test_sizes_within_an_allocation():
    test = config("mode=scaling-test")
    found, notes = series.sizes_in_allocation(test, 3, chosen=False)
    assert sizes(found) == [(1, None), (2, None)]
    assert notes == ["4 and 8 nodes are left out: this allocation has 3"]
    assert len(series.sizes_in_allocation(test, 3, chosen=True)[0]) == 4
    assert series.sizes_in_allocation(config("mode=runall", "nodes=3"), 3, False) == ([series.Size(3)], [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "ddp,hvd", "train.py"], ["'hvd'", "horovod"]),
        (["--strategies", "horovod", "--launcher", "torchrun", "train.py"], ["torchrun cannot start Horovod"]),
        (["--strategies", "single", "--scalability-nproc", "2", "train.py"], ["single is one process"]),
        (["--resume", "latest", "train.py"], ["resume='latest'", "phalanx retry"]),
        (["--scalability-nproc", "0", "train.py"], ["scalability_nproc", "from 1"]),
        (["--repeats", "0", "train.py"], ["repeats"]),
        (["--mode", "single", "--repeats", "3", "train.py"], ["repeats=3", "--mode runall"]),
        (["--launcher", "srun", "--strategies", "ddp", "train.py"], ["launcher srun", "allocation"]),
        (["--device", "cuda", "--strategies", "ddp", "train.py"], ["no GPU is visible"]),
        (["--strategies", "ddp", "absent.py"], ["absent.py"]),
        (["--strategies", "ddp", "venv=/no/venv", "train.py"], ["/no/venv/bin/python"]),
    ],
)
def test_what_cannot_work_here_is_refused_before_anything_is_written(work, capsys, words, said):
    assert main(["run", "--local", "--mode", "scaling-test", *words]) == 2
    error = capsys.readouterr().err
    for word in said:
        assert word in error
    assert [path.name for path in work.iterdir()] == ["train.py"]


def test_a_plan_shows_the_members_of_both_kinds(work, capsys):
    words = ("--mode", "scaling-test", "--strategies", "ddp,fsdp", "--scalability-nproc", "1,3")
    assert main(["plan", "--json", *words, "--scalability-nodes", "2", "--gpus-per-node", "4", "train.py"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "error" in found["run"]  # this machine has no GPUs
    assert [(plan["name"], plan["world_size"]) for plan in found["submit"]] == [
        ("train-ddp-2x4", 8),
        ("train-fsdp-2x4", 8),
    ]
    assert main(["plan", *words, "--repeats", "2", "train.py"]) == 0
    text = capsys.readouterr().out
    assert "on this machine, each 2 times:" in text
    assert re.findall(r"^  (train-\w+-1x[13]) .* cpu$", text, re.MULTILINE) == [
        "train-ddp-1x1",
        "train-ddp-1x3",
        "train-fsdp-1x1",
        "train-fsdp-1x3",
    ]
    assert main(["plan", "--mode", "runall", "--strategies", "nix", "train.py"]) == 2


def test_a_retry_submits_the_failed_members_as_they_were(work, capsys):
    runs, said = submitted(capsys, *TEST, "--strategies", "ddp", "train.py")
    name = re.search(r"series (s-\S+):", said)[1]
    (good, bad), (first, second) = list(runs), list(runs.values())
    script = (bad / "job.sh").read_text()
    end(good, first, 0)
    end(bad, second, 3)
    assert main(["status", name]) == 0
    text = capsys.readouterr().out
    assert f"series {name}: 2 runs: 1 COMPLETED, 1 FAILED\n  failed: s-ddp-2x2\n" in text
    assert f"phalanx retry {name}\n" in text
    assert main(["retry", name]) == 0
    assert capsys.readouterr().out == "1003\n"
    assert argv("1003")[1:] == [f"--output={bad}/slurm-%j.out", f"{bad}/job.sh", str(bad)]
    assert (bad / "job.sh").read_text() == script
    note = json.loads((bad / "jobs" / "1003.json").read_text())
    assert (note["series"], note["name"], note["nodes"]) == (name, "s-ddp-2x2", 2)
    end(bad, "1003", 0)
    assert main(["status", name]) == 0
    assert f"series {name}: 2 runs: 2 COMPLETED\n" in capsys.readouterr().out  # the newest job of each counts
    assert main(["retry", name]) == 0
    assert capsys.readouterr().out.startswith("nothing to retry: s-ddp-1x2 is COMPLETED")
    assert not Path(os.environ["STUB"], "1004.argv").exists()


def test_what_cannot_be_retried_is_refused(work, capsys, monkeypatch):
    runs, _ = submitted(capsys, "env.MY_TOKEN=abc", "name=secret", "train.py")
    ((run, job),) = runs.items()
    end(run, job, 1)
    assert main(["retry", "secret"]) == 2
    assert "MY_TOKEN: secret" in capsys.readouterr().err
    monkeypatch.setenv("MY_TOKEN", "abc")
    assert main(["retry", "secret"]) == 0
    by_hand = work / "runs" / "hand" / "job-77"
    (by_hand / "jobs").mkdir(parents=True)
    end(by_hand, 77, 1)
    assert main(["retry", "77"]) == 2
    assert "no job.sh" in capsys.readouterr().err
    runs, _ = submitted(capsys, "-a", "1-2", "name=tasks", "train.py")
    ((run, job),) = runs.items()
    (run / "array-2" / "jobs").mkdir(parents=True)
    end(run / "array-2", 1234, 1)
    assert main(["retry", f"{job}_2"]) == 2
    assert "--array 2" in capsys.readouterr().err
    assert main(["retry"]) == 2
    assert "phalanx retry SERIES" in capsys.readouterr().err
    assert main(["retry", "nix"]) == 2
    assert "'nix'" in capsys.readouterr().err


@pytest.fixture
def member(work):
    """Makes the run directory of a local series' member."""

    def make(name, runner, run="20260101-000000-aaaa", **more):
        run_dir = work / "runs" / name / run
        (run_dir / "jobs").mkdir(parents=True)
        (run_dir / "config.yaml").write_text("strategy: ddp\n")
        (run_dir / "plan.json").write_text('{"script": "train.py", "args": [], "environment": {}}')
        Note(name, "s-1", time.time(), 1, str(work), runner, **more).write(run_dir)
        return run_dir

    return make


GONE = Runner(platform.node(), 2**22 + 1, "1")  # more than any pid
AWAY = Runner("elsewhere", os.getpid(), "1")


def rows(capsys):
    return {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("local ")}


def test_local_members_are_listed_with_state_and_progress(member, capsys):
    me = local_notes.this_process()
    now = time.time()
    run_dir = member("a", me, began=now - 60)
    writer = RecordWriter(run_dir, 0, 1)
    writer.step(120, 3, 0.1, 0.0, 32)
    writer.close()
    member("b", me)
    member("c", me, began=now - 90, ended=now - 20, code=0)
    member("d", me, began=now - 90, ended=now - 20, code=3, lines=("rank 1 on h failed: E: x",), culprit=1)
    member("e", me, ended=now, stopped=True)
    member("f", GONE, began=now - 5)
    member("g", GONE)
    member("h", AWAY, began=now - 5)
    member("i", Runner(me.host, me.pid, "1"))  # another process had this number
    assert main(["status"]) == 0
    found = rows(capsys)
    expected = {
        "a": r"RUNNING +1 +1:00 +epoch 3, step 120",
        "b": r"PENDING",
        "c": r"COMPLETED +1 +1:10 ",
        "d": r"FAILED \(3\)",
        "e": r"CANCELLED",
        "f": r"GONE \(the command that ran it was killed\)",
        "g": r"GONE \(never started\)",
        "h": r"UNKNOWN \(look on elsewhere",
        "i": r"GONE \(never started\)",
    }
    for name, pattern in expected.items():
        assert re.search(pattern, found[name]), found[name]
    assert main(["status", "s-1"]) == 0
    said = capsys.readouterr().out
    assert "9 runs: 1 RUNNING, 1 PENDING, 1 COMPLETED, 1 FAILED, 1 CANCELLED, 3 GONE, 1 UNKNOWN" in said
    assert "run d\n  failure    rank 1 on h failed: E: x" in said
    assert main(["status", "d", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["failure"]["rank"], one["failure"]["host"], one["exit_code"]) == (1, me.host, 3)


def test_cancel_ends_the_process_that_was_written_down_and_no_other(member, capsys):
    now = time.time()
    with subprocess.Popen(["sleep", "60"]) as other, subprocess.Popen(["sleep", "60"]) as process:
        runner = Runner(platform.node(), process.pid, started(process.pid))
        running, waiting = member("a", runner, began=now), member("b", runner)
        member("c", Runner(platform.node(), other.pid, "1"), began=now)
        assert main(["cancel", "s-1"]) == 0
        assert capsys.readouterr().out == "cancelled a, which was RUNNING\ncancelled b, which was PENDING\n"
        assert process.wait(timeout=10) == -15
        assert local_notes.is_cancelled(running)
        assert local_notes.is_cancelled(waiting)
        assert other.poll() is None
        other.kill()
    assert main(["cancel", "c"]) == 0
    assert capsys.readouterr().out == "nothing to cancel: c is GONE\n"
    member("d", AWAY, began=now)
    assert main(["cancel", "d"]) == 2
    assert "use phalanx cancel on elsewhere" in capsys.readouterr().err


def test_a_member_ends_with_the_allocation_that_it_ran_in(work, member, capsys):
    member("a", AWAY, began=time.time(), allocation="17")
    member("b", AWAY, allocation="17")
    squeue = work.parent / "bin" / "squeue"
    forgotten = squeue.read_text()
    row = ["17", "17", "RUNNING", "None", "1", "1:00", "5:00", "0", "0", "main", "elsewhere", "(null)", "x", "/tmp"]
    squeue.write_text("#!/bin/bash\n" + "printf '" + "".join(f"{cell}\\x1f" for cell in row) + "\\n'\n")
    assert main(["status", "s-1"]) == 0
    assert "2 UNKNOWN" in capsys.readouterr().out
    assert main(["cancel", "s-1"]) == 2
    assert "or scancel 17" in capsys.readouterr().err
    squeue.write_text(forgotten)
    assert main(["status", "s-1"]) == 0
    said = capsys.readouterr().out
    assert "GONE (job 17, in which it ran, has ended)" in said
    assert "failed: a\n  not run to the end: b\n" in said


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ({"runner": "me"}, "a of series s-1 is PENDING"),
        ({"runner": AWAY, "ended": 1.0, "code": 1}, "ran on host elsewhere"),
        ({"runner": GONE, "allocation": "17"}, "ran in allocation 17"),
        ({"runner": GONE, "cwd": "/nowhere"}, "started in /nowhere"),
        ({"runner": GONE, "plan": "{}"}, "plan.json doesn't say what ran"),
    ],
)
def test_a_local_member_that_cannot_be_retried_is_refused(work, member, capsys, note, said):
    runner = local_notes.this_process() if note["runner"] == "me" else note["runner"]
    run_dir = member("b", GONE, began=time.time())
    run_dir = member("a", runner, **{name: note[name] for name in ("allocation", "ended", "code") if name in note})
    if "cwd" in note:
        Note("a", "s-1", 1.0, 1, note["cwd"], runner).write(run_dir)
    if "plan" in note:
        (run_dir / "plan.json").write_text(note["plan"])
    assert main(["retry", "s-1"]) == 2
    assert said in capsys.readouterr().err


def test_what_failed_before_a_restart_of_its_host_can_be_retried_there(member, monkeypatch):
    before = replace(local_notes.this_process(), boot="another")
    run_dir = member("a", before, began=1.0, ended=2.0, code=1)
    (run,) = jobs.with_states(jobs.known(run_dir.parents[1]))
    assert (run.state.state, retry._plan(run).run_dir) == ("FAILED", run_dir)
    member("b", before, began=1.0)
    (_, run) = sorted(jobs.with_states(jobs.known(run_dir.parents[1])), key=lambda run: run.name)
    assert (run.state.state, "before host" in run.state.reason) == ("UNKNOWN", True)


def test_logs_of_a_local_member_are_those_of_other_ranks(member, capsys):
    run_dir = member("a", GONE, began=time.time())
    (run_dir / "plan.json").write_text('{"world_size": 2, "nproc_per_node": 2}')
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "1.log").write_text("hello\n")
    assert main(["logs", "a", "--rank", "1"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert main(["logs", "a"]) == 2
    assert "rank 0 printed on the terminal" in capsys.readouterr().err


def test_where_no_default_strategy_can_run_the_reason_is_told(work, capsys):
    assert main(["submit", "--preview", "--mode", "runall", "--launcher", "horovodrun", "-N", "2", "train.py"]) == 2
    assert "The nearest that works: --launcher torchrun --strategy ddp" in capsys.readouterr().err
    python = "python=python-without-horovod"
    (work.parent / "bin" / "python-without-horovod").write_text("#!/bin/bash\necho\n")
    words = ("--mode", "runall", "--launcher", "ray", "--nproc", "2", python)
    assert main(["submit", "--preview", *words, "train.py"]) == 2
    assert "launcher ray needs ray" in capsys.readouterr().err


def test_a_series_is_found_by_its_jobs_name_too() -> None:
    jobs = [
        OurJob(
            str(number), Path(f"/r/{number}"), f"train-ddp-{number}x1", float(number), f"train-2026010{number}-120000"
        )
        for number in (1, 2)
    ]
    assert [job.job_id for job in select(jobs, "train")] == ["2"]
    assert select(jobs, "trai") == []
