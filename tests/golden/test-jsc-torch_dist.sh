#!/bin/bash -x
#SBATCH --job-name=test-torch_dist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=48
#SBATCH --gres=gpu:4
#SBATCH --time=30:00
#SBATCH --partition=develbooster
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/project
# torchrun, ddp, ranks 2 x 4 (phalanx 0.1.0)

set -o pipefail
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RUN_ID HOROVOD_RANK SLURM_EXPORT_ENV SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_LIST SRUN_CPUS_PER_TASK

run_dir=${1:-/home/me/project/runs/test-torch_dist/job-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}
[ -z "${1-}" ] || [ -e "$1/config.yaml" ] || {
  echo "phalanx: $(hostname) has no run directory $1: set run_root to a folder that all nodes share" >&2
  exit 2
}
export PHALANX_RUN_DIR="$run_dir${SLURM_ARRAY_TASK_ID:+/array-$SLURM_ARRAY_TASK_ID}"
mkdir -p "${PHALANX_RUN_DIR%/*}" && { mkdir -m 0700 "$PHALANX_RUN_DIR" 2>/dev/null || true; }
mkdir -p "$PHALANX_RUN_DIR/jobs" || exit
date +%s >>"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.start"
# What stands before this line in an output file that jobs or restarts share is not this start's
[ ! -s /dev/stderr ] || echo "=== phalanx: job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0} ===" >&2
[ -e "$PHALANX_RUN_DIR/config.yaml" ] || (umask 077; cat >"$PHALANX_RUN_DIR/config.yaml") <<'END_OF_CONFIG'
nodes: 2
gpus_per_node: 4
gpu_request: gres
cpus_per_task: 48
time: '30:00'
partition: develbooster
modules:
  purge: force
  load:
  - Stages/2024
  - GCC
  - OpenMPI
  - CUDA
  - cuDNN
  - NCCL
  - Python
interface: ib0
host_suffix: i
cpu_bind: none
mpi: pspmix
shebang: /bin/bash -x
mode: single
name: test-torch_dist
launcher: torchrun
venv: envs/hpc
env:
  NCCL_IB_TIMEOUT: '50'
  UCX_RC_TIMEOUT: 4s
END_OF_CONFIG

# Modules
for init in "${MODULESHOME:-}/init/bash" "${LMOD_PKG:-}/init/bash" \
  /etc/profile.d/{modules,lmod,z00_lmod,z00-lmod}.sh /usr/share/{lmod/lmod,modules}/init/bash; do
  # shellcheck source=/dev/null
  command -v module >/dev/null || [ ! -r "$init" ] || . "$init"
done
command -v module >/dev/null || {
  echo "error: modules are set, and nothing defines the command module here: set shebang to /bin/bash -l, or put the line that defines it into before (source .../init/bash)" >&2
  echo 2 >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"; exit 2
}
module --force purge
module load Stages/2024 GCC OpenMPI CUDA cuDNN NCCL Python

# Environment
export PYTHONUNBUFFERED=1
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export PHALANX_INTERFACE=ib0
export PHALANX_HOST_SUFFIX=i
export NCCL_IB_TIMEOUT=50
export UCX_RC_TIMEOUT=4s
export OMP_NUM_THREADS=12
export PHALANX_CPUS_PER_RANK=12
export PHALANX_EXPECTED_WORLD_SIZE=8
export PHALANX_LAUNCH_ID="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$$"

# Virtual environment
. /home/me/project/envs/hpc/bin/activate

# One attempt at a time in a run directory, and none after the one that ends a chain
claim=$(/home/me/project/envs/hpc/bin/python -m phalanx.claims "$PHALANX_RUN_DIR")
case $claim in
  "end "*) status=${claim#end }; echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"; exit "$status" ;;
  *.released) ;;
  *) claim= ;;  # it could not be asked
esac

# The agents' meeting point: this node, and a port of the job's own below the ephemeral ones
PHALANX_RDZV_HOST="$(node="${SLURMD_NODENAME:-$(hostname)}"; echo "${node%%.*}"i"${node#"${node%%.*}"}")"
PHALANX_RDZV_PORT="${MASTER_PORT:-$(/home/me/project/envs/hpc/bin/python -m phalanx.ports "$SLURM_JOB_ID")}"
export PHALANX_RDZV_HOST PHALANX_RDZV_PORT

# Launch
srun \
  --nodes=2 \
  --ntasks=2 \
  --ntasks-per-node=1 \
  --cpus-per-task=48 \
  --kill-on-bad-exit=1 \
  --mpi=pspmix \
  --cpu-bind=none \
  bash -c 'exec \
  /home/me/project/envs/hpc/bin/python -m torch.distributed.run \
  --nnodes 2 \
  --local-addr "$(node="${SLURMD_NODENAME:-$(hostname)}"; echo "${node%%.*}"i"${node#"${node%%.*}"}")" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$PHALANX_RDZV_HOST":"$PHALANX_RDZV_PORT" \
  --rdzv-conf is_host=$(($SLURM_NODEID == 0)),rank=$SLURM_NODEID \
  --rdzv-id "$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}" \
  --log-dir \
  /dev/null \
  --nproc-per-node 4 -m -- phalanx.worker \
  /py/lib/python3/site-packages/phalanx/testing/rank.py torchrun torch_dist 300 tests/hpc'
status=$?
[ "$status" -eq 0 ] || /home/me/project/envs/hpc/bin/python -m phalanx.report_failure "$PHALANX_RUN_DIR" "$status" || status=$?

echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"
[ -z "$claim" ] || : >"$claim"
exit "$status"
