"""`phalanx status`, `logs` and `cancel` over run directories, with Slurm's programs answering what tests say."""

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from phalanx.cli.main import main
from phalanx.records import Epoch, Metric, RecordWriter
from phalanx.schedulers.slurm import jobs, outcome, output
from tests.unit.slurm_programs import NAMES, Programs

INVALID = "slurm_load_jobs error: Invalid job id specified\n"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("PHALANX_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Slurm as it is when it has forgotten all jobs, and there is no accounting."""
    programs = Programs(tmp_path / "slurm", monkeypatch)
    programs.answer("squeue", err=INVALID, code=1)
    programs.answer("scontrol", err=INVALID, code=1)
    programs.answer("sacct", err="Slurm accounting storage is disabled\n", code=1)
    return programs


@pytest.fixture
def job(tmp_path):
    """Makes a run directory as `phalanx submit` does."""

    def make(job_id, name="train", run="20260101-000000-aaaa", script="", series=None, submitted=None, chain=None):
        run_dir = tmp_path / "work" / "runs" / name / run
        (run_dir / "jobs").mkdir(parents=True, exist_ok=True)
        text = script or f"#!/bin/bash\n#SBATCH --job-name={name}\n#SBATCH --chdir={tmp_path / 'work'}\ntrue\n"
        (run_dir / "job.sh").write_text(text)
        note = {
            "v": 1, "job_id": job_id, "name": name, "job_name": name, "series": series, "nodes": 1, "chain": chain,
            "submitted": submitted or int(job_id),
        }  # fmt: skip
        (run_dir / "jobs" / f"{job_id}.json").write_text(json.dumps(note))
        return run_dir

    return make


def squeue(*rows):
    """Lines as squeue gives them: id, number, state, reason, time, exit code, hosts."""
    lines = []
    for job_id, number, state, reason, elapsed, code, hosts in rows:
        lines.append(f"{job_id}^{number}^{state}^{reason}^2^{elapsed}^5:00^{code}^0^main^{hosts}^(null)^x^/tmp^\n")
    return "".join(lines).replace("^", "\x1f")


def running(job_id):
    return squeue((job_id, job_id, "RUNNING", "None", "1:02:03", 0, "node[1-2]"))


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("o%x-%N-%t-%n-%s-%5j-%A-%a-%u-%J%%.txt", "oa b|cé-node1-0-0-batch-00012-12-4294967294-{user}-12%.txt"),
        ("slurm-%j.out", "slurm-12.out"),
        ("q\\%j", "q%j"),
        ("%20j.out", "0000000012.out"),
        ("100%.out", "100%.out"),
    ],
)
def test_patterns_of_file_names_as_slurm_made_them(pattern, name):
    """The files that Slurm 22.05.8 wrote for such patterns; the user was root."""
    known = output.of_batch_script("12", "12", "a b|cé", "node1")
    assert output.expand_pattern(pattern, known) == name.format(user=getpass.getuser())


def test_patterns_of_an_array():
    known = output.of_batch_script("13_1", "15", "ok.sh", "node1")
    assert output.expand_pattern("p%A_%3a-%x-%j.txt", known) == "p13_001-ok.sh-15.txt"  # as Slurm 22.05.8


def test_what_is_not_known_before_the_submission_stays():
    known = output.before_submission("my job")
    assert output.expand_pattern("logs/%x/50%%/%3a-%j.out", known) == "logs/my job/50%%/%3a-%j.out"
    assert output.unknown_patterns("logs/%x/%u/50%%/%3a-%j.out", known) == ["%3a", "%j"]
    assert output.unknown_patterns("logs\\%j", known) == []


def test_a_chosen_output_is_found_by_the_scripts_directives(job, tmp_path):
    script = (
        "#!/bin/bash\n#SBATCH --output='logs/deep er/%x-%j.out'  # mine\n#SBATCH -e err.%A\n"
        f"#SBATCH --chdir={tmp_path}\nexport A=1\n#SBATCH --output=not-this\n"
    )
    job("12", script=script)
    (found,) = jobs.known(tmp_path / "work" / "runs")
    assert found.outputs() == [tmp_path / "logs" / "deep er" / "train-12.out", tmp_path / "err.12"]


