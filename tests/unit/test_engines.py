"""Engines that are missing or unfit are refused before anything is started."""

import sys
from dataclasses import replace

import pytest

from phalanx.config import load_config
from phalanx.errors import MissingExtraError, PlanError
from phalanx.planning import engines
from phalanx.planning.facts import Facts
from phalanx.planning.planner import make_plan
from phalanx.planning.program import Program

FACTS = Facts("here", 8, 0, sys.executable, "Linux", "x86_64")


@pytest.fixture
def environment(tmp_path):
    """A Python that has these packages, found by a path of its own; `mpi` or `gloo` is in Horovod's library."""

    def make(*packages, library=b""):
        site = tmp_path / "venv/packages"
        site.mkdir(parents=True)
        for package in packages:
            (site / package).mkdir()
        if library:
            (site / "horovod/torch").mkdir()
            (site / "horovod/torch/mpi_lib_v2.so").write_bytes(library)
        python = tmp_path / "venv/python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')  # nothing but what is there
        python.chmod(0o755)
        return str(python)

    return make


def plan(python, *overrides):
    made = make_plan(load_config((), ("nproc=2", *overrides), {}).config, FACTS, Program("train.py"))
    return replace(made, python=python)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("strategy=deepspeed",), ["strategy deepspeed", "pip install 'phalanx[deepspeed]'"]),
        (("launcher=deepspeed",), ["launcher deepspeed", "pip install 'phalanx[deepspeed]'"]),
        (("launcher=ray",), ["launcher ray", "pip install 'phalanx[ray]'"]),
        (("strategy=horovod",), ["strategy horovod", "phalanx env create", "--with horovod"]),
    ],
)
def test_a_missing_engine_names_how_it_is_installed(environment, overrides, words):
    python = environment("torch")
    with pytest.raises(MissingExtraError) as caught:
        engines.check(plan(python, *overrides))
    assert all(word in str(caught.value) for word in [*words, python])


def test_engines_that_are_there_pass(environment):
    python = environment("deepspeed", "ray", "horovod", library=b"libmpi HOROVOD_GLOO_RENDEZVOUS_ADDR")
    for words in (("strategy=deepspeed", "launcher=ray"), ("strategy=horovod",), ("strategy=deepspeed",)):
        engines.check(plan(python, *words))


def test_an_environment_that_only_the_nodes_have_is_left_to_them(tmp_path):
    engines.check(plan(str(tmp_path / "elsewhere/bin/python"), "strategy=horovod"))


@pytest.mark.parametrize(
    ("launcher", "library", "words"),
    [
        ("mpirun", b"HOROVOD_GLOO_RENDEZVOUS_ADDR", ["without MPI", "alone", "--launcher srun or horovodrun"]),
        ("horovodrun", b"libmpi", ["without gloo", "--launcher mpirun or srun"]),
    ],
)
def test_a_horovod_that_the_launcher_cant_start(environment, launcher, library, words):
    python = environment("horovod", library=library)
    with pytest.raises(PlanError) as caught:
        engines.check(plan(python, "strategy=horovod", f"launcher={launcher}"))
    assert all(word in str(caught.value) for word in words)


def test_an_mpirun_that_is_missing(environment):
    with pytest.raises(PlanError, match="launcher mpirun needs /no/mpirun, which is not on PATH"):
        engines.check(plan(environment(), "launcher=mpirun", "mpirun.executable=/no/mpirun"))
