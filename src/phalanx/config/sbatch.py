"""sbatch's own table of options (Slurm 22.05 to 24.11), by name with `_` for `-`.

Those that the program reasons about are settings of their own (`nodes`, `mem`, …); these pass through as they are.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Options with a value.
TEXTS = _names(
    "acctg_freq array batch bb bbf begin cluster_constraint clusters comment consolidate_segments constraint "
    "container container_id core_spec cores_per_socket cpu_freq deadline delay_boot dependency distribution exclude "
    "export export_file extra extra_node_info gid gpu_bind gpu_freq gpus gpus_per_socket gres_flags hint input "
    "kill_on_invalid_dep licenses mail_type mail_user mcs_label mem_bind mincpus network nodefile nodelist "
    "ntasks_per_core ntasks_per_gpu ntasks_per_socket open_mode power prefer priority profile qos reservation "
    "segment signal sockets_per_node switches thread_spec threads_per_core time_min tmp tres_bind tres_per_task uid "
    "wait_all_nodes wckey"
)
# Options without a value.
FLAGS = _names(
    "contiguous hold ignore_pbs no_requeue overcommit oversubscribe reboot requeue spread_job stepmgr use_min_nodes"
)
# Options with or without one: `exclusive: true`, `exclusive: user`.
OPTIONALS = _names("exclusive get_user_env nice no_kill oom_kill_step propagate resv_ports")

PASSED = TEXTS | FLAGS | OPTIONALS
# Those that a bare key means: `container` is a section of our own, so sbatch's is sbatch.container only.
BARE = PASSED - {"container"}

# What sbatch knows and a job file can't mean.
REFUSED = {
    "wrap": "the batch script is written here; give SCRIPT or training_cmd",
    "parsable": "the job's id is always the last line of phalanx submit",
    "test_only": "use phalanx submit --preview",
    "wait": "use phalanx submit --wait",
    "quiet": "the job's id alone is on stdout; all else is on stderr",
    "verbose": "use phalanx submit --preview, or phalanx plan",
    "help": "use phalanx submit --help",
    "usage": "use phalanx submit --help",
    "version": "it says nothing about a job; use sbatch --version",
}

SHORT = {
    "-N": "nodes",
    "-n": "ntasks",
    "-t": "time",
    "-p": "partition",
    "-A": "account",
    "-J": "job_name",
    "-o": "output",
    "-e": "error",
    "-D": "chdir",
    "-q": "sbatch.qos",
    "-w": "sbatch.nodelist",
    "-x": "sbatch.exclude",
    "-C": "sbatch.constraint",
    "-d": "sbatch.dependency",
    "-L": "sbatch.licenses",
    "-G": "sbatch.gpus",
    "-a": "sbatch.array",
}
"""The letters that sbatch has for them, but for -c and -s, which are the command's own."""
