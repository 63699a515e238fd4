"""Whose a job's number is: what Slurm says of it is compared with what was noted, before anything is touched."""

import json
import os
import time
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.schedulers.slurm import identity
from tests.unit.slurm_programs import Programs

DAY = 86400
NOON = 1_790_000_000.0


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("PHALANX_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Cluster beta, that knows no job and has no accounting."""
    programs = Programs(tmp_path / "slurm", monkeypatch)
    programs.answer("squeue", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    programs.answer("sacct", err="Slurm accounting storage is disabled\n", code=1)
    programs.answer("scontrol", "ClusterName             = beta\n")
    return programs


@pytest.fixture
def job(work):
    """Makes the run directory of job 12."""

    def make(name="train", **more):
        run_dir = work / "runs" / name / "20260101-000000-aaaa"
        (run_dir / "jobs").mkdir(parents=True)
        (run_dir / "job.sh").write_text("#!/bin/bash\n")
        note = {"v": 1, "job_id": "12", "name": name, "job_name": name, "series": None, "nodes": 1, "chain": None}
        (run_dir / "jobs" / "12.json").write_text(json.dumps({**note, "submitted": NOON, **more}))
        return run_dir

    return make


def stamp(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def said(name="train", submitted=NOON, state="RUNNING", restarts=0):
    row = ("12", "12", state, "None", "1", "1:00", "5:00", "0", str(restarts), "main", "node1", "(null)", name, "/tmp")
    return "\x1f".join((*row, stamp(submitted))) + "\x1f\n"


@pytest.mark.parametrize(
    ("note", "answer", "ours"),
    [
        ({"slurm_submitted": NOON}, {}, True),
        ({"slurm_submitted": NOON}, {"name": "renamed"}, True),
        ({"slurm_submitted": NOON}, {"submitted": NOON + 2}, False),  # a counter that began anew
        ({"slurm_submitted": NOON}, {"submitted": NOON + DAY, "restarts": 1}, True),  # requeued
        ({"slurm_submitted": NOON}, {"submitted": NOON + DAY, "restarts": 1, "name": "x"}, False),
        ({"slurm_submitted": NOON}, {"submitted": NOON - DAY, "restarts": 1}, False),
        ({"slurm_submitted": NOON, "cluster": "beta"}, {}, True),
        # Notes of the version before know their own clock's time, and the name in the plan.
        ({}, {"submitted": NOON - 1}, True),
        ({}, {"submitted": NOON - 1, "name": "by an option of sbatch"}, True),
        ({}, {"submitted": NOON + 60, "name": "x"}, False),
        ({}, {"submitted": NOON + DAY}, False),
        ({}, {"submitted": NOON + DAY, "restarts": 2}, True),
    ],
)
def test_only_the_job_that_was_noted_is_cancelled(slurm, job, capsys, note, answer, ours):
    job(**note)
    slurm.answer("squeue", said(**answer))
    assert main(["cancel", "train"]) == 0
    assert slurm.calls("scancel") == (["12"] if ours else [])
    shown = capsys.readouterr().out
    assert ("cancelled 12 (train)" if ours else "nothing to cancel: 12 is GONE") in shown
    assert main(["status", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == ("RUNNING" if ours else "GONE")


def test_a_job_of_another_cluster_is_neither_asked_about_nor_touched(slurm, job, capsys):
    run_dir = job(cluster="alpha", slurm_submitted=NOON)
    slurm.answer("squeue", said())
    assert main(["cancel", "train"]) == 2
    assert "job 12 of train: on cluster alpha, and this is beta: not touched" in capsys.readouterr().err
    assert main(["status"]) == 0
    assert "UNKNOWN (on cluster alpha, and this is beta)" in capsys.readouterr().out
    assert main(["retry", "train"]) == 0
    assert "nothing to retry: train is UNKNOWN (on cluster alpha" in capsys.readouterr().out
    (run_dir / "slurm-12.out").write_text("hello\n")
    assert main(["logs", "12"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert [slurm.calls(name) for name in ("squeue", "sacct", "scancel", "sbatch")] == [[], [], [], []]


def test_how_a_job_of_another_cluster_ended_is_known_by_its_files(slurm, job, capsys):
    run_dir = job(cluster="alpha", slurm_submitted=NOON)
    (run_dir / "jobs" / "12.start").write_text("1000\n")
    (run_dir / "jobs" / "12.exit").write_text("3\n")
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "FAILED"


def test_runs_whose_jobs_have_one_number_are_told_apart(slurm, job, capsys):
    job("old", slurm_submitted=NOON - DAY, submitted=NOON - DAY)
    job("new", slurm_submitted=NOON)
    slurm.answer("squeue", said("new"))
    assert main(["status", "--json"]) == 0
    states = {one["name"]: one["state"] for one in json.loads(capsys.readouterr().out)}
    assert states == {"old": "GONE", "new": "RUNNING"}
    assert main(["cancel", "12"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("cancelled")] == [
        "cancelled 12 (new), which was RUNNING"
    ]


def test_a_number_that_is_another_jobs_now_is_said(slurm, job, work, capsys):
    run_dir = job(slurm_submitted=NOON)
    fields = {
        "JobId": "12",
        "JobName": "train",
        "UserId": "u(1)",
        "JobState": "RUNNING",
        "Restarts": "0",
        "SubmitTime": stamp(NOON + 9),
    }
    line = " ".join(f"{key}={text}" for key, text in fields.items())
    slurm.answer("scontrol", f"{line} Command={run_dir}/job.sh {run_dir}\n")
    assert main(["cancel", "12", "--run-root", str(work / "elsewhere")]) == 2
    assert "job 12 is another one than that of" in capsys.readouterr().err
    assert slurm.calls("scancel") == []


def test_what_slurm_says_at_the_submission_is_kept(slurm, work, monkeypatch):
    (work / "train.py").write_text("")
    slurm.answer("sinfo", "main*|up|2|64|256000|1-00:00:00|(null)\n")
    slurm.answer("sbatch", "12;gamma\n")
    assert main(["submit", "-t", "5", "--no-save-script", "train.py"]) == 0
    (path,) = work.glob("runs/train/*/jobs/12.json")
    assert json.loads(path.read_text())["cluster"] == "gamma"  # it went there: nobody here is asked about it
    monkeypatch.setattr(identity, "here", lambda: "beta")
    fields = f"JobId=12 JobName=their name UserId=u(1) JobState=PENDING SubmitTime={stamp(NOON)}"
    slurm.answer("scontrol", fields + "\n")
    slurm.answer("sbatch", "12\n")
    assert main(["submit", "-t", "5", "--no-save-script", "name=b", "train.py"]) == 0
    (path,) = work.glob("runs/b/*/jobs/12.json")
    kept = json.loads(path.read_text())
    assert (kept["cluster"], kept["slurm_submitted"], kept["job_name"]) == ("beta", NOON, "their name")


def test_what_an_earlier_job_of_the_number_left_is_not_the_new_ones(tmp_path, slurm):
    for name in ("12.json", "12.start", "12.exit", "12.stopped"):
        (tmp_path / name).write_text("0\n")
    identity.keep(tmp_path / "12.json", {"job_id": "12"}, ("12", None))
    assert sorted(path.name for path in tmp_path.glob("12.*")) == ["12.json"]


# A run in use


def submit(*words):
    Path("train.py").write_text("")
    return main(["submit", "-t", "5", "--resume", "latest", *words, "train.py"])


@pytest.fixture
def in_use(slurm, job):
    slurm.answer("sinfo", "main*|up|2|64|256000|1-00:00:00|(null)\n")
    slurm.answer("sbatch", "13\n")
    slurm.answer("squeue", said())
    return job(slurm_submitted=NOON, cluster="beta")


def test_a_job_for_a_run_that_has_one_is_refused_before_anything_is_written(slurm, in_use, work, capsys):
    assert submit() == 2
    error = capsys.readouterr().err
    assert f"{in_use} is in use: job 12 is RUNNING on node1; no sign of life yet." in error
    assert "dependency=afterany:12" in error
    assert slurm.calls("sbatch") == []
    assert not (work / "slurm-scripts").exists()
    assert sorted(path.name for path in in_use.iterdir()) == ["job.sh", "jobs"]
    assert submit("--dependency", "afterany:12") == 0
    assert len(slurm.calls("sbatch")) == 1


def test_a_retry_starts_nothing_beside_a_job_of_the_run(slurm, in_use, capsys):
    """The newest job has failed, an older one goes on."""
    note = json.loads((in_use / "jobs" / "12.json").read_text())
    (in_use / "jobs" / "14.json").write_text(json.dumps(note | {"job_id": "14", "submitted": NOON + 5}))
    (in_use / "jobs" / "14.start").write_text("1000\n")
    (in_use / "jobs" / "14.exit").write_text("1\n")
    assert main(["retry", "train"]) == 2
    assert "is in use: job 12 is RUNNING" in capsys.readouterr().err
    assert slurm.calls("sbatch") == []


def test_a_chain_without_checkpoints_is_warned_of(slurm, capsys):
    Path("train.py").write_text("")
    assert main(["submit", "-t", "5", "--preview", "--chain", "2", "train.py"]) == 0
    assert "--chain 2 without checkpoint.every_steps: each job begins anew" in capsys.readouterr().err
    assert main(["submit", "-t", "5", "--preview", "--chain", "2", "checkpoint.every_steps=9", "train.py"]) == 0
    assert "begins anew" not in capsys.readouterr().err


# What status and logs say of chains, nodes and arrays


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        (None, "set time, or --chain N to go on in further jobs (5 min)"),
        ([1, 2], "it reached its time limit (5 min): the next job of the chain goes on"),
        ([2, 2], "as the last of its chain: phalanx retry 20260101-000000-aaaa goes on"),
    ],
)
def test_what_helps_a_job_that_ran_out_of_time(slurm, job, capsys, chain, words):
    job(chain=chain)
    slurm.answer("squeue", said(state="TIMEOUT"))
    assert main(["status", "12"]) == 0
    shown = capsys.readouterr().out
    assert words in shown
    assert ("--chain" in shown) == (chain is None)


def test_the_node_that_failed_is_named(slurm, job, capsys):
    run_dir = job()
    slurm.answer("squeue", said(state="NODE_FAIL"))
    slurm.answer("sinfo", "node1 idle\nnode2 down*\nnode2 down*\n")
    assert main(["status", "12"]) == 0
    assert "NODE_FAIL: one of its nodes failed: node2" in capsys.readouterr().out
    (run_dir / "slurm-12.out").write_text("srun: error: Node failure on node7\n")
    assert main(["status", "12"]) == 0
    assert "one of its nodes failed: node7" in capsys.readouterr().out


def test_logs_say_whose_they_are_where_several_are_meant(slurm, job, capsys):
    run_dir = job()
    for task in (1, 2):
        (run_dir / f"array-{task}" / "jobs").mkdir(parents=True)
        (run_dir / f"array-{task}" / "jobs" / f"4{task}.start").write_text("1000\n")
        (run_dir / f"slurm-12_{task}.out").write_text(f"task {task}\n")
    assert main(["logs", "12"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "task 2\n"
    assert "this is 12_2, the last of 2 that began; phalanx logs JOB shows another: 12_1" in shown.err
    assert main(["logs", "12_1"]) == 0
    assert capsys.readouterr().err == ""


def test_a_job_that_did_not_launch_says_why(slurm, job, capsys):
    run_dir = job()
    for name, text in (("start", "1000"), ("exit", "2"), ("notrun", "it is in use")):
        (run_dir / "jobs" / f"12.{name}").write_text(text + "\n")
    assert main(["status", "12"]) == 0
    assert "not run: it is in use" in capsys.readouterr().out
    (run_dir / "jobs" / "12.exit").write_text("0\n")
    assert main(["status", "12"]) == 0
    assert "not run    it is in use" in capsys.readouterr().out


def test_the_job_that_makes_an_environment_is_known_too(slurm, work, capsys):
    slurm.answer("sbatch", "12\n")
    assert main(["env", "job", "--cpu", "-t", "5", "new"]) == 0
    capsys.readouterr()
    (words,) = slurm.calls("sbatch")
    script, run_dir = words.split()[1:]
    assert script == f"{run_dir}/job.sh"
    slurm.answer("squeue", said("new-env", submitted=time.time()))
    assert main(["status", "12"]) == 0
    assert "12   new-env  RUNNING" in capsys.readouterr().out
    (work / "new-env-12.out").write_text("pip says\n")
    assert main(["logs", "12"]) == 0
    assert capsys.readouterr().out == "pip says\n"
    assert main(["cancel", "12"]) == 0
    assert slurm.calls("scancel") == ["12"]
