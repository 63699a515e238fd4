#!/bin/bash
#SBATCH --job-name=test-torch_dist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gres=gpu:4
#SBATCH --mem=240G
#SBATCH --time=30:00
#SBATCH --partition=gpu
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/project
# torchrun, ddp, ranks 2 x 4 (phalanx 0.1.0)

set -o pipefail
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RUN_ID HOROVOD_RANK SLURM_EXPORT_ENV SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_LIST SRUN_CPUS_PER_TASK SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU

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
cpus_per_task: 64
mem: 240G
time: '30:00'
partition: gpu
modules:
  purge: true
  load:
  - CUDA
  - OpenMPI
  - NCCL
interface: ib0
mpi: pmix
mode: single
name: test-torch_dist
launcher: torchrun
container:
  image: images/phalanx.sif
  gpu: nv
env:
  NCCL_IB_DISABLE: '0'
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
module purge
module load CUDA OpenMPI NCCL

# Environment
export PYTHONUNBUFFERED=1
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export PHALANX_INTERFACE=ib0
export NCCL_IB_DISABLE=0
export OMP_NUM_THREADS=16
export PHALANX_CPUS_PER_RANK=16
export PHALANX_EXPECTED_WORLD_SIZE=8
export PHALANX_LAUNCH_ID="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$$"

# One attempt at a time in a run directory, and none after the one that ends a chain
claim=$(/py/bin/python -m phalanx.claims "$PHALANX_RUN_DIR")
case $claim in
  "end "*) status=${claim#end }; echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"; exit "$status" ;;
  *.released) ;;
  *) claim= ;;  # it could not be asked
esac

# The agents' meeting point: this node, and a port of the job's own below the ephemeral ones
PHALANX_RDZV_HOST="$(ip -o -4 addr show dev ib0 | awk '{sub("/.*", "", $4); print $4; exit}')"
PHALANX_RDZV_PORT="${MASTER_PORT:-$(/py/bin/python -m phalanx.ports "$SLURM_JOB_ID")}"
export PHALANX_RDZV_HOST PHALANX_RDZV_PORT

# Launch
# shellcheck disable=SC2046  # one word a variable
srun \
  --nodes=2 \
  --ntasks=2 \
  --ntasks-per-node=1 \
  --cpus-per-task=64 \
  --kill-on-bad-exit=1 \
  --mpi=pmix \
  --cpu-bind=none \
  bash -c 'if [ -n "${TMPDIR:-}" ]; then mkdir -p "$TMPDIR"; fi
export APPTAINERENV_PHALANX_CWD="$(pwd -P)"
for name in $(compgen -e | grep -E '"'"'^((RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|TMPDIR|PYTHONUNBUFFERED|http_proxy|https_proxy|no_proxy|HTTP_PROXY|HTTPS_PROXY|NO_PROXY|TERM|USER)$|SLURM_|PMI|OMPI_|MPI_|MV2_|HYDRA_|PALS_|FLUX_|PHALANX_|TORCHELASTIC_|MASTER_|CUDA_|NVIDIA_|ROCR_|HIP_|NCCL_|RCCL_|GLOO_|UCX_|FI_|OMP_|MKL_|OPENBLAS_|TRITON_|TORCH|MIOPEN_|WANDB_|MLFLOW_|HF_|HUGGING_FACE_|ACCELERATE_|DS_|HOROVOD_|RAY_)'"'"'); do export "APPTAINERENV_$name=${!name}"; done
export APPTAINERENV_PYTHONNOUSERSITE="${APPTAINERENV_PYTHONNOUSERSITE-1}"
own=()
if [ -d /py/lib/python3/site-packages/phalanx ]; then own+=(--mount=type=bind,source=/py/lib/python3/site-packages/phalanx,destination=/.phalanx/lib/phalanx,ro); fi
if [ -d /home/me/project/images/phalanx.sif.phalanx ]; then own+=(--mount=type=bind,source=/home/me/project/images/phalanx.sif.phalanx,destination=/.phalanx/packages,ro); fi
exec env \
  --unset=PYTHONPATH --unset=PYTHONHOME --unset=PYTHONUSERBASE --unset=PYTHONSTARTUP --unset=PYTHONEXECUTABLE \
  --unset=PYTHONPLATLIBDIR --unset=PYTHONPYCACHEPREFIX --unset=VIRTUAL_ENV --unset=VIRTUAL_ENV_PROMPT \
  --unset=CONDA_PREFIX --unset=CONDA_DEFAULT_ENV --unset=CONDA_EXE --unset=CONDA_PYTHON_EXE --unset=CONDA_SHLVL \
  --unset=CONDA_PROMPT_MODIFIER --unset=BASH_ENV apptainer exec \
  --no-eval \
  --mount=type=bind,source=/home/me/project,destination=/home/me/project \
  --mount=type=bind,source=/py/lib/python3/site-packages/phalanx/testing,destination=/py/lib/python3/site-packages/phalanx/testing \
  --mount="type=bind,\"source=$PHALANX_RUN_DIR\",\"destination=$PHALANX_RUN_DIR\"" "${own[@]}" \
  --nv \
  /home/me/project/images/phalanx.sif sh -c '"'"'cd -- "${PHALANX_CWD:-.}" 2>/dev/null || :; unset PHALANX_CWD
export PYTHONPATH="/.phalanx/lib${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"'"'"' sh python3 -m torch.distributed.run \
  --nnodes 2 \
  --local-addr "$(ip -o -4 addr show dev ib0 | awk '"'"'{sub("/.*", "", $4); print $4; exit}'"'"')" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$PHALANX_RDZV_HOST":"$PHALANX_RDZV_PORT" \
  --rdzv-conf is_host=$(($SLURM_NODEID == 0)),rank=$SLURM_NODEID \
  --rdzv-id "$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}" \
  --log-dir \
  /dev/null \
  --nproc-per-node 4 -m -- phalanx.worker \
  /py/lib/python3/site-packages/phalanx/testing/rank.py torchrun torch_dist 300 tests/hpc'
status=$?
[ "$status" -eq 0 ] || /py/bin/python -m phalanx.report_failure "$PHALANX_RUN_DIR" "$status" || status=$?

echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"
[ -z "$claim" ] || : >"$claim"
exit "$status"
