"""A launcher anywhere in a command that is run once a rank would start a world in each: it is found."""

import re
import subprocess

import pytest

from phalanx.cli.main import main
from phalanx.planning.hidden_launch import Around, assigned, hidden_in
from phalanx.planning.program import from_training_cmd
from phalanx.planning.shellwords import commands, split
from phalanx.shell import Sh

TORCHRUN = "torchrun --nproc_per_node 2 t.py"
HIDDEN = [
    f'bash -c "{TORCHRUN}"',
    f"bash -lc 'cd x && {TORCHRUN}'",
    "sh -ec 'mpirun -np 2 python t.py'",
    f"eval '{TORCHRUN}'",
    f"({TORCHRUN})",
    f"{{ {TORCHRUN}; }}",
    f"if true; then {TORCHRUN}; fi",
    "for s in 1 2; do srun python t.py $s; done",
    f"run() {{ {TORCHRUN}; }}\nrun",
    "set -euo pipefail\ntrap 'kill 0' EXIT\nexec srun python t.py",
    f"bash <<'END'\n{TORCHRUN}\nEND",
    f"conda run -n x {TORCHRUN}",
    f"uv run {TORCHRUN}",
    f"nsys profile -o x {TORCHRUN}",
    f"taskset -c 0-3 stdbuf -oL {TORCHRUN}",
    f"command {TORCHRUN}",
    f"srun apptainer exec --nv x.sif {TORCHRUN}",
    f"srun bash -c '{TORCHRUN}'",
    f"singularity exec x.sif bash -c '{TORCHRUN}'",
    "accelerate launch --num_processes $((SLURM_NNODES * 4)) t.py",
    "accelerate-launch --config_file c.yaml t.py",
    "python -mtorch.distributed.run --nproc_per_node $N t.py",
    "python -um torch.distributed.run --nproc_per_node $N t.py",
    "python -W ignore -m torch.distributed.run --nproc_per_node $N t.py",
    "$(command -v torchrun) --nproc_per_node 2 t.py",
    "~/env/bin/torchrun --nproc_per_node 2 t.py",
    "${TORCHRUN:-torchrun} --nproc_per_node 2 t.py",
    "torchrun $DISTRIBUTED_ARGS t.py",
    "deepspeed $ARGS t.py --deepspeed",
    "srun $OPTIONS python t.py",
    "srun -n 1 python a.py : -n 1 python b.py",
    "mpirun -np 1 python a.py : -np 1 python b.py",
    "mpirun.openmpi -np 2 --oversubscribe python t.py",
    "srun python t.py > out.txt",
    "torchrun --nproc_per_node 2 t.py 2>err.txt",
    "L='torchrun --nproc_per_node 2'; $L t.py",
    'C="torchrun --nproc_per_node 2 t.py"\nsrun bash -c "$C"',
    "flux run -n 2 python t.py",
    "phalanx run --nproc 2 t.py",
    "conda run --no-capture-output -n x deepspeed train.py",
    f"time -p {TORCHRUN}",
    f'CMD=({TORCHRUN}); "${{CMD[@]}}"',
    f"case x in y) {TORCHRUN};; esac",
    f"case x in (y) a;; z) b; {TORCHRUN};; esac",
    f"if case x in y) a;; esac; then {TORCHRUN}; fi",
    f"A=(x); {TORCHRUN}",
    f"echo case x in; {TORCHRUN}",
    f"for ((i = 0;; i++)); do {TORCHRUN}; done",
    "nsys profile python -m torch.distributed.run t.py",
    "uv run torchrun --no-python python t.py",
    "uv run torchrun -m pkg --program python",
    "conda run -n python mpirun -np 2 python t.py",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_a_launcher_within_a_command_is_refused_for_several_ranks(text, capsys):
    assert main(["plan", "nproc=2", f"training_cmd={text}"]) == 2
    said = capsys.readouterr().err
    assert "training_cmd starts ranks by" in said
    assert "exec_command" in said
    assert main(["plan", "launcher=python", f"training_cmd={text}"]) == 0  # once is once


@pytest.mark.parametrize(
    "text",
    [
        "pip install deepspeed --no-deps && python t.py",
        "conda install deepspeed -c x; python t.py",
        "module load horovod torchrun; python t.py",
        "echo torchrun --x; python t.py",
        "command -v torchrun --x; python t.py",
        "python t.py --cmd 'torchrun --x t.py'",
        "cat >f <<END\ntorchrun x\nEND\npython t.py",
        "python t.py # torchrun --nproc_per_node 2 t.py",
        "X=$(srun hostname) python t.py",
        "./run.sh deepspeed --stage 2",
        "bash -c 'python t.py'",
        "bash missing.sh",
        "deepspeed_config=c.json python t.py",
        "conda run -n deepspeed python train.py",
        "apptainer exec --bind /scratch/deepspeed img.sif python train.py",
        "docker run --name deepspeed img python t.py",
        "env PYTHONPATH=/opt/deepspeed python t.py",
        "export MPI_RUN=/usr/bin/mpirun X=4; python t.py",
        "numactl --cpunodebind=0 python t.py --mode srun --x 1",
        "nsys profile -o runs/composer python t.py",
        "uv run --with deepspeed python t.py",
        "wget http://x/srun -O srun && python t.py",
        "ln -s srun foo; python t.py",
        "squeue -u me -n srun x; python t.py",
        "my_trainer --launcher srun --nodes 2",
        "case $M in torchrun) python t.py;; srun|mpirun) python u.py;; esac",
        "if a; then case $M in torchrun) python t.py;; srun) python u.py;; esac; fi",
        "KNOWN=(torchrun t.py); python t.py",
        "torchrun --nproc_per_node 2 t.py 2>&1",
        "torchrun --nproc_per_node 2 t.py </dev/null",
    ],
)
def test_a_launchers_name_that_starts_nothing_is_none(text, tmp_path):
    assert from_training_cmd(text, Around(tmp_path)).refusal is None


@pytest.mark.parametrize("words", ["bash {}", "bash -e {} --x", "./{}", "source {} && python t.py", "srun bash {}"])
def test_a_shell_script_is_looked_into(words, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/bash\nset -e\n# torchrun\n{TORCHRUN}\n")
    refusal = from_training_cmd(words.format("run.sh"), Around(tmp_path)).refusal
    assert refusal is not None
    assert re.search(r"by torchrun in (./)?run.sh", refusal)
    script.write_text("#!/bin/bash\npython t.py  # not torchrun --x t.py\n")
    assert from_training_cmd(words.format("run.sh"), Around(tmp_path)).refusal is None


def test_a_shell_script_on_the_command_line_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(f"{TORCHRUN}\n")
    assert main(["plan", "--nproc", "2", "bash", "run.sh"]) == 2
    assert "each rank would make a world of its own" in capsys.readouterr().err
    assert main(["plan", "bash", "run.sh"]) == 0


def test_a_variable_of_the_settings_is_known(capsys):
    line = 'export LAUNCHER="accelerate launch \\\n  --num_processes 2"'
    for known in (f"before={line}", "env.LAUNCHER=accelerate launch --num_processes 2"):
        assert main(["plan", "nproc=2", known, "training_cmd=srun $LAUNCHER t.py"]) == 2
        assert "accelerate" in capsys.readouterr().err
    assert assigned('export A=1 B=\'x y\'; C="q\\"r"') == {"A": "1", "B": "x y", "C": 'q"r'}
    assert hidden_in("$UNKNOWN t.py") is None


@pytest.mark.parametrize(
    "text",
    ["t.py --seed $((A + 1)) b", 't.py "$(echo "a  b")" c', "t.py ${A:-${B:-x y}} d", "t.py $(echo $(echo ')'))"],
)
def test_expansions_in_one_another_are_one_word(text):
    """bash says how many words there are: each quoted expansion is one, and each other is one here."""
    quoted = [word.text if word.text.startswith('"') else f'"{word.text}"' for word in split(text) or []]
    counted = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(quoted)} | tr -cd '\\0' | wc -c"],
        capture_output=True, text=True, check=True, env={"A": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert counted.stderr == ""
    assert int(counted.stdout) == len(quoted)
    assert from_training_cmd(text).script == "t.py"


def test_commands_are_found_between_all_that_a_shell_puts_there():
    text = "a; b 'c;d' && (e | f) # g ' h\nif i; then j \\\n k; fi"
    found = [" ".join(word.text for word in words) for words in commands(text)]
    assert found == ["a", "b 'c;d'", "e", "f", "if i", "then j k", "fi"]


def test_a_launcher_that_python_starts_by_its_file_is_taken_apart():
    for text in ("python $(which torchrun) --nproc_per_node 2 t.py", "python -u /x/torchrun --nproc_per_node 2 t.py"):
        program = from_training_cmd(text)
        assert (program.script, program.python, program.refusal) == ("t.py", "python", None)
        assert dict(program.said) == {"launcher": "torchrun", "nproc_per_node": "2"}


@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 2", "deepspeed --num_gpus 2"])
def test_a_variable_in_place_of_the_script_is_the_script(launcher):
    program = from_training_cmd(f"{launcher} $SCRIPT --x")
    assert (program.late_script, program.args, program.python) == (True, (Sh("$SCRIPT"), Sh("--x")), "python")
