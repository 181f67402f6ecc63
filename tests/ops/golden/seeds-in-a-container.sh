#!/usr/bin/env bash
#SBATCH --job-name=torchrl-dist
#SBATCH --output=%x-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --array=0-4%2
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=3
#SBATCH --cpus-per-task=1

set -u
# This is a host name, because a node may know only a loopback address of itself. Rank 0 is in component 0.
nodes=$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
MASTER_ADDR=${nodes%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
export MASTER_ADDR MASTER_PORT PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# The buffer is in memory, because no buffer can be in a home folder on the network.
# The memory is freed at the end, because the next start may be on another node.
replay=$(mktemp -d "/dev/shm/torchrl_dist-$SLURM_JOB_ID-XXXXXX")
# shellcheck disable=SC2317
clean() {
  [ ! -d "$replay" ] || rmdir "$replay" 2>/dev/null || \
    apptainer exec image.sif python -m torchrl_dist clean --remove "$replay" >&2
}
# The learner writes its exit code here, because srun may return a collector's exit code.
TORCHRL_DIST_EXIT_FILE=$(mktemp)
export TORCHRL_DIST_EXIT_FILE
trap 'clean; rm -f "$TORCHRL_DIST_EXIT_FILE"' EXIT

srun --kill-on-bad-exit=0 --wait=0 --unbuffered --label --nodes=1 --ntasks=3 --ntasks-per-node=3 --cpus-per-task=1 \
  apptainer exec image.sif python -m torchrl_dist train apex --env CartPole-v1 --seed "$SLURM_ARRAY_TASK_ID" --replay-dir "$replay"
code=$?
if [ -s "$TORCHRL_DIST_EXIT_FILE" ]; then code=$(cat "$TORCHRL_DIST_EXIT_FILE"); fi
exit "$code"
