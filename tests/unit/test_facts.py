import os

import pytest

from phalanx import facts


def nvidia(root, count):
    for number in range(count):
        (root / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3fa8,GPU-77b1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-9c1e"}, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
    ],
)
def test_gpus_are_those_that_the_visibility_variable_leaves(tmp_path, variables, count):
    assert facts.usable_gpus(variables, nvidia(tmp_path, 4)) == count


def test_a_variable_makes_no_gpus_where_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.usable_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0


def test_gpus_are_asked_of_nvidia_smi_where_the_driver_has_no_folder(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: H100 (UUID: GPU-1)'\necho '  MIG 1g.10gb'\necho 'GPU 1: H100 (UUID: GPU-2)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.usable_gpus({}, tmp_path) == 2


def test_an_nvidia_smi_without_a_driver_means_no_gpus(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\necho "NVIDIA-SMI has failed because it couldn\'t communicate with the driver"\nexit 9\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.usable_gpus({}, tmp_path) == 0


def test_amd_gpus_are_counted_without_the_cpu_nodes(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    for node, gpu_id in enumerate(("0", "45412", "9091")):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
    assert facts.usable_gpus({}, tmp_path) == 2
    assert facts.usable_gpus({"ROCR_VISIBLE_DEVICES": "1"}, tmp_path) == 1


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8)]
)
def test_cpus_are_the_affinity_mask_or_less_by_the_quota_of_a_container(tmp_path, monkeypatch, quota, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert facts.usable_cpus(tmp_path) == cpus


def test_the_older_form_of_the_quota_counts_too(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert facts.usable_cpus(tmp_path) == 8
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert facts.usable_cpus(tmp_path) == 2


def test_versions_of_absent_packages_are_left_out():
    import pydantic

    assert facts.installed(("pydantic", "no-such-package")) == {"pydantic": pydantic.VERSION}


def test_the_callers_thread_count_is_a_fact():
    assert facts.gather({"OMP_NUM_THREADS": "3"}).omp_num_threads == "3"
    assert facts.gather({"OMP_NUM_THREADS": ""}).omp_num_threads is None
    assert facts.gather({}).omp_num_threads is None
