"""Definition files of images: where they start from, and that they install what `phalanx env create` does."""

import re
import shlex
import subprocess

import pytest

from phalanx import bootstrap
from phalanx.cli.main import main
from phalanx.containers.definition import BASES, bootstrap_of
from phalanx.errors import PlanError


def written(capsys, *words):
    assert main(["container", "definition", *words]) == 0
    return capsys.readouterr().out


def post(text):
    """The lines of %post, as the image's shell gets them."""
    return text.partition("%post\n")[2].partition("\n%environment")[0]


def test_a_definition_keeps_the_images_torch_and_copies_no_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("WANDB_API_KEY=hush")
    (tmp_path / "requirements.txt").write_text("einops\n")
    assert (
        main(
            ["container", "definition", "--from", "pytorch", "--with", "horovod", "--requirements", "requirements.txt"]
        )
        == 0
    )
    text, warned = capsys.readouterr()
    assert f"--from {BASES['pytorch'].replace('runtime', 'devel')}\n" in warned
    assert "From: docker.io/pytorch/pytorch:" in text
    assert text.index("/phalanx-torch.txt") < text.index("pip install")
    assert all("--constraint /phalanx-torch.txt" in line for line in text.splitlines() if "pip install" in line)
    assert "HOROVOD_WITH_PYTORCH=1" in text
    assert "/.env" not in text
    assert main(["container", "definition", "--requirements", ".env"]) == 2


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("docker://ghcr.io/a/b:1", ("docker", "ghcr.io/a/b:1")),
        ("docker://ubuntu", ("docker", "ubuntu")),
        ("ubuntu:22.04", ("docker", "ubuntu:22.04")),
        ("docker:24", ("docker", "docker:24")),  # an image of that name
        ("localhost:5000/a", ("docker", "localhost:5000/a")),
        ("nvidia", ("docker", BASES["nvidia"])),
        ("oras://h/a:1", ("oras", "h/a:1")),
        ("library://user/some/image:2", ("library", "user/some/image:2")),
        ("shub://a/b", ("shub", "a/b")),
        ("docker-daemon://mine:latest", ("docker-daemon", "mine:latest")),
        ("docker-daemon:mine:latest", ("docker-daemon", "mine:latest")),
        ("DOCKER://a/b", ("docker", "a/b")),
        ("Oras://h/a:1", ("oras", "h/a:1")),
    ],
)
def test_an_image_is_named_in_its_agents_words(base, expected):
    assert bootstrap_of(base) == expected


@pytest.mark.parametrize(
    ("base", "agent", "tag"),
    [
        ("torch.sif", "localimage", ""),
        ("./torch.sif", "localimage", ""),
        ("{here}/torch.sif", "localimage", ""),
        ("localimage:torch.sif", "localimage", ""),
        ("file://{here}/torch.sif", "localimage", ""),
        ("docker-archive://torch.sif", "docker-archive", ""),
        ("oci-archive:torch.sif:1.2", "oci-archive", ":1.2"),
    ],
)
def test_a_file_is_named_by_its_whole_path(tmp_path, monkeypatch, base, agent, tag):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.sif").touch()
    assert bootstrap_of(base.format(here=tmp_path)) == (agent, f"{tmp_path}/torch.sif{tag}")


@pytest.mark.parametrize(
    ("base", "word"),
    [
        ("https://h/a.sif", "Pull it first"),
        ("nix://a", "docker://"),
        ("nix.sif", "there is no /"),
        ("./nix", "there is no /"),
        ("docker://", "image's name"),
        ("a\n%post\n  touch x", "image's name"),
    ],
)
def test_what_is_no_image_is_refused(base, word):
    with pytest.raises(PlanError, match=re.escape(word)):
        bootstrap_of(base)


