"""examples/scaling: models, images, options and jobs, without starting anything."""

from __future__ import annotations

import math
import runpy
import sys

import pytest
import torch
import yaml

from phalanx.config import load_config
from tests.e2e import scaling_tutorial as tutorial

# Parameters as torchvision's documentation has them, for 1000 classes.
KNOWN = {"resnet18": 11_689_512, "resnet50": 25_557_032, "resnet152": 60_192_808}


@pytest.fixture
def images(tmp_path):
    """Three classes: white, black, and white on the left; three images each."""
    from PIL import Image

    for name, shades in (("a-white", (255, 255)), ("b-black", (0, 0)), ("c-left", (255, 0))):
        (tmp_path / name / "deeper").mkdir(parents=True)
        for index, place in enumerate(("x.JPEG", "y.jpg", "deeper/z.png")):
            image = Image.new("L", (40 + index, 30))
            half = image.width // 2
            image.paste(shades[0], (0, 0, half, 30))
            image.paste(shades[1], (half, 0, image.width, 30))
            image.save(tmp_path / name / place)
    (tmp_path / "a-white" / "notes.txt").write_text("not an image")
    (tmp_path / "file.jpg").write_text("of no class")
    return tmp_path


def test_the_models_have_as_many_parameters_as_the_literature_says():
    with tutorial.modules("model") as (model,), torch.device("meta"):
        for name, count in KNOWN.items():
            assert sum(p.numel() for p in model.MODELS[name](1000).parameters()) == count, name
        (weights,) = (m.weight for m in model.MODELS["resnet152"](1000).modules() if isinstance(m, torch.nn.Linear))
        assert weights.shape == (1000, 2048)


def test_a_residual_network_gives_logits_of_any_images():
    with tutorial.modules("model") as (model,):
        made = model.MODELS["resnet18"](7).eval()
        assert made(torch.zeros(2, 3, 64, 48)).shape == (2, 7)


