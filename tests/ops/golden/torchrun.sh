#!/usr/bin/env bash
#SBATCH --job-name=torchrl-dist
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --gpus-per-node=4

set -u
# This is a host name, because a node may know only a loopback address of itself. Rank 0 is in component 0.
nodes=$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}")
MASTER_ADDR=${nodes%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
export MASTER_ADDR MASTER_PORT PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

stopped=0
trap 'stopped=1 interrupted=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
# shellcheck disable=SC2016
srun --kill-on-bad-exit=0 --wait=0 --unbuffered --label --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 \
  bash -c 'exec torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID" --rdzv-conf="is_host=$((SLURM_NODEID == 0))" --local-addr="$SLURMD_NODENAME" --max-restarts=3 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=90 "$@"' torchrun train.py &
step=$!
interrupted=1
while [ "$interrupted" = 1 ]; do # the trap interrupts wait
  interrupted=0
  wait "$step"
  code=$?
done
if [ "$stopped" = 1 ] && [ "$code" != 0 ]; then code=138; fi

# 138 and 143: stopped by USR1 and TERM, after writing the checkpoint. A job that scancel ended is not queued again.
if [ "$code" = 138 ] || [ "$code" = 143 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ]; then
    echo "stopped, but was already requeued 3 times" >&2
  elif scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
  fi
fi
exit "$code"
