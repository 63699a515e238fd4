#!/bin/bash
#SBATCH --job-name='two words'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --partition=gpu
#SBATCH --account=proj
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/project
#SBATCH --exclusive
#SBATCH --qos=high
#SBATCH --spank=1
# torchrun, ddp, ranks 2 x 4 (phalanx 0.1.0)

set -o pipefail
unset RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR TORCHELASTIC_RUN_ID HOROVOD_RANK SLURM_EXPORT_ENV SLURM_CPU_BIND SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_LIST SRUN_CPUS_PER_TASK SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU

run_dir=${1:-'/home/me/project/runs/two words'/job-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}
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
if [ -d "$run_dir/workdir" ]; then cd "$run_dir/workdir" || exit; fi  # the snapshot

# Before
ulimit -c 0

set +eu -o pipefail; trap - ERR

# Proxies
export http_proxy=http://proxy:3128
export HTTP_PROXY=http://proxy:3128
export no_proxy=localhost,.cluster
export NO_PROXY=localhost,.cluster

# Environment
export PYTHONUNBUFFERED=1
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0
export PHALANX_INTERFACE=ib0
export PHALANX_HOST_SUFFIX=i
export OMP_NUM_THREADS=8
export PHALANX_CPUS_PER_RANK=8
export PHALANX_EXPECTED_WORLD_SIZE=8
export PHALANX_LAUNCH_ID="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$$"

# Virtual environment
. '/venvs/a b/bin/activate'

# Temporary files, on each node
export TMPDIR=/scratch
export TRITON_CACHE_DIR="$TMPDIR/triton"
export TORCHINDUCTOR_CACHE_DIR="$TMPDIR/inductor"
mkdir -p "$TMPDIR"

# One attempt at a time in a run directory, and none after the one that ends a chain
claim=$('/venvs/a b/bin/python' -m phalanx.claims "$PHALANX_RUN_DIR")
case $claim in
  "end "*) status=${claim#end }; echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"; exit "$status" ;;
  *.released) ;;
  *) claim= ;;  # it could not be asked
esac

# The agents' meeting point: this node, and a port of the job's own below the ephemeral ones
PHALANX_RDZV_HOST="$(node="${SLURMD_NODENAME:-$(hostname)}"; echo "${node%%.*}"i"${node#"${node%%.*}"}")"
PHALANX_RDZV_PORT="${MASTER_PORT:-$('/venvs/a b/bin/python' -m phalanx.ports "$SLURM_JOB_ID")}"
export PHALANX_RDZV_HOST PHALANX_RDZV_PORT

# Launch
srun \
  --nodes=2 \
  --ntasks=2 \
  --ntasks-per-node=1 \
  --cpus-per-task=32 \
  --kill-on-bad-exit=1 \
  --cpu-bind=none \
  bash -c 'exec '"'"'/venvs/a b/bin/python'"'"' -m torch.distributed.run \
  --nnodes 2 \
  --local-addr "$(node="${SLURMD_NODENAME:-$(hostname)}"; echo "${node%%.*}"i"${node#"${node%%.*}"}")" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$PHALANX_RDZV_HOST":"$PHALANX_RDZV_PORT" \
  --rdzv-conf is_host=$(($SLURM_NODEID == 0)),rank=$SLURM_NODEID \
  --rdzv-id "$SLURM_JOB_ID.$SLURM_STEP_ID.${SLURM_RESTART_COUNT:-0}" \
  --log-dir \
  /dev/null \
  --nproc-per-node 4 -m -- phalanx.worker train.py \
  --nodes 2 --out $SCRATCH/x'
status=$?
[ "$status" -eq 0 ] || '/venvs/a b/bin/python' -m phalanx.report_failure "$PHALANX_RUN_DIR" "$status" || status=$?

# After
(
echo bye
)

echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"
[ -z "$claim" ] || : >"$claim"
exit "$status"
