"""What `training_cmd` means: scripts, Pythons, and launchers' command lines from people's batch scripts."""

import re
import subprocess
import sys

import pytest

from phalanx.cli.launch import request_of
from phalanx.cli.main import main
from phalanx.cli.options import scan
from phalanx.errors import PhalanxError
from phalanx.planning.program import from_training_cmd
from phalanx.planning.shellwords import split
from phalanx.shell import Sh

TORCHRUN = {"launcher": "torchrun"}


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "a 'b c' \"d e\" f\\ g",
        "a \\\n b",
        "t.py --x='1 2' ''",
        "t.py \"it's\" 'a\"b' a'b'\"c\"",
        "x ü=ö a#b",
        "a 'x; y | z && w' > /dev/null",
    ],
)
def test_words_are_those_of_a_shell(text):
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {text.split(' >')[0]}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    words = split(text)
    assert words is not None
    assert [word.literal for word in words if ">" not in word.text and word.text != "/dev/null"] == said


@pytest.mark.parametrize("text", ["a && b", "a | b", "a; b", "a\nb", "a &", "(a)", "a # b", "'open", "a <(b)"])
def test_more_than_one_command_is_none(text):
    assert split(text) is None


@pytest.mark.parametrize(
    ("text", "script", "said"),
    [
        ("torchrun --nproc_per_node 2 t.py --lr 1", "t.py", {**TORCHRUN, "nproc_per_node": "2"}),
        ("torchrun --nproc-per-node=2 --standalone t.py", "t.py", {**TORCHRUN, "nproc_per_node": "2"}),
        (
            "python -m torch.distributed.run --nnodes 2 --nproc_per_node=4 --rdzv_endpoint $H:1 t.py",
            "t.py",
            {**TORCHRUN, "nodes": "2", "nproc_per_node": "4"},
        ),
        (
            "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 4 \\\n  --master_addr $(hostname) t.py",
            "t.py",
            {**TORCHRUN, "nodes": "*", "nproc_per_node": "4"},
        ),
        ("srun -N2 -n 8 python t.py", "t.py", {"launcher": "srun", "nodes": "2", "total": "8"}),
        ("srun --ntasks-per-node=4 -l python -u t.py", "t.py", {"launcher": "srun", "ntasks_per_node": "4"}),
        ("mpirun -np 4 --bind-to none python3 t.py", "t.py", {"launcher": "mpirun", "total": "4"}),
        ("mpiexec -n 4 t.py", "t.py", {"launcher": "mpirun", "total": "4"}),
        ("deepspeed --num_gpus=2 t.py --deepspeed c.json", "t.py", {"launcher": "deepspeed", "nproc_per_node": "2"}),
        ("accelerate launch --num_processes 4 --multi_gpu t.py", "t.py", {**TORCHRUN, "total": "4"}),
        (
            "horovodrun -np 2 python t.py",
            "t.py",
            {"launcher": "horovodrun", "strategy": "horovod", "total": "2"},
        ),
        (
            "python -m torch.distributed.launch --use_env --nproc_per_node 2 t.py",
            "t.py",
            {**TORCHRUN, "nproc_per_node": "2"},
        ),
        ("python -u -m accelerate.commands.launch --num_processes 2 t.py", "t.py", {**TORCHRUN, "total": "2"}),
        ("OMP_NUM_THREADS=2 A='b c' torchrun --nproc_per_node 2 t.py", "t.py", {**TORCHRUN, "nproc_per_node": "2"}),
    ],
)
def test_a_launchers_line_is_a_script_and_settings(text, script, said):
    program = from_training_cmd(text)
    assert (program.script, dict(program.said), program.refusal) == (script, said, None)


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nproc_per_node 2 --tee 3 t.py",
        "torchrun --nproc_per_node $N t.py",
        "torchrun --nnodes 1:4 --nproc_per_node 2 t.py",
        "torchrun --max_restarts 3 --nproc_per_node 2 t.py",
        "srun --gpus-per-task=1 python t.py",
        "srun --ntasks-per-node=2 torchrun --nproc_per_node 2 t.py",
        "srun mpirun -np 2 t.py",
        "mpirun -np 2 -H a,b python t.py",
        "accelerate launch --config_file c.yaml t.py",
        "cd x && torchrun --nproc_per_node 2 t.py",
        "module load a; srun python t.py",
        "torchrun --nproc_per_node 2 t.py | tee log",
        "time torchrun --nproc_per_node 2 t.py",
        "ray job submit -- python t.py",
        "jsrun -n 2 python t.py",
        "A=1 apptainer exec x.sif torchrun --nproc_per_node 2 t.py",
    ],
)
def test_a_launchers_line_that_is_not_certain_is_refused_for_several_ranks(text, capsys):
    assert main(["plan", "nproc=2", f"training_cmd={text}"]) == 2
    said = capsys.readouterr().err
    assert "training_cmd starts ranks by" in said
    assert "exec_command" in said
    assert main(["plan", "launcher=python", f"training_cmd={text}"]) == 0  # once is once


