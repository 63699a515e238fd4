"""Jobs from Python: a user's own slurm.py takes the words of `phalanx submit`."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest

from phalanx.config.table import ALIASES, keys
from phalanx.errors import ConfigError, PhalanxError
from phalanx.slurm import SlurmScriptBuilder, slurm_parser

SCRIPT = """\
from phalanx.slurm import SlurmScriptBuilder, slurm_parser

parser = slurm_parser(description="my jobs")
parser.add_argument("--dataset", default="mnist")
args = parser.parse_args()
builder = SlurmScriptBuilder(args, training_cmd=f"train.py --data {args.dataset}", cpus_per_task=8)
builder.run()
"""
JOB = "num_nodes: 2\ngpus_per_node: 4\ntime: 01:00:00\njob_name: from_file\ncpus_per_task: 4\n"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a slurm.py and a job file, and no settings of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    for name in [name for name in os.environ if name.startswith("PHALANX_")]:
        monkeypatch.delenv(name)
    (tmp_path / "slurm.py").write_text(SCRIPT)
    (tmp_path / "slurm_config.yaml").write_text(JOB)

    def run(*words):
        return subprocess.run([sys.executable, "slurm.py", *words], capture_output=True, text=True)

    return run


def test_a_users_script_takes_the_words_of_the_tutorials(own, tmp_path):
    words = ["-c", "slurm_config.yaml", "--no-save-script", "--no-submit-job", "--job-name", "my_job"]
    done = own(*words, "--mode", "runall", "--dataset", "cifar")
    assert done.returncode == 0, done.stderr
    names = [line for line in done.stdout.splitlines() if "--job-name=" in line]
    assert names == [f"#SBATCH --job-name=my_job-{strategy}-2x4" for strategy in ("ddp", "horovod", "deepspeed")]
    assert done.stdout.count("train.py --data cifar") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slurm.py", "slurm_config.yaml"]


def test_it_prints_what_the_command_prints(own, tmp_path):
    """With the same settings the two are one program."""
    mine = own("-c", "slurm_config.yaml", "--no-save-script", "--no-submit-job", "-N", "3", "--qos", "high")
    command = ["submit", "--preview", "-c", "slurm_config.yaml", "-N", "3", "--qos", "high", "cpus_per_task=8"]
    theirs = subprocess.run(
        [sys.executable, "-m", "phalanx", *command, "training_cmd=train.py --data mnist"],
        capture_output=True,
        text=True,
    )
    assert theirs.returncode == 0, theirs.stderr
    assert mine.stdout == theirs.stdout


def test_files_lie_below_python_and_python_below_the_command_line(own):
    args = slurm_parser().parse_args(["-c", "slurm_config.yaml", "-N", "5"])
    builder = SlurmScriptBuilder(args, script="t.py", nodes=4, job_name="python", modules={"load": ["a", "b"]})
    ((name, text),) = builder.scripts().items()
    assert name == "python"
    assert "#SBATCH --nodes=5\n" in text
    assert "#SBATCH --cpus-per-task=4\n" in text
    assert "module load a b\n" in text


def test_a_script_can_look_at_the_settings_and_set_some_above_the_command_line(own):
    args = slurm_parser().parse_args(["-c", "slurm_config.yaml", "-N", "5", "--job-name", "mine"])
    settings = SlurmScriptBuilder(args, itwinai_trainer=True).settings
    assert (settings.nodes, settings.job_name, settings.itwinai_trainer, settings.gpus_per_node) == (5, "mine", True, 4)
    builder = SlurmScriptBuilder(args, script="t.py", override={"job_name": "mine-2", "modules": {"load": ["a"]}})
    ((name, text),) = builder.scripts().items()
    assert name == "mine-2"
    assert "module load a\n" in text
    with pytest.raises(ConfigError, match="nodes"):
        _ = SlurmScriptBuilder(nodes="many").settings


def test_what_python_says_is_not_told_as_typed(own):
    args = slurm_parser().parse_args(["-N", "many"])
    with pytest.raises(ConfigError) as error:
        _ = SlurmScriptBuilder(args, override={"time": "soon"}, cpus_per_task="few").settings
    said = str(error.value)
    for origin in ("time = 'soon' (SlurmScriptBuilder)", "nodes = 'many' (command line)",
                   "cpus_per_task = 'few' (SlurmScriptBuilder)"):  # fmt: skip
        assert origin in said


def test_a_misspelt_option_gets_the_nearest_named(capsys):
    with pytest.raises(SystemExit):
        slurm_parser().parse_args(["--job-nmae", "x"])
    assert "unrecognized arguments: --job-nmae x. Did you mean '--job-name'?" in capsys.readouterr().err


def test_every_setting_and_alias_is_an_option():
    known = slurm_parser()._option_string_actions
    for key in keys():
        if key not in ("env", "params"):
            assert f"--{key.removeprefix('sbatch.')}" in known
    for alias in ALIASES:
        assert f"--{alias.replace('_', '-')}" in known


def test_scripts_are_saved_where_they_were_asked_for(own, tmp_path):
    builder = SlurmScriptBuilder(config="slurm_config.yaml", script="t.py", save_dir="here")
    assert builder.save() == [tmp_path / "here" / "from_file.sh"]
    assert (tmp_path / "here" / "from_file.sh").read_text() == builder.scripts()["from_file"]


def test_wrong_settings_are_the_same_errors(own):
    with pytest.raises(ConfigError, match="nodez"):
        SlurmScriptBuilder(script="t.py", nodez=3).scripts()
    with pytest.raises(PhalanxError, match="training_cmd"):
        SlurmScriptBuilder().scripts()


def test_pythons_lists_keep_their_commas_and_times_are_texts(own):
    builder = SlurmScriptBuilder(
        script="t.py", modules={"load": ["A/1,2"]}, srun_args=["--x=a,b"], before=["echo a, b", "true"],
        time=timedelta(hours=36, minutes=5),
    )  # fmt: skip
    ((_, text),) = builder.scripts().items()
    assert "module load A/1,2\n" in text
    assert "--x=a,b" in text
    assert "echo a, b\ntrue\n" in text
    assert "#SBATCH --time=36:05:00\n" in text
    with pytest.raises(PhalanxError, match=r"time=43200.*'12:00:00'"):  # what YAML makes of an unquoted 12:00:00
        SlurmScriptBuilder(script="t.py", time=43200).scripts()


def test_lines_in_place_of_the_launch_need_no_script(own):
    ((_, text),) = SlurmScriptBuilder(exec_command="srun ./mine", job_name="mine").scripts().items()
    assert "\nsrun ./mine\n" in text
