"""`phalanx submit` with stand-ins for Slurm: what is printed, saved and handed over, and what is refused before."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import PlanError
from phalanx.schedulers import series
from phalanx.schedulers.slurm.client import Partition, job_fields
from phalanx.schedulers.slurm.limits import check_limits, megabytes
from phalanx.schedulers.slurm.submit import submission_environment

SBATCH = r"""#!/bin/bash
n=$(($(cat "$STUB/count" 2>/dev/null || echo 0) + 1)); echo "$n" >"$STUB/count"
[ "$n" -le "${ACCEPT:-99}" ] || { echo "sbatch: error: Batch job submission failed: Invalid account" >&2; exit 1; }
printf '%s\0' "$@" >"$STUB/$n.argv"; env -0 >"$STUB/$n.env"
echo "site notice: be nice"; echo "$((1000 + n))"
"""
SINFO = "#!/bin/bash\necho 'main*|up|2|64|256000|1-00:00:00|gpu:a100:4'\n"


@pytest.fixture
def slurm(tmp_path):
    """A folder with a script and a PATH on which sbatch takes ACCEPT jobs, numbered from 1001."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "stub").mkdir()
    for name, text in (("sbatch", SBATCH), ("sinfo", SINFO)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("")

    def run(*words, path=True, **environ):
        return subprocess.run(
            [sys.executable, "-m", "phalanx", "submit", *words],
            cwd=work,
            env={
                "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}" if path else "/nowhere",
                "STUB": str(tmp_path / "stub"),
                "HOME": str(tmp_path),
                "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
                **environ,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    run.work, run.stub = work, tmp_path / "stub"
    return run


def argv(slurm, number):
    return (slurm.stub / f"{number}.argv").read_text().split("\0")[:-1]


JOB = ("-N", "2", "--nproc", "4", "-t", "30", "train.py")


def test_the_last_line_is_the_bare_job_id_whatever_sbatch_says(slurm):
    done = slurm(*JOB)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1001\n"


@pytest.mark.parametrize("how", [["--preview"], ["--no-save-script", "--no-submit-job"]])
def test_a_preview_is_what_would_be_submitted_and_does_nothing_else(slurm, how):
    shown = slurm(*how, *JOB)
    assert shown.returncode == 0, shown.stderr
    assert sorted(path.name for path in slurm.work.iterdir()) == ["train.py"]
    assert not list(slurm.stub.iterdir())
    slurm(*JOB)
    assert Path(argv(slurm, 1)[-2]).read_text() == shown.stdout


def test_a_preview_needs_no_slurm_no_script_and_no_environment(slurm):
    done = slurm("--preview", "venv=/no/venv", "-N", "3", "absent.py", path=False)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=3\n" in done.stdout


def test_without_saving_the_run_directory_alone_keeps_the_script(slurm):
    slurm("--no-save-script", *JOB)
    assert sorted(path.name for path in slurm.work.iterdir()) == ["runs", "train.py"]
    *_, script, run_dir = argv(slurm, 1)
    assert script == f"{run_dir}/job.sh"
    note = json.loads(Path(run_dir, "jobs", "1001.json").read_text())
    assert (note["job_id"], note["name"], note["nodes"], note["series"]) == ("1001", "train", 2, None)


def test_a_saved_script_never_replaces_a_different_one(slurm):
    for words, names in (
        (JOB, ["train.sh"]),
        (JOB, ["train.sh"]),
        (("-N", "3", *JOB[2:]), ["train-2.sh", "train.sh"]),
        (JOB, ["train-2.sh", "train.sh"]),
    ):
        done = slurm("--no-submit-job", *words)
        assert done.returncode == 0
        assert done.stdout == ""
        assert sorted(path.name for path in (slurm.work / "slurm-scripts").iterdir()) == names


def test_folders_for_output_are_made_before_the_job_is_handed_over(slurm):
    slurm("output=logs/a/%x-%j.out", "error=logs/%x/e.txt", "job_name=j", *JOB)
    assert (slurm.work / "logs" / "a").is_dir()
    assert (slurm.work / "logs" / "j").is_dir()
    refused = slurm("output=logs/%j/out", *JOB)
    assert refused.returncode == 2
    assert "%j" in refused.stderr


def test_home_and_variables_in_paths_are_the_submitters(slurm):
    done = slurm("--no-save-script", "output=~/logs/$TEAM/%j.out", "run_root=$HOME/runs of $TEAM", *JOB, TEAM="a b")
    assert done.returncode == 0, done.stderr
    *_, script, run_dir = argv(slurm, 1)
    home = slurm.work.parent
    assert run_dir.startswith(f"{home}/runs of a b/train/")
    assert f"#SBATCH --output='{home}/logs/a b/%j.out'\n" in Path(script).read_text()
    assert (home / "logs" / "a b").is_dir()
    refused = slurm("output=$NIX/%j.out", *JOB)
    assert refused.returncode == 2
    assert "$NIX" in refused.stderr


def test_a_chain_is_jobs_of_one_run_each_after_the_one_before(slurm):
    done = slurm("--chain", "3", *JOB)
    assert done.stdout.split() == ["1001", "1002", "1003"]
    assert len({argv(slurm, number)[-1] for number in (1, 2, 3)}) == 1
    assert "--dependency=afterany:1002" in argv(slurm, 3)
    assert not [word for word in argv(slurm, 1) if word.startswith("--dependency")]


TWO = "strategies=ddp,fsdp"


@pytest.mark.parametrize(
    ("launcher", "strategies"),
    [
        ("auto", ["ddp", "horovod", "deepspeed"]),
        ("torchrun", ["ddp", "deepspeed"]),
        ("srun", ["ddp", "horovod", "deepspeed"]),
        ("ray", ["ddp", "deepspeed"]),
    ],
)
def test_a_series_has_by_default_what_its_launcher_can_start(slurm, launcher, strategies):
    unasked = "python=/only/on/nodes/python"  # whether it has the packages can't be seen from here
    done = slurm("--preview", "--mode", "runall", "job_name=s", unasked, "--launcher", launcher, *JOB)
    assert re.findall(r"--job-name=s-(\w+)-2x4", done.stdout) == strategies


def test_a_series_is_a_job_a_strategy_and_size_each_with_files_of_its_own(slurm):
    done = slurm("--mode", "scaling-test", TWO, "--scalability-nodes", "1,2", "output=out.txt", "job_name=s", *JOB)
    assert len(done.stdout.split()) == 4
    names = set()
    for number in range(1, 5):
        text = Path(argv(slurm, number)[-2]).read_text()
        name = next(line for line in text.splitlines() if "--job-name=" in line).partition("=")[2]
        assert f"--output={name}-out.txt" in text
        names.add(name)
    assert names == {"s-ddp-1x4", "s-ddp-2x4", "s-fsdp-1x4", "s-fsdp-2x4"}
    assert "nodes='2' (command line) gives way to '1' (--mode scaling-test)" in done.stderr


PATTERNS = """\
num_nodes: 1
gpus_per_node: 4
job_name: tutorial-${dist_strat}-job
std_out: logs/${dist_strat}-${num_nodes}x${gpus_per_node}.out
err_out: logs/${job_name}.err
"""


@pytest.mark.parametrize("strategy", ["", "dist_strat: horovod\n"], ids=["no strategy", "one of the series' own"])
def test_patterns_of_a_series_mean_each_members_settings(slurm, strategy):
    """Whatever the file itself says, and files that no two members share stay as they are."""
    (slurm.work / "p.yaml").write_text(PATTERNS + strategy)
    done = slurm("--preview", "-c", "p.yaml", "--mode", "scaling-test", "--strategies", "ddp,horovod",
                 "--scalability-nodes", "1,2", "train.py")  # fmt: skip
    found = {what: re.findall(rf"^#SBATCH --{what}=(.*)$", done.stdout, re.MULTILINE)
             for what in ("job-name", "output", "error")}  # fmt: skip
    members = [(name, nodes) for name in ("ddp", "horovod") for nodes in (1, 2)]
    assert found["job-name"] == [f"tutorial-{name}-job-{name}-{nodes}x4" for name, nodes in members]
    assert found["output"] == [f"logs/{name}-{nodes}x4.out" for name, nodes in members]
    assert found["error"] == [f"logs/tutorial-{name}-job-{name}-{nodes}x4.err" for name, nodes in members]


def test_only_members_that_share_a_file_get_their_names_into_it(slurm):
    words = ("--preview", "--mode", "runall", "job_name=s", "output=logs/${strategy}.out")
    (slurm.work / "o.yaml").write_text("strategy: fsdp\noutput: logs/${strategy}-${nodes}.out\n")
    alone = slurm(*words, "strategies=fsdp", *JOB)
    assert "#SBATCH --output=logs/fsdp.out\n" in alone.stdout
    shared = slurm("--preview", "-c", "o.yaml", "--mode", "scaling-test", TWO, "--scalability-nodes", "1,2",
                   "error=e.txt", "job_name=s", "--nproc", "2", "train.py")  # fmt: skip
    outputs = re.findall(r"^#SBATCH --output=(.*)$", shared.stdout, re.MULTILINE)
    assert outputs == ["logs/ddp-1.out", "logs/ddp-2.out", "logs/fsdp-1.out", "logs/fsdp-2.out"]
    errors = re.findall(r"^#SBATCH --error=(.*)$", shared.stdout, re.MULTILINE)
    assert errors == ["s-ddp-1x2-e.txt", "s-ddp-2x2-e.txt", "s-fsdp-1x2-e.txt", "s-fsdp-2x2-e.txt"]


def test_a_series_is_called_what_its_members_names_begin_with():
    names = ["x-ddp-job", "x-deepspeed-job"]
    stamp = r"-\d{8}-\d{6}"
    assert re.fullmatch(f"x{stamp}", series.new_name(names, "train"))
    assert re.fullmatch(f"train{stamp}", series.new_name(["ddp-job", "deepspeed-job"], "train"))
    assert re.fullmatch(f"my-job{stamp}", series.new_name(["my-job", "my-job"], "train"))


def test_a_series_that_is_refused_half_way_says_what_was_submitted(slurm):
    done = slurm("--mode", "scaling-test", TWO, "--scalability-nodes", "1,2", *JOB, ACCEPT="3")
    assert done.returncode == 2
    assert "phalanx cancel 1001 1002 1003" in done.stderr
    assert "Invalid account" in done.stderr
    assert "account" in done.stderr.splitlines()[-1]
    assert len(list(slurm.work.glob("runs/*/*"))) == 3  # the fourth left nothing


def test_many_jobs_are_confirmed(slurm):
    words = ("--mode", "scaling-test", TWO, "--scalability-nodes", "1,2,3,4,5", *JOB)
    done = slurm("--force", *words)
    assert done.returncode == 2
    assert "10 jobs, up to 15 node-hours" in done.stderr  # 2 strategies × 15 nodes × 0.5 h
    assert not list(slurm.stub.iterdir())
    assert len(slurm("--force", "--yes", *words).stdout.split()) == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.py"], ["absent.py", "--force"]),
        ([], ["no script", "training_cmd"]),
        (["venv=/no/venv", "train.py"], ["/no/venv/bin/python", "venv"]),
        (["-N", "3", "train.py"], ["nodes=3", "main has 2"]),
        (["-p", "gpux", "train.py"], ["partition='gpux'", "main"]),
        (["--gpus-per-node", "8", "train.py"], ["gpus_per_node=8", "has 4"]),
        (["-t", "2-00", "train.py"], ["time=2-00", "1440 minutes"]),
        (["-t", "0", "train.py"], ["time=0", "1440 minutes"]),
        (["chdir=/nowhere", "train.py"], ["chdir='/nowhere'"]),
        (["chdir=/", "train.py"], ["'train.py' in /"]),
        (["shebang=/bin/sh", "train.py"], ["shebang='/bin/sh'", "bash"]),
        (["--chain", "x", "train.py"], ["--chain 'x'", "number"]),
        (["snapshot=true", "train.py"], ["snapshot", "git"]),
        (["pre_exec_file=nix.sh", "train.py"], ["pre_exec_file='nix.sh'"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(slurm, words, said):
    done = slurm(*words)
    assert done.returncode == 2, done.stdout
    for word in said:
        assert word in done.stderr
    assert sorted(path.name for path in slurm.work.iterdir()) == ["train.py"]
    assert not list(slurm.stub.iterdir())


def test_without_slurm_the_error_says_what_to_do(slurm):
    done = slurm(*JOB, path=False)
    assert done.returncode == 2
    assert "sbatch is not on PATH" in done.stderr
    assert "--preview" in done.stderr


def test_a_snapshot_is_the_tracked_files_as_they_are(slurm):
    git = ["git", "-C", str(slurm.work), "-c", "user.name=a", "-c", "user.email=a@b"]
    (slurm.work / "sub").mkdir()
    (slurm.work / "sub" / "lib.py").write_text("old")
    for words in (["init", "-q"], ["add", "train.py", "sub"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    (slurm.work / "sub" / "lib.py").write_text("new")
    (slurm.work / "big.bin").write_text("untracked")
    (slurm.work / "late.py").write_text("")
    refused = slurm("snapshot=true", "late.py")
    assert refused.returncode == 2
    assert "'late.py' is not: git add it" in refused.stderr
    done = slurm("snapshot=true", *JOB)
    assert done.returncode == 0, done.stderr
    run_dir = Path(argv(slurm, 1)[-1])
    assert (run_dir / "workdir" / "sub" / "lib.py").read_text() == "new"
    assert not (run_dir / "workdir" / "big.bin").exists()
    source = json.loads((run_dir / "source.json").read_text())
    assert source["commit"]
    assert "+new" in source["diff"]


def test_the_environment_travels_less_the_words_of_other_jobs_and_what_a_directive_says():
    script = "#!/bin/bash\n#SBATCH --partition=a\n#SBATCH --time=5\n#SBATCH --mem=1G\n"
    mine = {"HOME": "/h", "WANDB_API_KEY": "k", "SBATCH_ACCOUNT": "mine", "OMPI_MCA_btl": "tcp"}
    others = dict.fromkeys(
        ("SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_PARTITION", "SBATCH_TIMELIMIT",
         "SBATCH_MEM_PER_NODE", "RANK", "MASTER_ADDR", "PMI_RANK",
         "PHALANX_RUN_DIR", "TORCHELASTIC_RUN_ID"), "1",
    )  # fmt: skip
    assert submission_environment(script, {**mine, **others}) == mine


def test_scontrols_fields_may_hold_spaces():
    line = "JobId=1 JobName=two words it's JobState=RUNNING Command=/a b/job.sh /my dir/x WorkDir=/w NodeList=n[1-2]"
    said = job_fields(line)
    assert said["JobName"] == "two words it's"
    assert said["Command"] == "/a b/job.sh /my dir/x"
    assert said["NodeList"] == "n[1-2]"


@pytest.mark.parametrize(
    ("text", "expected"), [("64G", 65536), ("100M", 100), ("2T", 2097152), ("500", 500), ("0", None), ("x", None)]
)
def test_memory_is_counted_as_slurm_does(text, expected):
    assert megabytes(text) == expected


def test_a_job_for_one_of_several_partitions_needs_only_one_that_fits():
    from phalanx.config import load_config
    from phalanx.planning.facts import Facts
    from phalanx.planning.planner import make_plan
    from phalanx.planning.program import Program

    small, large = Partition("s", True, True, 1, 8, 0, 1000, 60), Partition("l", False, True, 9, 8, 0, 1000, None)
    for partition, fits in (("s", False), ("l", True), ("s,l", True)):
        config = load_config((), [f"partition={partition}", "nodes=4"], {}).config
        plan = make_plan(config, Facts("h", 8, 0, "/p", "Linux", "x86_64"), Program("t.py"), for_slurm=True)
        if fits:
            check_limits(plan, [small, large])
        else:
            with pytest.raises(PlanError, match="nodes=4"):
                check_limits(plan, [small, large])


def test_a_dry_run_is_a_short_job_in_a_marked_directory(slurm):
    (slurm.work / "train.py").write_text("import phalanx\n")
    done = slurm("--dry-run", "-t", "4:00:00", "train.py", "--dry-run")
    assert done.returncode == 0, done.stderr
    (run_dir,) = (slurm.work / "runs/train").iterdir()
    assert (run_dir / "DRY_RUN").is_file()
    script = (run_dir / "job.sh").read_text()
    assert "#SBATCH --time=00:15:00" in script
    assert 'touch "$PHALANX_RUN_DIR/DRY_RUN"' in script
    assert 'rm -rf "$PHALANX_RUN_DIR/.dry-checkpoints"' in script
    assert "dry_run: true" in (run_dir / "config.yaml").read_text()
    short = slurm("--dry-run", "-t", "5:00", "--preview", "train.py")
    assert "#SBATCH --time=5:00" in short.stdout
    resumed = slurm("--dry-run", "--resume", "latest", "train.py")
    assert "no run 'latest'" in resumed.stderr  # the other one is dry too


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.py",), "would train in full"),
        (("training_cmd=python a.py | tee log",), "is a command"),
        (("--chain", "2", "train.py"), "--chain 2 with --dry-run"),
    ],
)
def test_a_dry_run_that_cannot_be_one_is_refused(slurm, words, said):
    (slurm.work / "train.py").write_text("import torch\n")
    done = slurm("--dry-run", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (slurm.work / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py", "--preview"], "--preview"),
        (["train.py", "--no-submit-job", "--x"], "--no-submit-job"),
        (["train.py", "--a", "-N", "2"], "-N"),
        (["train.py", "--nproc=2"], "--nproc=2"),
    ],
)
def test_options_of_ours_after_the_script_are_warned_of(slurm, words, said):
    done = slurm("device=cpu", *words)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "after train.py" in line]
    assert line.startswith(f"warning: {said} after train.py")


def test_options_that_the_script_has_itself_are_not_warned_of(slurm):
    (slurm.work / "train.py").write_text("parser.add_argument('--wait')\nparser.add_argument(\"-t\")\n")
    done = slurm("device=cpu", "train.py", "--wait", "-t", "5", "--epochs", "3")
    assert "after train.py" not in done.stderr


SECRET = (
    "device=cpu",
    "launcher=srun",
    "env.HF_TOKEN=hush,1",
    "proxy.http=http://u:hush@h:1",
    "params.key_token=hush2",
)


def handed(slurm, number):
    text = (slurm.stub / f"{number}.env").read_text()
    return dict(pair.split("=", 1) for pair in text.split("\0")[:-1])


def test_secrets_are_handed_over_in_the_environment_and_stand_nowhere_else(slurm):
    done = slurm(*SECRET, "train.py", SBATCH_EXPORT="NONE")
    assert done.returncode == 0, done.stderr
    environment = handed(slurm, 1)
    assert environment["HF_TOKEN"] == "hush,1"
    assert environment["http_proxy"] == "http://u:hush@h:1"
    assert environment["SECRET_PARAMS_KEY_TOKEN"] == "hush2"
    assert set(environment["SBATCH_EXPORT"].split(",")) == {"HF_TOKEN", "http_proxy", "SECRET_PARAMS_KEY_TOKEN"}
    assert "hush" not in "".join(argv(slurm, 1)) + done.stdout + done.stderr
    written = [path for path in slurm.work.rglob("*") if path.is_file()]
    assert [path for path in written if "hush" in path.read_text()] == []
    (run_dir,) = (slurm.work / "runs" / "train").iterdir()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in run_dir.rglob("*") if path.is_file()} == {0o600}


def test_a_script_that_is_only_saved_says_what_it_needs(slurm):
    done = slurm(*SECRET, "--no-submit-job", "train.py")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "secret" in line]
    assert all(name in line for name in ("HF_TOKEN", "http_proxy", "SECRET_PARAMS_KEY_TOKEN"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("srun torchrun --nproc_per_node 2 train.py --lang python", "starts torchrun, whose ranks run by the python"),
        ("torchrun --nproc_per_node 2 train.py", "starts torchrun, whose ranks run by the python on PATH"),
        ("accelerate launch --num_processes 2 train.py", "starts accelerate, whose ranks run by the python on PATH"),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", "training_cmd starts python, and"),
        ("srun -n 2 python train.py", "training_cmd starts python, and"),
    ],
)
def test_an_error_on_the_python_of_a_launchers_line_speaks_of_what_the_line_says(slurm, line, words):
    other = slurm.stub.parent / "bin" / "python"
    other.write_text("#!/bin/sh\nexit 0\n")
    other.chmod(0o755)
    done = slurm("device=cpu", "nodes=1", f"training_cmd={line}")
    assert done.returncode == 2
    assert words in done.stderr
    assert f"{other} has no phalanx" in done.stderr


def test_a_python_of_the_command_without_phalanx_is_refused_where_it_is_known(slurm):
    other = slurm.stub.parent / "bin" / "python9"
    other.write_text("#!/bin/sh\nexit 0\n")
    other.chmod(0o755)
    done = slurm("device=cpu", "training_cmd=python9 train.py")
    assert (done.returncode, "python9" in done.stderr, "has no phalanx" in done.stderr) == (2, True, True)
    assert "none on PATH" in slurm("device=cpu", "training_cmd=python8 train.py").stderr
    for known_there in ("modules.load=x", "before=. x"):  # then only the job knows
        assert slurm("device=cpu", known_there, "training_cmd=python9 train.py").returncode == 0