def test_the_table_has_state_time_progress_and_directory(slurm, job, capsys):
    run_dir = job("12")
    writer = RecordWriter(run_dir, 0, 1)
    writer.write(Metric(step=119, epoch=3, values={"accuracy": 0.5, "val_loss": 0.25}, time=time.time() - 60))
    writer.step(120, 3, 0.1, 0.0, 32)
    writer.close()
    slurm.answer("squeue", running("12"))
    assert main(["status"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["JOB", "NAME", "STATE", "NODES", "TIME", "PROGRESS", "RUN", "DIRECTORY"]
    assert line.split("  ")[0] == "12"
    for words in ("train", "RUNNING", "1:02:03 of 5:00", "runs/train/20260101-000000-aaaa"):
        assert words in line
    (ago,) = re.findall(r"epoch 3, step 120, val_loss 0\.25, (\d+) s ago", line)
    assert int(ago) < 50  # the step's, not the metric's


def test_the_newest_twenty_are_shown_with_one_call_for_all(slurm, job, capsys):
    for number in range(101, 126):
        job(str(number), run=f"r{number}")
    assert main(["status"]) == 0
    ids = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert ids == [str(number) for number in range(106, 126)]
    assert len(slurm.calls("squeue")) == 1
    assert len(slurm.calls("sacct")) == 1
    assert slurm.calls("scontrol") == []


def test_no_jobs_is_no_error(slurm, capsys):
    assert main(["status"]) == 0
    assert "no jobs in" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("target", ["12", "train", "series-1", "20260101-000000-aaaa", "train/20260101-000000-aaaa",
                                    "runs/train/20260101-000000-aaaa"])  # fmt: skip
def test_a_job_is_meant_by_id_name_run_or_series(slurm, job, capsys, target):
    job("12", series="series-1")
    job("13", name="other", run="20260101-000000-bbbb")
    slurm.answer("squeue", running("12") + running("13"))
    assert main(["status", target, "--json"]) == 0
    assert [one["job_id"] for one in json.loads(capsys.readouterr().out)] == ["12"]


def test_what_is_unknown_names_what_is_there(slurm, job, capsys):
    job("4821", name="digits")
    for command in ("status", "logs", "cancel"):
        assert main([command, "digit"]) == 2
        error = capsys.readouterr().err
        assert "no job, run or series 'digit' in" in error
        assert "Did you mean 'digits'?" in error
        assert "jobs: 4821" in error
        assert main([command, "4812"]) == 2
        assert "Did you mean '4821'?" in capsys.readouterr().err
    assert slurm.calls("scancel") == []


def test_a_job_under_another_run_root_is_found_through_slurm(slurm, job, tmp_path, capsys):
    run_dir = job("12")
    said = f"JobId=12 JobName=x JobState=RUNNING Command={run_dir}/job.sh {run_dir} WorkDir=/w"
    slurm.answer("scontrol", said + "\n")
    slurm.answer("squeue", running("12"))
    assert main(["status", "run_root=elsewhere", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["run_dir"] == str(run_dir)
    slurm.answer("scontrol", "JobId=12 JobName=wrap JobState=RUNNING Command=(null) WorkDir=/w\n")
    assert main(["cancel", "run_root=elsewhere", "12"]) == 2
    assert "was not submitted by phalanx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "state", "code"),
    [
        ({}, "GONE", None),
        ({"start": "1000\n"}, "GONE", None),
        ({"start": "1000\n", "exit": "0\n"}, "COMPLETED", 0),
        ({"start": "1000\n", "exit": "7\n"}, "FAILED", 7),
        ({"start": "1000\n4102444800\n", "exit": "7\n"}, "GONE", None),  # the exit of the first start
    ],
)
def test_a_forgotten_job_is_known_by_its_own_files(slurm, job, capsys, files, state, code):
    run_dir = job("12")
    for kind, text in files.items():
        (run_dir / "jobs" / f"12.{kind}").write_text(text)
    assert main(["status", "12", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["exit_code"]) == (state, code)


@pytest.mark.parametrize("broken", ["down", "absent"])
def test_without_slurm_the_run_directories_are_shown_with_a_warning(slurm, job, capsys, broken, monkeypatch):
    run_dir = job("12")
    (run_dir / "jobs" / "12.start").write_text("1000\n")
    (run_dir / "slurm-12.out").write_text("hello\n")
    slurm.answer("squeue", err=DOWN, code=1)
    if broken == "absent":
        monkeypatch.setenv("PATH", "/nowhere")
    assert main(["status"]) == 0
    shown = capsys.readouterr()
    assert "UNKNOWN (it has started" in shown.out
    assert ("Unable to contact" if broken == "down" else "not on PATH") in shown.err
    assert main(["logs", "12"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert main(["cancel", "12"]) == 2
    assert slurm.calls("scancel") == []


def test_a_saved_script_that_was_submitted_by_hand(slurm, tmp_path, capsys):
    (tmp_path / "work/runs/mine/job-77/jobs").mkdir(parents=True)
    (tmp_path / "work/runs/mine/job-77/jobs/77.start").write_text("1000\n")
    (tmp_path / "work/runs/mine/job-other").mkdir()
    (tmp_path / "work/slurm-77.out").write_text("by hand\n")
    slurm.answer("squeue", squeue(("77", "77", "COMPLETED", "None", "0:05", 0, "node1")).replace("/tmp", os.getcwd()))
    assert main(["status", "--json"]) == 0
    assert [(one["job_id"], one["name"]) for one in json.loads(capsys.readouterr().out)] == [("77", "mine")]
    assert main(["logs", "mine"]) == 0
    assert capsys.readouterr().out == "by hand\n"


def test_each_task_of_an_array_has_its_own_line_also_when_slurm_has_forgotten_it(slurm, job, capsys):
    run_dir = job("44")
    for task, number, code in ((1, 47, 0), (2, 48, 3)):
        (run_dir / f"array-{task}" / "jobs").mkdir(parents=True)
        (run_dir / f"array-{task}" / "jobs" / f"{number}.start").write_text("1000\n")
        (run_dir / f"array-{task}" / "jobs" / f"{number}.exit").write_text(f"{code}\n")
        (run_dir / f"slurm-44_{task}.out").write_text(f"task {task}\n")
    slurm.answer("squeue", squeue(("44_[3-9%2]", "44", "PENDING", "JobArrayTaskLimit", "0:00", 0, "")))
    assert main(["status", "44", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(one["job_id"], one["state"], one["exit_code"]) for one in shown] == [
        ("44_1", "COMPLETED", 0),
        ("44_2", "FAILED", 3),
        ("44_[3-9%2]", "PENDING", None),
    ]
    assert main(["logs", "44_2"]) == 0
    assert capsys.readouterr().out == "task 2\n"
    assert main(["cancel", "44_5"]) == 0
    assert capsys.readouterr().out.startswith("cancelled 44_5 ")
    assert main(["cancel", "44"]) == 0
    assert slurm.calls("scancel") == ["44_5", "44"]


def test_a_large_array_is_one_line(slurm, job, capsys):
    job("44")
    tasks = [(f"44_{task}", str(50 + task), "RUNNING" if task < 3 else "COMPLETED", "None", "0:01", 0, "node1")
             for task in range(1, 100)]  # fmt: skip
    slurm.answer("squeue", squeue(*tasks))
    assert main(["status"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert "2 RUNNING, 97 COMPLETED" in line


def test_the_verdict_on_a_failure_names_rank_host_and_exception(slurm, job, capsys):
    run_dir = job("12")
    (run_dir / "plan.json").write_text(json.dumps({"launcher": "srun", "world_size": 4, "nproc_per_node": 2}))
    (run_dir / "errors").mkdir()
    (run_dir / "jobs" / "12.start").write_text("1000\n")
    error = {"rank": 3, "host": "node2", "time": 2000.0, "exception": "ValueError: bad batch", "exit_code": 1}
    (run_dir / "errors" / "3.json").write_text(json.dumps(error))
    slurm.answer("squeue", squeue(("12", "12", "FAILED", "NonZeroExitCode", "0:09", 256, "node[1-2]")))
    assert main(["status", "12"]) == 0
    assert "rank 3 on node2 failed: ValueError: bad batch" in capsys.readouterr().out
    assert main(["status", "12", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["exit_code"], shown["failure"]["rank"], shown["failure"]["host"]) == (1, 3, "node2")


def test_a_forgotten_jobs_output_tells_that_slurm_ended_it(slurm, job, capsys):
    run_dir = job("12")
    (run_dir / "jobs" / "12.start").write_text("1795800000\n")
    # As Slurm 22.05.8 wrote it.
    said = "slurmstepd-node1: error: *** JOB 12 ON node1 CANCELLED AT 2026-11-28T05:48:36 DUE TO TIME LIMIT ***\n"
    (run_dir / "slurm-12.out").write_text("hello\n" + said)
    assert main(["status", "12"]) == 0
    shown = capsys.readouterr().out
    assert "GONE (left no exit code" in shown
    assert "time limit" in shown.lower()
    (run_dir / "slurm-12.out").write_text("hello\n")
    assert main(["status", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["failure"] is None


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("TIMEOUT", "TimeLimit", "time limit: set time, or --chain N"),
        ("CANCELLED", "None", "it was cancelled"),
        ("NODE_FAIL", "NodeDown", "one of its nodes failed"),
        ("PENDING", "PartitionTimeLimit", "it never starts; cancel it and set time"),
        ("PENDING", "DependencyNeverSatisfied", "it never starts"),
    ],
)
def test_why_slurm_ended_a_job_or_does_not_start_it(slurm, job, capsys, state, reason, words):
    job("12")
    slurm.answer("squeue", squeue(("12", "12", state, reason, "5:00", 0, "node1")))
    assert main(["status", "12"]) == 0
    assert words in capsys.readouterr().out


def test_progress_is_that_of_the_newest_attempt(job):
    run_dir = job("12")
    old = RecordWriter(run_dir, 0, 2)
    old.step(999, 9, 0.1, 0.0, 32)
    old.close()
    writer = RecordWriter(run_dir, 0, 10)
    for step in range(1, 20001):
        writer.step(step, step // 1000, 0.1, 0.0, 32)
    writer.write(Epoch(epoch=20, step=20000, seconds=1.0))
    writer.close()
    with (run_dir / "records" / "0.10.jsonl").open("a") as file:
        file.write('{"v": 1, "kind": "step", "st')  # its writer was killed
    found = outcome.progress(run_dir)
    assert (found.epoch, found.step) == (20, 20000)
    assert outcome.progress(run_dir.parent) is None


def test_logs_of_the_last_job_that_began_its_last_lines_and_ranks(slurm, job, capsys):
    run_dir = job("12", chain=[1, 2])
    job("13", chain=[2, 2])
    (run_dir / "plan.json").write_text(json.dumps({"world_size": 4, "nproc_per_node": 2}))
    (run_dir / "slurm-12.out").write_text("one\ntwo\nthree\n")
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "3.log").write_text("I am 3\n")
    (run_dir / "logs" / "0.log").write_text("")
    slurm.answer("squeue", running("12") + squeue(("13", "13", "PENDING", "Dependency", "0:00", 0, "")))
    assert main(["logs", "train", "--lines", "2"]) == 0
    assert capsys.readouterr().out == "two\nthree\n"
    assert main(["logs", "--rank", "3", "train"]) == 0
    assert capsys.readouterr().out == "I am 3\n"
    assert main(["logs", "--rank=0", "train"]) == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["logs"], "expected one job"),
        (["logs", "12", "13"], "expected one job"),
        (["logs", "12", "--rank", "x"], "--rank 'x': expected a whole number"),
        (["logs", "12", "--lines", "-3"], "--lines '-3'"),
        (["logs", "12", "--rank", "4"], "has 4 ranks, 0 to 3"),
        (["logs", "12"], "is RUNNING and has no"),
        (["logs", "12", "--follwo"], "--follow"),
        (["cancel"], "no job given"),
        (["status", "--jsno"], "--json"),
    ],
)
def test_bad_input_is_one_clear_error(slurm, job, capsys, words, said):
    run_dir = job("12")
    (run_dir / "plan.json").write_text(json.dumps({"world_size": 4, "nproc_per_node": 2}))
    slurm.answer("squeue", running("12"))
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


def test_above_64_ranks_logs_are_one_a_node(slurm, job, capsys):
    run_dir = job("12")
    (run_dir / "plan.json").write_text(json.dumps({"world_size": 128, "nproc_per_node": 4}))
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "node17.log").write_text("node 17\n")
    slurm.answer("squeue", running("12"))
    assert main(["logs", "12", "--rank", "70"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "node 17\n"
    assert "rank 70 is on node 17" in shown.err


def test_follow_waits_for_the_file_and_ends_with_the_job(slurm, job, capfd, monkeypatch):
    monkeypatch.setattr("phalanx.cli.logs._ASK", 0.1)
    monkeypatch.setattr("phalanx.cli.logs._PAUSE", 0.05)
    monkeypatch.setattr("phalanx.cli.logs._LATE", 2.0)
    run_dir = job("12")
    slurm.answer("squeue", squeue(("12", "12", "PENDING", "Resources", "0:00", 0, "")))

    def heard():
        """The answer of now was given and read: it has been asked for, and then once more."""
        count, limit = len(slurm.calls("squeue")) + 3, time.monotonic() + 60
        while len(slurm.calls("squeue")) < count and time.monotonic() < limit:
            time.sleep(0.05)

    def run():
        heard()
        slurm.answer("squeue", err=DOWN, code=1)  # for a moment
        heard()
        slurm.answer("squeue", running("12"))
        with (run_dir / "slurm-12.out").open("a") as file:
            for number in range(5):
                file.write(f"line {number}\n")
                file.flush()
                time.sleep(0.1)
            slurm.answer("squeue", squeue(("12", "12", "COMPLETED", "None", "0:01", 0, "node1")))
            time.sleep(0.3)
            file.write("the last words\n")

    thread = threading.Thread(target=run)
    thread.start()
    assert main(["logs", "12", "-f"]) == 0
    thread.join()
    shown = capfd.readouterr()
    assert shown.out == "".join(f"line {number}\n" for number in range(5)) + "the last words\n"
    assert "PENDING (Resources); waiting" in shown.err
    assert "Unable to contact" in shown.err


def test_ctrl_c_ends_follow_with_130_and_no_traceback(slurm, job):
    run_dir = job("12")
    (run_dir / "slurm-12.out").write_text("hello\n")
    slurm.answer("squeue", running("12"))
    words = [sys.executable, "-m", "phalanx", "logs", "12", "--follow"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "hello\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error == ""


def test_a_reader_that_has_gone_is_no_traceback(slurm, job):
    run_dir = job("12")
    (run_dir / "slurm-12.out").write_text("x" * 100 + "\n" + "y" * (1 << 22))
    slurm.answer("squeue", running("12"))
    words = f"{sys.executable} -m phalanx logs 12 | head -c 5"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=60)
    assert done.stdout == "xxxxx"
    assert done.stderr == ""


def test_cancel_ends_what_has_not_ended_and_lists_it(slurm, job, capsys):
    job("12", series="s")
    job("13", name="other", run="r", series="s")
    job("14", name="done", run="q", series="s")
    ended = squeue(("14", "14", "COMPLETED", "None", "0:01", 0, "node1"))
    slurm.answer("squeue", running("12") + squeue(("13", "13", "PENDING", "Priority", "0:00", 0, "")) + ended)
    assert main(["cancel", "s"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cancelled 12 (train), which was RUNNING",
        "cancelled 13 (other), which was PENDING",
    ]
    assert slurm.calls("scancel") == ["12 13"]
    assert main(["cancel", "14"]) == 0
    assert capsys.readouterr().out == "nothing to cancel: 14 is COMPLETED\n"
    assert slurm.calls("scancel") == ["12 13"]


def test_no_command_imports_torch_or_asks_more_than_it_must(slurm, job):
    job("12")
    code = (
        "import sys; from phalanx.cli.main import main\n"
        "for words in (['status'], ['status', '12'], ['cancel', '12']): main(words)\n"
        "sys.exit(bool({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {name: len(slurm.calls(name)) for name in NAMES} == {
        "squeue": 3, "sacct": 3, "scontrol": 0, "scancel": 0, "sbatch": 0, "sinfo": 0,
    }  # fmt: skip


def test_of_a_chain_the_jobs_that_go_on_are_told(slurm, job, capsys):
    job("12", chain=[1, 2])
    run_dir = job("13", chain=[2, 2])
    slurm.answer("squeue", running("12") + running("13"))
    assert main(["cancel", "12"]) == 0
    assert slurm.calls("scancel") == ["12"]
    assert f"go on: 13; phalanx cancel {run_dir.name} ends all" in capsys.readouterr().out
    assert main(["cancel", run_dir.name]) == 0
    assert "go on" not in capsys.readouterr().out
