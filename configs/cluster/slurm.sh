#!/usr/bin/env bash
# Trains on a Slurm cluster, and restarts after failures until the run has finished:
#     sbatch configs/cluster/slurm.sh --config clicks.toml
#     sbatch configs/cluster/slurm.sh --script train.py -- ARGUMENT    # a custom loop, see docs/custom_loop.md
# Arguments are passed to hybrid master. The job has one component for each kind of role; change their resources.
# Each component has its own nodes. docs/clusters.md has details.
#SBATCH --job-name=hybrid --time=24:00:00 --requeue --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --ntasks=1 --cpus-per-task=2 --mem=8G
#SBATCH hetjob
#SBATCH --ntasks=2 --cpus-per-task=4 --mem=16G
#SBATCH hetjob
#SBATCH --ntasks=2 --cpus-per-task=4 --mem=64G
set -uo pipefail
most_restarts=10

# Each start has a new secret, which srun passes to the roles in their environment.
folder=$(mktemp -d)
hybrid secret "$folder/secret" >"$folder/said"
HYBRID_SECRET=$(<"$folder/secret")
export HYBRID_SECRET
rm -r "$folder"

# The address of the master: the one by which Slurm reaches this node.
master=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')

# After a failure, all roles end by themselves. If srun killed them, their exit codes would be lost.
# lookahead has the results of sync, and is faster: it waits for fewer round trips per step.
srun --het-group=0,1,2 --kill-on-bad-exit=0 --wait=60 hybrid role --master "$master" --resume auto \
    --trainers "$SLURM_NTASKS_HET_GROUP_1" --workers "$SLURM_NTASKS_HET_GROUP_2" \
    --set train.update=lookahead "$@" &
step=$!
# Two minutes before the time limit, Slurm signals this script, and srun signals every role: the run is saved.
trap 'kill -USR1 $step' USR1
wait $step
code=$?
while kill -0 $step 2>/dev/null; do # a signal ended the wait but not the step
    wait $step
    code=$?
done

# 75: a restart may help; above 128: a signal killed or stopped a role. docs/failures.md lists the codes.
if ((code >= 75 && ${SLURM_RESTART_COUNT:-0} < most_restarts)); then
    echo "slurm.sh: ended with $code after ${SLURM_RESTART_COUNT:-0} restart(s); restarting"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # the requeue ends this script
fi
exit "$code"
