import pytest

from phalanx.cli.main import main
from phalanx.cli.options import scan
from phalanx.errors import UsageError


def overrides(*argv):
    return scan([*argv, "train.py"], script=True).overrides


ODD_ARGS = ["--n", "5", "--strategy", "x", "a=b", "-c", "f", "--", "", "a b", "$HOME", "it's", "\n", "--help", "-h"]


def test_all_after_the_script_is_the_scripts_untouched():
    scanned = scan(["--nproc", "2", "train.py", *ODD_ARGS], script=True)
    assert (scanned.script, scanned.args) == ("train.py", tuple(ODD_ARGS))
    assert (scanned.files, scanned.overrides, scanned.flags) == ((), (("nproc_per_node", "2"),), frozenset())


@pytest.mark.parametrize("name", ["a=b.py", "-odd.py", "--json", "--", ""])
def test_two_dashes_force_the_script(name):
    scanned = scan(["--", name, "x"], script=True)
    assert (scanned.script, scanned.args) == (name, ("x",))


def test_files_keep_their_order():
    assert scan(["-c", "a", "--config", "b", "--config=c", "-cd", "t.py"], script=True).files == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--strategy", "fsdp"], ("strategy", "fsdp")),
        (["-s", "fsdp"], ("strategy", "fsdp")),
        (["--strategy=fsdp"], ("strategy", "fsdp")),
        (["strategy=fsdp"], ("strategy", "fsdp")),
        (["--nproc", "auto"], ("nproc_per_node", "auto")),
        (["--gpus-per-node", "4"], ("gpus_per_node", "4")),
        (["--gpus_per_node=4"], ("gpus_per_node", "4")),
        (["--checkpoint.every-steps", "10"], ("checkpoint.every_steps", "10")),
        (["--checkpoint.keep=2"], ("checkpoint.keep", "2")),
        (["--params.lr", "-0.1"], ("params.lr", "-0.1")),
        (["--params.Some-Name=1"], ("params.Some-Name", "1")),
        (["--env.A_B", "x y"], ("env.A_B", "x y")),
        (["--num-nodes", "2"], ("nodes", "2")),
        (["--resume", "latest"], ("resume", "latest")),
        (["--name="], ("name", "")),
        (["--progress"], ("progress", "true")),
        (["--no-progress"], ("progress", "false")),
        (["--progress=false"], ("progress", "false")),
        (["--no-fsdp.reshard-after-forward"], ("fsdp.reshard_after_forward", "false")),
    ],
)
def test_settings_are_options_in_every_spelling(argv, expected):
    assert overrides(*argv) == (expected,)


@pytest.mark.parametrize(
    "value",
    ["runs/epoch=3-step=40.ckpt", "#1", "node[01-03]", "m_0:1,m_1:1", "a@b.c", "1e-3", "", "a b", "=", "'q'", "$x"],
)
@pytest.mark.parametrize("form", ["{}", "--{}"])
def test_values_keep_every_character(value, form):
    assert overrides(form.format("params.x=" + value)) == (("params.x", value),)


def test_a_true_or_false_setting_takes_no_following_word():
    scanned = scan(["--progress", "train.py", "false"], script=True)
    assert (scanned.script, scanned.args) == ("train.py", ("false",))


def test_the_shape_is_nodes_by_processes():
    assert overrides("-j", "2x4") == (("nodes", "2"), ("nproc_per_node", "4"))
    assert overrides("-j3xgpu") == (("nodes", "3"), ("nproc_per_node", "gpu"))


def test_the_same_size_said_twice_is_no_contradiction():
    assert overrides("-N2", "-j", "2x4", "nproc=4")[-1] == ("nproc", "4")
    assert overrides("mem=null", "mem_per_cpu=1G", "--no-requeue", "requeue=false")[-1] == ("requeue", "false")