@pytest.mark.parametrize(
    "text", ["pip install deepspeed && python t.py", "echo torchrun", "accelerate config", "./srun.sh"]
)
def test_a_launchers_name_among_the_words_is_no_launch(text):
    assert from_training_cmd(text).refusal is None


def test_the_old_launcher_gives_the_local_rank_to_scripts_as_an_argument():
    for text, given in (("", {"PHALANX_LOCAL_RANK_OPTION": "1"}), ("--use_env ", {})):
        program = from_training_cmd(f"python -m torch.distributed.launch {text}--nproc_per_node 2 t.py")
        assert dict(program.environment) == given


def settings(*words):
    request = request_of(scan(list(words), script=True), "plan")
    return request.loaded.config


def test_what_a_launcher_says_holds_where_nothing_is_set_and_must_agree_else():
    config = settings("training_cmd=srun -n 8 python t.py", "nodes=2")
    assert (config.launcher, config.nproc_per_node, config.nodes) == ("srun", 4, 2)
    assert settings("training_cmd=mpirun -np 3 python t.py", "nodes=2").ntasks == 3
    assert settings("training_cmd=torchrun --nproc_per_node 2 t.py", "nproc=2").nproc_per_node == 2
    for words in (["nproc=4"], ["launcher=srun"]):
        with pytest.raises(PhalanxError, match="training_cmd says"):
            settings("training_cmd=torchrun --nproc_per_node 2 t.py", *words)
    with pytest.raises(PhalanxError, match="nproc_per_node"):
        settings("training_cmd=torchrun t.py")


def test_a_launcher_in_place_of_the_script_is_refused():
    for words in (["torchrun", "--nproc_per_node", "2", "t.py"], ["srun", "t.py"], ["accelerate", "launch", "t.py"]):
        with pytest.raises(PhalanxError, match="starts ranks, and so does phalanx"):
            settings(*words)


@pytest.mark.parametrize(
    ("text", "first", "name"),
    [
        ("${DIR}/train.py --x", Sh("${DIR}/train.py"), "train"),
        ('python -u "$D/my t.py" a', Sh('"$D/my t.py"'), "my t"),
        ("~/t.py", Sh("~/t.py"), "t"),
        ("$S.py", Sh("$S.py"), "run"),
    ],
)
def test_a_script_whose_path_the_job_knows_is_a_script(text, first, name):
    program = from_training_cmd(text)
    assert (program.script, program.late_script, program.args[0], program.name) == (None, True, first, name)


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("python t.py", "python"),
        ("python3.11 -u t.py", "python3.11"),
        ("/opt/env/bin/python t.py", "/opt/env/bin/python"),
        ("t.py", None),
        ("torchrun --nproc_per_node 2 t.py", "python"),
        ("/opt/env/bin/torchrun --nproc_per_node 2 t.py", "/opt/env/bin/python"),
    ],
)
def test_the_python_of_a_command_is_the_ranks(text, python, capsys):
    assert from_training_cmd(text).python == python
    assert main(["plan", f"training_cmd={text}"]) == 0
    shown = re.search(r"^python +(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert shown is not None
    assert shown[1] == (python or sys.executable)


def test_settings_of_an_environment_go_before_the_python_of_a_command(capsys):
    assert main(["plan", "venv=/v", "training_cmd=python t.py"]) == 0
    assert "/v/bin/python -m" in capsys.readouterr().out
    assert main(["plan", "python=/p/python", "training_cmd=python t.py"]) == 0
    assert "/p/python -m" in capsys.readouterr().out
