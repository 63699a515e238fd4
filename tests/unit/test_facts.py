import os

import pytest

from phalanx.planning import facts


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


@pytest.mark.parametrize(
    ("said", "files"),
    [
        ("0::/slurm/job_7/step_0", {"slurm/job_7/cpu.max": "300000 100000", "slurm/cpu.max": "max 100000"}),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}),  # of the one above
        ("3:cpu,cpuacct:/a\n2:memory:/b", {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_quota_of_the_processs_own_cgroup_or_one_above_counts(tmp_path, monkeypatch, said, files):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "own").write_text(said + "\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert facts.usable_cpus(tmp_path, tmp_path / "own", {}) == 3


@pytest.mark.parametrize(
    ("environ", "cpus"),
    [
        ({"SLURM_CPUS_ON_NODE": "2", "SLURMD_NODENAME": "node1"}, 2),  # nobody is bound without a plugin for it
        ({"SLURM_CPUS_ON_NODE": "16", "SLURMD_NODENAME": "node1"}, 8),
        ({"SLURM_CPUS_ON_NODE": "2"}, 8),  # salloc's shell on a login node
    ],
)
def test_slurms_share_of_the_node_counts(tmp_path, monkeypatch, environ, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert facts.usable_cpus(tmp_path, tmp_path / "none", environ) == cpus


@pytest.mark.parametrize(
    ("bound", "ranks", "is_task", "environ", "share"),
    [
        (8, 4, False, {}, 2),  # below an agent, which has all of the node's
        (8, 4, True, {"SLURM_CPUS_PER_TASK": "2", "SLURM_CPUS_ON_NODE": "8"}, 2),
        (2, 4, True, {"SLURM_CPUS_ON_NODE": "8"}, 2),  # bound by Slurm to its own
        (8, 4, True, {"SLURM_CPUS_ON_NODE": "8"}, 2),
        (1, 4, False, {}, 1),
    ],
)
def test_a_ranks_share_is_of_what_it_may_use(monkeypatch, bound, ranks, is_task, environ, share):
    from phalanx.rank import cpus

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)), raising=False)
    monkeypatch.setattr(cpus, "_quotas", lambda *_: [])
    assert cpus.cpus_of_rank(ranks, is_task, environ) == share


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