def test_images_in_folders_are_read_as_their_pixels_say(images):
    """White is (1 - mean) / deviation in each channel, black -mean / deviation, wherever the crop lies."""
    with tutorial.modules("data") as (data,):
        found = data.ImageFolder(images, 16)
        assert (len(found), found.classes) == (9, ["a-white", "b-black", "c-left"])
        assert [label for _, label in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        means, deviations = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
        for index, value in ((0, 1.0), (3, 0.0)):
            pixels, _ = found[index]
            assert pixels.shape == (3, 16, 16)
            for channel in range(3):
                expected = (value - means[channel]) / deviations[channel]
                torch.testing.assert_close(pixels[channel], torch.full((16, 16), expected), atol=0.02, rtol=0)


def test_half_of_the_images_are_mirrored_and_seed_and_epoch_repeat_them(images):
    """Whatever was drawn before, and in whichever process."""
    with tutorial.modules("data") as (data,):
        found = data.ImageFolder(images, 16)

        def draw(epoch):
            found.set_epoch(epoch)
            return found[6][0][0]

        drawn = [draw(epoch) for epoch in range(300)]
        assert torch.equal(draw(7), drawn[7])
        assert not torch.equal(data.ImageFolder(images, 16, seed=1)[6][0][0], drawn[0])
        part = data.Chosen(found, [8, 6])
        part.set_epoch(7)
        assert torch.equal(part[1][0][0], drawn[7])
    sides = [(x[:, 0] - x[:, -1]).mean().item() for x in drawn]
    left, right = sum(side > 1 for side in sides), sum(side < -1 for side in sides)
    assert left + right > 150  # the others see one half only
    assert abs(left - right) < 4 * math.sqrt(left + right)  # four standard deviations


def test_crops_are_of_the_usual_sizes_and_within_the_image():
    with tutorial.modules("data") as (data,):
        random = torch.Generator().manual_seed(1)
        crops = [data.random_crop(400, 300, random) for _ in range(500)]
        narrow = [data.random_crop(1000, 10, random) for _ in range(50)]
    assert all(0 <= left < right <= 400 and 0 <= upper < lower <= 300 for left, upper, right, lower in crops)
    sizes = [(right - left, lower - upper) for left, upper, right, lower in crops]
    shares = [wide * high / (400 * 300) for wide, high in sizes]
    assert 0.079 < min(shares) < 0.12
    assert 0.8 < max(shares) <= 1
    assert all(0.74 < wide / high < 1.35 for wide, high in sizes)
    assert {(right - left, lower - upper) for left, upper, right, lower in narrow} == {(10, 10)}


def parse(*words):
    with tutorial.modules("options") as (options,):
        return options.parser("test").parse_args(words), options


def test_every_key_of_the_files_is_an_option_and_flags_win():
    folder = tutorial.FOLDER / "config"
    files = sorted(folder.glob("*.yaml"))
    assert [path.stem for path in files] == ["base", "ddp", "deepspeed", "horovod", "small"]
    for path in files:
        args, _ = parse("-c", str(path))
        for key, value in yaml.safe_load(path.read_text()).items():
            assert getattr(args, key) == value, (path.name, key)
    both = ("-c", str(folder / "base.yaml"), "-c", str(folder / "ddp.yaml"))
    args, _ = parse(*both, "--log-int", "42", "--synthetic", "--subset-size=5000")
    assert (args.log_int, args.synthetic, args.subset_size, args.shuff) == (42, True, 5000, True)
    args, _ = parse(*both)
    assert (args.subset_size, args.backend, args.synthetic, args.model) == (None, None, False, "resnet152")


def test_the_keys_that_users_of_such_tutorials_know_are_there():
    args, _ = parse()
    known = ("data_dir subset_size log_int nworker prefetch batch_size epochs lr momentum shuff rnd_seed backend "
             "fp16_allreduce use_adasum gradient_predivide_factor epoch_time_directory model synthetic")  # fmt: skip
    assert set(known.split()) <= set(vars(args))


def test_an_engines_options_are_settings_of_the_script_with_phalanx():
    args, options = parse("--use-adasum", "--zero-stage", "3", "--rnd-seed", "5", "--backend", "gloo")
    config = load_config(environ={}, script=options.settings(args)).config
    assert (config.seed, config.backend, config.deepspeed.zero_stage) == (5, "gloo", 3)
    assert (config.horovod.use_adasum, config.horovod.fp16_allreduce) == (True, False)


def test_the_scripts_code_has_no_word_of_an_engine():
    _, _, code = (tutorial.FOLDER / "train.py").read_text().lower().split('"""')  # without the docstring
    for word in ("ddp", "fsdp", "deepspeed", "horovod", "hvd", "zero_stage", "distributed", "local_rank", "nccl"):
        assert word not in code, word


def test_only_the_script_with_phalanx_uses_its_api():
    for name in tutorial.TRAINERS:
        code = (tutorial.FOLDER / name).read_text()
        assert ("phalanx.init" in code, "phalanx.EpochTimer" in code) == (name == "train.py", name != "train.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data-dir", "nowhere"], "data_dir='nowhere' holds no images: expected <data_dir>/<class>/<image>.jpg"),
        (["--subset-size", "10"], "subset_size=10: expected 1 to 9, the images in "),
        (["--subset-size", "0"], "subset_size=0: expected 1 to 9"),
    ],
)
def test_data_that_is_not_there_is_refused(images, words, said):
    args, _ = parse("--data-dir", str(images), *words)
    with tutorial.modules("data") as (data,), pytest.raises(SystemExit) as error:
        data.dataset(args)
    assert said in str(error.value)


def test_too_few_images_for_a_batch_are_refused(images):
    args, _ = parse("--data-dir", str(images), "--batch-size", "5")
    with tutorial.modules("data") as (data,):
        found, _ = data.dataset(args)
        assert len(data.loader(args, found)) == 1  # of 9, the last 4 fill none
        sampler = torch.utils.data.DistributedSampler(found, 2, 0, drop_last=True)
        with pytest.raises(SystemExit, match="batch_size=5: this process has 4 images, not one batch"):
            data.loader(args, found, sampler)


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse("--model", "resnet15")
    assert "resnet152" in capsys.readouterr().err


def test_a_subset_is_chosen_by_the_seed_and_random_images_are_as_many_as_wanted(images):
    with tutorial.modules("data") as (data,):

        def subset(*words):
            args, _ = parse("--data-dir", str(images), "--image-size", "8", *words)
            return data.dataset(args)

        (five, classes), (again, _), (other, _) = (subset("--subset-size", "5", "--rnd-seed", n) for n in "112")
        assert (len(five), classes, five.indices == again.indices) == (5, 3, True)
        assert five.indices != other.indices
        assert len(set(five.indices)) == 5
        made, classes = subset("--synthetic", "--subset-size", "70")
        assert (len(made), classes) == (70, 1000)
        assert made[69][0].shape == (3, 8, 8)
        assert torch.equal(made[0][0], made[64][0])  # repeated from a few
        assert len(subset("--synthetic")[0]) == 1_281_167  # ImageNet's training set