def test_short_options_are_sbatchs():
    argv = (
        "-N 2 -n 4 -t 1-12 -p p -A a -J j -o o -e e -q q -w w -x x -C c -d d -L l -G 2 -a 1-3 -D d --exclusive --hold"
    )
    assert dict(overrides(*argv.split())) == {
        "nodes": "2",
        "ntasks": "4",
        "time": "1-12",
        "partition": "p",
        "account": "a",
        "job_name": "j",
        "output": "o",
        "error": "e",
        "sbatch.qos": "q",
        "sbatch.nodelist": "w",
        "sbatch.exclude": "x",
        "sbatch.constraint": "c",
        "sbatch.dependency": "d",
        "sbatch.licenses": "l",
        "sbatch.gpus": "2",
        "sbatch.array": "1-3",
        "chdir": "d",
        "sbatch.exclusive": "true",
        "sbatch.hold": "true",
    }


def test_later_settings_stay_later():
    assert overrides("seed=1", "--seed", "2", "seed=3") == (("seed", "1"), ("seed", "2"), ("seed", "3"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--stratgy", "ddp", "t.py"], ["--stratgy", "--strategy"]),
        (["--checkpoint.kep", "2", "t.py"], ["--checkpoint.kep", "--checkpoint.keep"]),
        (["--checkpoint", "t.py"], ["group of settings", "--checkpoint.KEY"]),
        (["--confg", "f", "t.py"], ["--confg", "--config"]),
        (["-y", "t.py"], ["-y", "-c"]),
        (["--strategy"], ["--strategy", "value"]),
        (["-c"], ["-c", "value"]),
        (["--strategy", "--nproc", "2", "t.py"], ["--strategy", "value", "--nproc"]),
        (["--name", "-c", "f", "t.py"], ["--name", "value", "-c"]),
        (["-j", "4", "t.py"], ["'4'", "NODESxPROCS"]),
        (["-j", "2x", "t.py"], ["'2x'", "NODESxPROCS"]),
        (["--no-progress=1", "t.py"], ["--no-progress", "takes no value"]),
        (["--no-seed", "t.py"], ["--no-seed"]),
        (["--json=1", "t.py"], ["--json", "takes no value"]),
        (["--nproc", "2", "-j", "2x4", "t.py"], ["nproc_per_node=4", "nproc_per_node=2"]),
        (["-j", "2x4", "nproc=2", "t.py"], ["nproc=2", "nproc_per_node=4"]),
        (["-j", "2x4", "-N", "3", "t.py"], ["--nodes", "nodes=3", "nodes=2"]),
        (["--mem", "1G", "--mem-per-cpu", "2G", "t.py"], ["mem and mem_per_cpu"]),
        (["memory=1G", "--mem-per-gpu=2G", "t.py"], ["mem and mem_per_gpu"]),
        (["-c", "f", "--cpus-per-gpu=1", "cpus_per_task=2", "t.py"], ["cpus_per_task and cpus_per_gpu"]),
        (["--requeue", "--no-requeue", "t.py"], ["requeue and no_requeue"]),
    ],
)
def test_wrong_options_say_what_was_expected(argv, words):
    with pytest.raises(UsageError) as caught:
        scan(argv, script=True, flags=("json",))
    for word in words:
        assert word in str(caught.value)


def test_a_commands_own_flags_are_known_to_it_alone():
    assert scan(["--json", "t.py"], script=True, flags=("json",)).flags == {"json"}
    assert scan(["-h"], script=True).flags == {"help"}
    with pytest.raises(UsageError, match="--json"):
        scan(["--json", "t.py"], script=True)


def test_a_command_without_a_script_refuses_words():
    assert scan(["seed=1", "--explain"], script=False, flags=("explain",)).overrides == (("seed", "1"),)
    with pytest.raises(UsageError, match=r"unexpected 'train\.py'"):
        scan(["train.py"], script=False)


@pytest.mark.parametrize("argv", [[], ["--nproc", "2"], ["seed=1"], ["--"]])
def test_no_script_is_a_usage_error(argv, capsys):
    assert main(["run", *argv]) == 2
    assert "no script given: expected phalanx run" in capsys.readouterr().err
