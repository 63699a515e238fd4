#!/bin/bash
#SBATCH --job-name=gpu-env
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=1:00:00
#SBATCH --partition=gpu
#SBATCH --account=proj
#SBATCH --output=logs/gpu-env-%j.out
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/project
# /home/me/project/envs/gpu, torch for the cpu (phalanx 0.1.0)

set -o pipefail

# How it went, for phalanx status
run_dir=${1:-}
[ -z "$run_dir" ] || date +%s >>"$run_dir/jobs/$SLURM_JOB_ID.start"
note() { [ -z "$run_dir" ] || echo "$1" >"$run_dir/jobs/$SLURM_JOB_ID.exit"; }
trap 'note "$?"' EXIT

# Modules
for init in "${MODULESHOME:-}/init/bash" "${LMOD_PKG:-}/init/bash" \
  /etc/profile.d/{modules,lmod,z00_lmod,z00-lmod}.sh /usr/share/{lmod/lmod,modules}/init/bash; do
  # shellcheck source=/dev/null
  command -v module >/dev/null || [ ! -r "$init" ] || . "$init"
done
load_modules() {
  module purge
  module load Stages/2024 CUDA/12.1 OpenMPI/4.1
}
if command -v module >/dev/null; then load_modules; load_modules() { :; }; fi

# Before
ulimit -c 0

# Modules, where only the lines before define the command
command -v module >/dev/null || {
  echo "error: modules are set, and nothing defines the command module here: set shebang to /bin/bash -l, or put the line that defines it into before (source .../init/bash)" >&2
  exit 2
}
load_modules

# Proxies
export http_proxy=http://proxy:3128
export HTTP_PROXY=http://proxy:3128

# Environment
export PYTHONUNBUFFERED=1
export DATA='/data/a b'
export HOROVOD_NCCL_HOME=/opt/nccl
export NCCL_DEBUG=INFO
export OMP_NUM_THREADS=32
export PIP_USER=0
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONHOME PIP_TARGET PIP_PREFIX

# Temporary files, on each node
export TMPDIR=/scratch
export TRITON_CACHE_DIR="$TMPDIR/triton"
export TORCHINDUCTOR_CACHE_DIR="$TMPDIR/inductor"
mkdir -p "$TMPDIR"

# Python
python=
for try in python3 python3.11; do
  if "$try" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then python=$try; break; fi
done
if [ -z "$python" ]; then echo 'error: no Python 3.11, which the wheels in /home/me/project/wheels are for, with its module venv: load a module that has one (modules.load), or set python=PATH' >&2; exit 2; fi

# The folder: an existing one is left alone, one that a failure leaves is removed
venv=/home/me/project/envs/gpu
if ! mkdir -p /home/me/project/envs || ! mkdir "$venv"; then
  echo "error: $venv is there already or can't be made: remove it, or give another PATH" >&2
  exit 2
fi
: >"$venv/phalanx-env.unfinished"
trap 'note "$?"; [ ! -e "$venv/phalanx-env.unfinished" ] || rm -rf "$venv"' EXIT

# Build
set -ex
"$python" -m venv "$venv"
export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
python -m pip install --no-cache-dir --upgrade pip --no-index --find-links /home/me/project/wheels
python -m pip install --no-cache-dir 'torch>=2.7' --no-index --find-links /home/me/project/wheels
python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$venv/phalanx-torch.txt"
python -m pip install --no-cache-dir 'phalanx[torch]' --constraint /home/me/project/envs/gpu/phalanx-torch.txt --no-index --find-links /home/me/project/wheels
python -m phalanx.bootstrap --finish --cpu /home/me/project/envs/gpu --wheelhouse /home/me/project/wheels --loaded Stages/2024:CUDA/12.1:OpenMPI/4.1
