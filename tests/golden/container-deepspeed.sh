#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
#SBATCH --partition=gpu
#SBATCH --account=proj
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/project
# deepspeed, ddp, ranks 2 x 4 (phalanx 0.1.0)

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

# Environment
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=8
export PHALANX_CPUS_PER_RANK=8
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
PHALANX_RDZV_HOST="${SLURMD_NODENAME:-$(hostname)}"
PHALANX_RDZV_PORT="${MASTER_PORT:-$(/py/bin/python -m phalanx.ports "$SLURM_JOB_ID")}"
export PHALANX_RDZV_HOST PHALANX_RDZV_PORT

# Launch
# shellcheck disable=SC2046  # one word a variable
scontrol show hostnames | sed 's/$/ slots=4/' >"$PHALANX_RUN_DIR/hostfile"
srun \
  --nodes=2 \
  --ntasks=2 \
  --ntasks-per-node=1 \
  --cpus-per-task=32 \
  --kill-on-bad-exit=1 \
  --cpu-bind=none \
  bash -c 'if [ -n "${TMPDIR:-}" ]; then mkdir -p "$TMPDIR"; fi
export APPTAINERENV_PHALANX_CWD="$(pwd -P)"
for name in $(compgen -e | grep -E '"'"'^((RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|TMPDIR|PYTHONUNBUFFERED|http_proxy|https_proxy|no_proxy|HTTP_PROXY|HTTPS_PROXY|NO_PROXY|TERM|USER)$|SLURM_|PMI|OMPI_|MPI_|MV2_|HYDRA_|PALS_|FLUX_|PHALANX_|TORCHELASTIC_|MASTER_|CUDA_|NVIDIA_|ROCR_|HIP_|NCCL_|RCCL_|GLOO_|UCX_|FI_|OMP_|MKL_|OPENBLAS_|TRITON_|TORCH|MIOPEN_|WANDB_|MLFLOW_|HF_|HUGGING_FACE_|ACCELERATE_|DS_|HOROVOD_|RAY_)'"'"'); do export "APPTAINERENV_$name=${!name}"; done
export APPTAINERENV_PYTHONNOUSERSITE="${APPTAINERENV_PYTHONNOUSERSITE-1}"
own=()
if [ -d /host/phalanx ]; then own+=(--mount=type=bind,source=/host/phalanx,destination=/.phalanx/lib/phalanx,ro); fi
if [ -d /home/me/project/a.sif.phalanx ]; then own+=(--mount=type=bind,source=/home/me/project/a.sif.phalanx,destination=/.phalanx/packages,ro); fi
exec env \
  --unset=PYTHONPATH --unset=PYTHONHOME --unset=PYTHONUSERBASE --unset=PYTHONSTARTUP --unset=PYTHONEXECUTABLE \
  --unset=PYTHONPLATLIBDIR --unset=PYTHONPYCACHEPREFIX --unset=VIRTUAL_ENV --unset=VIRTUAL_ENV_PROMPT \
  --unset=CONDA_PREFIX --unset=CONDA_DEFAULT_ENV --unset=CONDA_EXE --unset=CONDA_PYTHON_EXE --unset=CONDA_SHLVL \
  --unset=CONDA_PROMPT_MODIFIER --unset=BASH_ENV apptainer exec \
  --no-eval \
  --mount=type=bind,source=/home/me/project,destination=/home/me/project \
  --mount="type=bind,\"source=$PHALANX_RUN_DIR\",\"destination=$PHALANX_RUN_DIR\"" "${own[@]}" \
  $([ -e /proc/driver/nvidia ] && echo --nv || { [ -e /dev/kfd ] && echo --rocm; }) \
  /home/me/project/a.sif sh -c '"'"'cd -- "${PHALANX_CWD:-.}" 2>/dev/null || :; unset PHALANX_CWD
export PYTHONPATH="/.phalanx/lib${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"'"'"' sh env PHALANX_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-}" python3 -m deepspeed.launcher.runner \
  --hostfile "$PHALANX_RUN_DIR/hostfile" \
  --no_ssh \
  --node_rank "$SLURM_NODEID" \
  --num_nodes 2 \
  --master_addr "$PHALANX_RDZV_HOST" \
  --master_port "$PHALANX_RDZV_PORT" \
  --num_gpus 4 \
  --module phalanx.worker = =train.py =--lr =1e-3 '"'"'=it'"'"'"'"'"'"'"'"'s $5'"'"''
status=$?
[ "$status" -eq 0 ] || /py/bin/python -m phalanx.report_failure "$PHALANX_RUN_DIR" "$status" || status=$?

echo "$status" >"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"
[ -z "$claim" ] || : >"$claim"
exit "$status"
