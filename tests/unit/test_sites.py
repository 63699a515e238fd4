"""Site profiles: that the shipped ones load, and what is written from a cluster's own words."""

import subprocess

import pytest

from phalanx.cli.main import main
from phalanx.config import load_config
from phalanx.errors import ConfigError
from phalanx.schedulers.slurm import client
from phalanx.schedulers.slurm.site_profile import look, profile
from phalanx.sites import shipped

# As Slurm 22.05 prints them.
SAID = {
    "scontrol": "Configuration data as of 2026-11-28T05:51:25\nAccountingStorageType   = accounting_storage/slurmdbd\n"
    "ClusterName             = lab\nMpiDefault              = pmix\nSLURM_VERSION           = 22.05.8\n"
    "TmpFS                   = /tmp/%n\n",
    "sinfo": "gpu:a100:4(S:0-1)\n",
    "sacctmgr": "physics\n",
    "srun": "1: lo: <LOOPBACK,UP> mtu 65536\n2: ib0: <BROADCAST,UP> mtu 2044\n3: ib1: <BROADCAST,UP> mtu 2044\n",
}
PARTITIONS = [
    client.Partition("gpu", True, True, 16, 64, 4, 512000, 86400),
    client.Partition("cpu", False, True, 100, 128, 0, 256000, None),
]


@pytest.fixture
def cluster(monkeypatch):
    """Slurm's programs with fixed answers; `SAID` may be changed."""
    said = dict(SAID)

    def run(words, environment=None, timeout=60):
        return subprocess.CompletedProcess(words, 0 if words[0] in said else 1, said.get(words[0], ""), "")

    monkeypatch.setattr(client, "run", run)
    monkeypatch.setattr(client, "partitions", lambda: PARTITIONS)
    monkeypatch.setattr(client.shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    return said


@pytest.mark.parametrize("name", ["generic", "jsc", "vega", "lumi"])
def test_shipped_profiles_load_by_name_and_say_that_they_were_not_run_there(name):
    loaded = load_config((), (), {"PHALANX_SITE": name})
    assert any(origin.startswith("site profile ") for origin in loaded.origins.values())
    text = shipped()[name].read_text()
    assert name == "generic" or "NOT RUN THERE" in text


def test_what_their_sites_are_known_for_stands_in_them():
    jsc = load_config((), (), {"PHALANX_SITE": "jsc"}).config
    assert (jsc.host_suffix, jsc.interface, jsc.torchrun.executable) == ("i", "ib0", "torchrun_jsc")
    lumi = load_config((), (), {"PHALANX_SITE": "lumi"}).config
    assert "rocm" in lumi.modules.load
    assert lumi.interface.startswith("hsn0")


def test_an_unknown_profile_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'jcs'.*generic, jsc, lumi, vega.*'jsc'"):
        load_config((), (), {"PHALANX_SITE": "jcs"})


def test_a_profile_from_the_clusters_words_reads_back_as_they_were(cluster, tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text(profile(look({"USER": "me", "LMOD_CMD": "/lmod"}, node=True)))
    config = load_config((), (), {"PHALANX_SITE": str(path)}).config
    assert (config.account, config.partition, config.mpi, config.sacct) == ("physics", "gpu", "pmix", "true")
    assert config.interface == "ib0,ib1"
    text = path.read_text()
    for words in ("gpu (default): 16 nodes, 64 CPUs, 4 GPUs, 512000 MB, 24 h", "no limit", "# gpu_type: a100", "Lmod"):
        assert words in text


def test_what_is_not_sure_is_left_to_the_reader(cluster, tmp_path):
    cluster["sacctmgr"] = "one\ntwo\n"
    cluster["scontrol"] = ""
    text = profile(look({"USER": "me"}))
    assert "\naccount:" not in text
    assert "# account: one\n# account: two\n" in text
    assert "sacct: false" in text
    assert "\ninterface:" not in text


def test_an_existing_file_is_left_as_it_is(cluster, tmp_path, capsys):
    path = tmp_path / "deep" / "site.yaml"
    assert main(["site", "init", "--out", str(path)]) == 0
    before = path.read_text()
    assert main(["site", "init", "--out", str(path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert path.read_text() == before


@pytest.mark.parametrize("words", [["site"], ["site", "show"], ["site", "show", "jcs"], ["site", "start"]])
def test_wrong_words_say_what_there_is(words, capsys):
    assert main(words) == 2
    assert "expected" in capsys.readouterr().err
