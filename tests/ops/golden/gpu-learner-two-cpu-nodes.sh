#!/usr/bin/env bash
#SBATCH --job-name=torchrl-dist
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --account=lab
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --partition=gpu
#SBATCH hetjob
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --account=lab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --partition=cpu
#SBATCH --mem=0

# shellcheck disable=SC1090,SC1091
source .venv/bin/activate
set -u
# This is a host name, because a node may know only a loopback address of itself. Rank 0 is in component 0.
nodes=$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
MASTER_ADDR=${nodes%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
export MASTER_ADDR MASTER_PORT PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TP_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

srun --kill-on-bad-exit=0 --wait=0 --unbuffered --label \
  --het-group=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=8 \
  env OMP_NUM_THREADS=8 python train.py --note 'it'"'"'s quoted' : \
  --het-group=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=32 \
  python train.py --note 'it'"'"'s quoted'
code=$?

# 138 and 143: stopped by USR1 and TERM, after writing the checkpoint. A job that scancel ended is not queued again.
if [ "$code" = 138 ] || [ "$code" = 143 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ]; then
    echo "stopped, but was already requeued 3 times" >&2
  elif scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
  fi
fi
exit "$code"
