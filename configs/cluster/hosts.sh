#!/usr/bin/env bash
# Trains on hosts that ssh reaches, and restarts after failures until the run has finished:
#     configs/cluster/hosts.sh node0 "node1 node2" "node3 node4" --config clicks.toml
#     configs/cluster/hosts.sh node0 "node1 node2" "node3 node4" --script train.py -- ARGUMENT    # a custom loop
# The arguments are the host of the master, those of trainers and those of workers, with one role for each name.
# Further arguments are passed to hybrid master. SSH and HYBRID replace the commands ssh and hybrid.
# Ctrl-C saves the run and stops all roles.
set -uo pipefail
if (($# < 3)); then
    echo "usage: hosts.sh MASTER 'TRAINER ...' 'WORKER ...' [options of hybrid master]" >&2
    exit 2
fi
most_restarts=10
read -ra trainers <<<"$2"
read -ra workers <<<"$3"
master=$1 SSH=${SSH:-ssh} HYBRID=${HYBRID:-hybrid}
shift 3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkfifo "$folder/open"

# The command of each host: a role, which reads the secret from standard input. Standard input ends if this script
# or the connection ends; the role is then terminated. The command has no line break, because some login shells
# cannot read one as printf quotes it.
there='read -r HYBRID_SECRET; export HYBRID_SECRET; exec 3<&0; "$@" 3<&- & role=$!; '
there+='{ cat <&3 >/dev/null; kill -TERM $role; } 2>/dev/null & wait $role'

# Runs a command on a host.
at() {
    local host=$1
    shift
    $SSH "$host" "bash -c $(printf '%q ' "$there" role "$@")" \
        < <(exec 3>&- && echo "$secret" && exec cat <&4) 3>&- 4<&- &
    roles+=($!)
}

# A host that cannot be entered at the start is an error: its name or a key may be wrong.
for host in $(printf '%s\n' "$master" "${trainers[@]}" "${workers[@]}" | sort -u); do
    if ! $SSH "$host" true </dev/null; then
        echo "hosts.sh: $host cannot be entered (see above); see that '$SSH $host true' succeeds, and start again" >&2
        exit 1
    fi
done
stopped=0 code=143 failed=
trap 'stopped=1; exec 3>&-' INT TERM HUP
for ((restart = 0; restart <= most_restarts; restart++)); do
    $HYBRID secret "$folder/secret" >"$folder/said" || exit 1
    secret=$(<"$folder/secret")
    rm -f "$folder/secret" # kill -9 would leave it
    # The writing end stays open until this script stops or dies; children inherit the reading end.
    exec 3<>"$folder/open" 4<"$folder/open"
    ((stopped)) && break
    roles=() code=0
    # lookahead has the results of sync, and is faster: it waits for fewer round trips per step.
    at "$master" $HYBRID master --resume auto --set train.update=lookahead --set cluster.master="$master" \
        --set cluster.trainers=${#trainers[@]} --set cluster.workers=${#workers[@]} "$@"
    for ((i = 0; i < ${#trainers[@]}; i++)); do
        at "${trainers[i]}" $HYBRID trainer --index $i --master "$master"
    done
    for ((i = 0; i < ${#workers[@]}; i++)); do
        at "${workers[i]}" $HYBRID worker --index $i --master "$master"
    done
    for role in "${roles[@]}"; do
        wait "$role"
        ended=$?
        while kill -0 "$role" 2>/dev/null; do # a signal ended the wait but not the role
            wait "$role"
            ended=$?
        done
        if ((ended > code)); then code=$ended; fi
        # A restart would fail in the same way, and the other roles may wait for this one: terminate them.
        if ((ended == 1 || ended == 2)); then failed=${failed:-$ended} && exec 3>&-; fi
    done
    exec 3>&-
    code=${failed:-$code}
    # 75: a restart may help; 137: a role was killed; 255: a connection broke. docs/failures.md lists the codes.
    case $code in
        75 | 137 | 255) ((stopped || restart == most_restarts)) && break ;;
        *) break ;;
    esac
    # A machine takes a while to restart: wait 5 s, and twice as long each time, up to 80 s.
    if ((code == 255)); then pause=$((5 << (restart < 4 ? restart : 4))); else pause=0; fi
    echo "hosts.sh: ended with $code; restarting$( ((pause)) && echo " in $pause s")" >&2
    sleep $pause &
    wait $!
    kill $! 2>/dev/null
    ((stopped)) && break
done
exit "$code"