def test_made_images_are_jpegs_in_folders(tmp_path, monkeypatch, capsys):
    from PIL import Image

    monkeypatch.setattr(
        sys, "argv", ["make_images.py", str(tmp_path), "--classes", "3", "--count", "2", "--size", "20"]
    )
    with tutorial.modules("make_images") as (script,):
        script.main()
    files = sorted(tmp_path.glob("*/*.jpg"))
    assert len(files) == 6
    with Image.open(files[0]) as image:
        assert (image.format, image.size) == ("JPEG", (20, 20))


@pytest.fixture
def jobs(tmp_path, monkeypatch, capsys):
    """`slurm.py` with those words, in a copy of the folder: its output."""
    for name in ("PHALANX_SITE", "PHALANX_STRATEGY", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    tutorial.copy_to(tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["slurm.py", "--no-save-script", "--no-submit-job", *words])
        with tutorial.modules("slurm") as (script,):
            script.main()
        lines = capsys.readouterr().out.splitlines()
        names = [line.partition("--job-name=")[2] for line in lines if "--job-name=" in line]
        commands = [line.partition(": ")[2] for line in lines if line.startswith("training_cmd: ")]
        return list(zip(names, commands, strict=True))

    return run


WITH = "train.py -c config/base.yaml -c config/{0}.yaml".format
BY_HAND = "{0}_trainer.py -c config/base.yaml -c config/{0}.yaml".format


def test_runall_submits_the_script_and_the_one_by_hand_for_each_strategy(jobs):
    strategies = ("ddp", "horovod", "deepspeed")
    assert jobs("-c", "slurm_config.yaml", "--mode", "runall") == [
        *((f"scaling-phalanx-{name}-2x1", WITH(name)) for name in strategies),
        *((f"scaling-baseline-{name}-2x1", BY_HAND(name)) for name in strategies),
    ]


def test_the_file_or_an_option_chooses_the_script(jobs):
    config = ("-c", "slurm_config.yaml")
    assert jobs(*config) == [("scaling-phalanx", WITH("ddp"))]
    assert jobs(*config, "--no-itwinai-trainer", "--dist-strat", "horovod") == [
        ("scaling-baseline", BY_HAND("horovod"))
    ]
    assert jobs("--trainer", "baseline", "--job-name", "mine") == [("mine", BY_HAND("ddp"))]
    assert [name for name, _ in jobs("--trainer", "both", "--job-name=mine")] == ["mine-phalanx", "mine-baseline"]
    sizes = ("--mode", "scaling-test", "--strategies", "ddp", "--scalability-nodes", "1,4", "--trainer", "both")
    assert jobs(*config, *sizes) == [
        *((f"scaling-phalanx-ddp-{nodes}x1", WITH("ddp")) for nodes in (1, 4)),
        *((f"scaling-baseline-ddp-{nodes}x1", BY_HAND("ddp")) for nodes in (1, 4)),
    ]


ITWINAIS = """\
num_nodes: 1
num_tasks_per_node: 1
gpus_per_node: 4
cpus_per_gpu: 4
mode: single
dist_strat: horovod
itwinai_trainer: false
account: intertwin
time: 00:10:00
partition: develbooster
std_out: job_logs/${dist_strat}-${num_nodes}x${gpus_per_node}.out
err_out: job_logs/${dist_strat}-${num_nodes}x${gpus_per_node}.err
job_name: tutorial-${dist_strat}-job
python_venv: ../.venv
"""


def test_a_job_file_of_itwinais_tutorial_works(jobs, tmp_path):
    (tmp_path / "theirs.yaml").write_text(ITWINAIS)
    config = ("-c", str(tmp_path / "theirs.yaml"))
    assert jobs(*config) == [("tutorial-horovod-job-baseline", BY_HAND("horovod"))]
    assert jobs(*config, "--itwinai-trainer") == [("tutorial-horovod-job-phalanx", WITH("horovod"))]


def test_without_a_job_file_there_are_jobs_too(jobs):
    assert [command for _, command in jobs("--mode", "runall", "--strategies", "ddp")] == [WITH("ddp"), BY_HAND("ddp")]


def test_a_wrong_setting_ends_in_words_and_not_in_a_traceback(jobs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["slurm.py", "--mode", "sungle"])
    with tutorial.modules(), pytest.raises(SystemExit) as error:
        runpy.run_path("slurm.py", run_name="__main__")
    assert str(error.value).startswith("slurm.py: mode = 'sungle' (command line): expected one of single, runall")


def test_no_command_of_the_readme_is_in_a_section_that_is_not_run():
    sections = tutorial.tutorial.sections(tutorial.TEXT)
    run = [tutorial.DATA, tutorial.HERE, tutorial.ALLOCATION, tutorial.BATCH, tutorial.REPORT]
    assert [name for name in sections if tutorial.commands(name)] == run
    assert tutorial.commands("") == []