def test_horovod_is_built_as_env_create_builds_it(tmp_path, capsys):
    text = post(written(capsys, "--from", "x", "--with", "horovod", "demo", "--with", "einops>=0.7,<9"))
    bootstrap.carry_out(["--cpu", str(tmp_path / "v"), "--with", "horovod", "demo", "einops>=0.7,<9", "--dry-run"])
    ours = [shlex.split(line[2:]) for line in capsys.readouterr().out.splitlines() if line.startswith("+ ")]
    there = [shlex.split(line) for line in text.splitlines() if line.strip().startswith("python3 -m pip install")]

    def packages(commands):
        found = [words[words.index("install") + 1 :] for words in commands if "install" in words]
        options = {"--constraint", "--no-cache-dir", "--upgrade"}
        kept = [[w for w in words if w not in options and not w.startswith("/")] for words in found]
        return [words for words in kept if words]

    wanted = [words for words in packages(ours) if words not in (["pip"], [bootstrap.TORCH])]
    assert [words for words in packages(there) if words != ["phalanx[torch,demo]"]] == wanted
    assert any("[torch,demo]" in word for words in there for word in words)
    for line in (*bootstrap.HOROVOD_TOOLCHAIN.splitlines(), "horovodrun --check-build >/horovod.txt"):
        assert line in [given.strip() for given in text.splitlines()]
    for name, value in bootstrap.HOROVOD_VARIABLES.items():
        assert f"{name}={value}" in text


@pytest.mark.parametrize("extras", [(), ("horovod",), ("a>=1,<2,b", "demo"), ("deepspeed", "ray")])
def test_the_lines_are_a_shells(capsys, extras):
    """Read by sh; and with stand-ins for what they call, none of them is a redirection or splits a requirement."""
    text = post(written(capsys, *(("--with", *extras) if extras else ())))
    assert subprocess.run(["sh", "-n"], input=text, text=True).returncode == 0
    shown = "python3() { for word; do printf '<%s>' \"$word\"; done; echo; }\nset -eu\n"
    lines = "\n".join(line for line in text.splitlines() if "-m pip install" in line)
    done = subprocess.run(["sh", "-c", shown + lines], capture_output=True, text=True)
    assert done.returncode == 0
    for word in ("a>=1,<2", "b") if "a>=1,<2,b" in extras else ():
        assert f"<{word}>" in done.stdout


def test_an_extra_that_is_a_file_is_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    text = written(capsys, "--with", "./own")
    assert f"    {tmp_path}/own /opt/extras/own\n" in text
    assert "install --no-cache-dir /opt/extras/own --constraint" in text
    assert main(["container", "definition", "--with", "./nix"]) == 2
    assert "nix: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("base", ["docker:a/b", "library:me/x/y", "oras:h/a:1"])
def test_an_address_without_its_slashes_is_no_image_of_a_host(base):
    with pytest.raises(PlanError, match=f"an address has //, such as {base.replace(':', '://', 1)}"):
        bootstrap_of(base)


def test_paths_with_blanks_are_quoted_as_apptainer_reads_them(tmp_path, monkeypatch, capsys):
    """It takes an unquoted one for a source and a target."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/c d.txt").touch()
    assert f'    "{tmp_path}/a b/c d.txt" /requirements.txt\n' in written(capsys, "--requirements", "a b/c d.txt")
    (tmp_path / "i j.sif").touch()
    assert f"Bootstrap: localimage\nFrom: {tmp_path}/i j.sif\n" in written(capsys, "--from", "i j.sif")
    (tmp_path / 'q"q').touch()
    assert main(["container", "definition", "--requirements", 'q"q']) == 2
    assert "can't hold a path with quotes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pytorch",), "unknown word 'pytorch': an image is --from pytorch"),
        (("--from", "pytorch", "--out", "nix/x.def"), "nix/x.def: cannot be written: No such file"),
        (("--requirements", "other.txt"), "holds secrets"),
    ],
)
def test_what_no_definition_can_be_made_of_is_said(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("WANDB_API_KEY=hush")
    (tmp_path / "other.txt").symlink_to(".env")
    assert main(["container", "definition", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""
