#!/usr/bin/env bash
# Trains on a cluster of Slurm's, and goes on by itself until the run is over:
#     sbatch configs/cluster/slurm.sh --config clicks.toml
# What follows the script is for hybrid master. One job of three components, one for each kind of role: change
# what they ask for. Each component gets machines of its own; docs/clusters.md says more.
#SBATCH --job-name=hybrid --time=24:00:00 --requeue --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --ntasks=1 --cpus-per-task=2 --mem=8G
#SBATCH hetjob
#SBATCH --ntasks=2 --cpus-per-task=4 --mem=16G
#SBATCH hetjob
#SBATCH --ntasks=2 --cpus-per-task=4 --mem=64G
set -uo pipefail
most_restarts=10

# A secret for this start alone: srun hands it to the roles, and nobody else has it.
folder=$(mktemp -d)
hybrid secret "$folder/secret" >"$folder/said"
HYBRID_SECRET=$(<"$folder/secret")
export HYBRID_SECRET
rm -r "$folder"

# Where the master will be: the address by which Slurm itself reaches that machine.
master=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')

# All roles end by themselves, and alike; were they killed by srun at the first, their exit codes would be lost.
srun --het-group=0,1,2 --kill-on-bad-exit=0 --wait=60 hybrid role --master "$master" --resume auto \
    --trainers "$SLURM_NTASKS_HET_GROUP_1" --workers "$SLURM_NTASKS_HET_GROUP_2" "$@" &
step=$!
# Two minutes before its time is over Slurm warns this script, which has srun warn every role: the run is saved.
trap 'kill -USR1 $step' USR1
wait $step
code=$?
while kill -0 $step 2>/dev/null; do # a signal has ended the wait, and not the step
    wait $step
    code=$?
done

# 75: another start may help; 128 and more: a role was killed. docs/failures.md has the codes.
if ((code >= 75 && ${SLURM_RESTART_COUNT:-0} < most_restarts)); then
    echo "slurm.sh: ended with $code after ${SLURM_RESTART_COUNT:-0} restart(s); starting again"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # this script is ended by that
fi
exit "$code"
