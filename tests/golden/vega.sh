#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --partition=gpu
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/project
# torchrun, ddp, ranks 2 x 4 (phalanx 0.1.0)

set -o pipefail
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RUN_ID HOROVOD_RANK SLURM_EXPORT_ENV SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_LIST SRUN_CPUS_PER_TASK

run_dir=${1:-/home/me/project/runs/train/job-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}
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
strategy: ddp
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
module load CUDA OpenMPI NCCL Python

# Environment
export PYTHONUNBUFFERED=1
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export PHALANX_INTERFACE=ib0
export NCCL_IB_DISABLE=0
export PHALANX_EXPECTED_WORLD_SIZE=8
export PHALANX_LAUNCH_ID="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$$"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((${SLURM_CPUS_ON_NODE:-1} / 4 > 1 ? ${SLURM_CPUS_ON_NODE:-1} / 4 : 1))}"

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
srun \
  --nodes=2 \
  --ntasks=2 \
  --ntasks-per-node=1 \
  --kill-on-bad-exit=1 \
  --mpi=pmix \
  --cpu-bind=none \
  bash -c 'exec \
  /py/bin/python -m torch.distributed.run \
  --nnodes 2 \
  --local-addr "$(ip -o -4 addr show dev ib0 | awk '"'"'{sub("/.*", "", $4); print $4; exit}'"'"')" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$PHALANX_RDZV_HOST":"$PHALANX_RDZV_PORT" \
  --rdzv-conf is_host=$(($SLURM_NODEID == 0)),rank=$SLURM_NODEID \
  --rdzv-id "$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}" \
  --log-dir \
  /dev/null \
  --nproc-per-node 4 -m -- phalanx.worker train.py \
  --lr 1e-3 '"'"'it'"'"'"'"'"'"'"'"'s $$5'"'"''
status=$?
[ "$status" -eq 0 ] || /py/bin/python -m phalanx.report_failure "$PHALANX_RUN_DIR" "$status" || status=$?

echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"
[ -z "$claim" ] || : >"$claim"
exit "$status"
