#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
#SBATCH --partition=gpu
#SBATCH --account=proj
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/project
# srun, ddp, ranks 2 x 4 (phalanx 0.1.0)

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

# Secrets, from the environment alone
missing=
[ -n "${WANDB_API_KEY+set}" ] || missing+=' WANDB_API_KEY'
if [ -n "$missing" ]; then
  echo "error: this script holds no secrets, and the environment lacks$missing: set it before sbatch" >&2
  echo 2 >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"
  exit 2
fi

# Environment
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=8
export PHALANX_CPUS_PER_RANK=8
export PHALANX_EXPECTED_WORLD_SIZE=8
export PHALANX_LAUNCH_ID="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$$"

# Temporary files, on each node
export TMPDIR="/tmp/$USER"
export TRITON_CACHE_DIR="$TMPDIR/triton"
export TORCHINDUCTOR_CACHE_DIR="$TMPDIR/inductor"
mkdir -p "$TMPDIR"

# One attempt at a time in a run directory, and none after the one that ends a chain
claim=$(/py/bin/python -m phalanx.claims "$PHALANX_RUN_DIR")
case $claim in
  "end "*) status=${claim#end }; echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"; exit "$status" ;;
  *.released) ;;
  *) claim= ;;  # it could not be asked
esac

# Launch
# shellcheck disable=SC2046  # one word a variable
srun \
  --nodes=2 \
  --ntasks=8 \
  --ntasks-per-node=4 \
  --cpus-per-task=8 \
  --kill-on-bad-exit=1 \
  bash -c 'if [ -n "${TMPDIR:-}" ]; then mkdir -p "$TMPDIR"; fi
export SINGULARITYENV_PHALANX_CWD="$(pwd -P)"
for name in $(compgen -e | grep -E '"'"'^((RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|TMPDIR|PYTHONUNBUFFERED|http_proxy|https_proxy|no_proxy|HTTP_PROXY|HTTPS_PROXY|NO_PROXY|TERM|USER)$|SLURM_|PMI|OMPI_|MPI_|MV2_|HYDRA_|PALS_|FLUX_|PHALANX_|TORCHELASTIC_|MASTER_|CUDA_|NVIDIA_|ROCR_|HIP_|NCCL_|RCCL_|GLOO_|UCX_|FI_|OMP_|MKL_|OPENBLAS_|TRITON_|TORCH|MIOPEN_|WANDB_|MLFLOW_|HF_|HUGGING_FACE_|ACCELERATE_|DS_|HOROVOD_|RAY_)'"'"'); do export "SINGULARITYENV_$name=${!name}"; done
export SINGULARITYENV_PYTHONNOUSERSITE="${SINGULARITYENV_PYTHONNOUSERSITE-1}"
own=()
if [ -d /host/phalanx ]; then own+=(--mount=type=bind,source=/host/phalanx,destination=/.phalanx/lib/phalanx,ro); fi
if [ -d /home/me/project/a.sif.phalanx ]; then own+=(--mount=type=bind,source=/home/me/project/a.sif.phalanx,destination=/.phalanx/packages,ro); fi
exec env \
  --unset=PYTHONPATH --unset=PYTHONHOME --unset=PYTHONUSERBASE --unset=PYTHONSTARTUP --unset=PYTHONEXECUTABLE \
  --unset=PYTHONPLATLIBDIR --unset=PYTHONPYCACHEPREFIX --unset=VIRTUAL_ENV --unset=VIRTUAL_ENV_PROMPT \
  --unset=CONDA_PREFIX --unset=CONDA_DEFAULT_ENV --unset=CONDA_EXE --unset=CONDA_PYTHON_EXE --unset=CONDA_SHLVL \
  --unset=CONDA_PROMPT_MODIFIER --unset=BASH_ENV singularity exec \
  --no-eval \
  --mount=type=bind,source=/home/me/project,destination=/home/me/project \
  --mount="type=bind,\"source=$PHALANX_RUN_DIR\",\"destination=$PHALANX_RUN_DIR\"" ${TMPDIR:+--mount="type=bind,\"source=$TMPDIR\",\"destination=$TMPDIR\""} "${own[@]}" \
  --cleanenv \
  --rocm \
  /home/me/project/a.sif sh -c '"'"'exec "$(command -v bash || command -v sh)" -c "$@"'"'"' sh '"'"'cd -- "${PHALANX_CWD:-.}" 2>/dev/null || :; unset PHALANX_CWD
set -e
trap '"'"'"'"'"'"'"'"'code=$?; echo "phalanx: container.pre ended with exit code $code on $(uname -n), so nothing is started there: correct the lines (what they printed stands above), or add || true to one that may fail" >&2; [ "$code" -ne 0 ] || code=1; exit "$code"'"'"'"'"'"'"'"'"' EXIT
phalanx_n=0
for phalanx_w do phalanx_n=$((phalanx_n + 1)); eval "phalanx_$phalanx_n=\$phalanx_w"; done
set --
. /opt/env.sh

set --; phalanx_w=0
while [ "$phalanx_w" -lt "$phalanx_n" ]; do
  phalanx_w=$((phalanx_w + 1)); eval "set -- \"\$@\" \"\$phalanx_$phalanx_w\""
done
trap - EXIT
export PYTHONPATH="/.phalanx/lib${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"'"'"' \
  bash python3 -m phalanx.worker train.py \
  --lr 1e-3 '"'"'it'"'"'"'"'"'"'"'"'s $5'"'"''
status=$?
[ "$status" -eq 0 ] || /py/bin/python -m phalanx.report_failure "$PHALANX_RUN_DIR" "$status" || status=$?

echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"
[ -z "$claim" ] || : >"$claim"
exit "$status"
