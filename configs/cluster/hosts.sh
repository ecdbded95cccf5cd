#!/usr/bin/env bash
# Trains on hosts that can be reached by ssh, and goes on by itself until the run is over:
#     configs/cluster/hosts.sh node0 "node1 node2" "node3 node4" --config clicks.toml
# are the master's host, those of trainers and those of workers, a role each (a host may come twice); what follows
# is for hybrid master. SSH and HYBRID name other commands than ssh and hybrid. Ctrl-C saves the run and ends all.
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

# What a host runs: a role, with the secret from its input; where that ends, so has this script, or the connection.
# Without a line break, which printf would quote as only some login shells read it.
there='read -r HYBRID_SECRET; export HYBRID_SECRET; exec 3<&0; "$@" 3<&- & role=$!; '
there+='{ cat <&3 >/dev/null; kill -TERM $role; } 2>/dev/null & wait $role'

# Runs a command on a host.
at() {
    local host=$1
    shift
    $SSH "$host" "bash -c $(printf '%q ' "$there" role "$@")" \
        < <(exec 3>&- && echo "$secret" && exec cat "$folder/open") 3>&- &
    roles+=($!)
}

# Who cannot be entered at the start is not waited for: a name or a key may be wrong.
for host in $(printf '%s\n' "$master" "${trainers[@]}" "${workers[@]}" | sort -u); do
    if ! $SSH "$host" true </dev/null; then
        echo "hosts.sh: $host cannot be entered (see above); see that '$SSH $host true' succeeds, and start again" >&2
        exit 1
    fi
done
stopped=0 code=143
trap 'stopped=1; exec 3>&-' INT TERM HUP
for ((restart = 0; restart <= most_restarts; restart++)); do
    $HYBRID secret "$folder/secret" >"$folder/said" || exit 1
    secret=$(<"$folder/secret")
    rm -f "$folder/secret" # kill -9 would leave it
    exec 3<>"$folder/open" # open for as long as this script is there
    ((stopped)) && break
    roles=() code=0
    at "$master" $HYBRID master --resume auto --set cluster.master="$master" \
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
        while kill -0 "$role" 2>/dev/null; do # a signal has ended the wait, and not the role
            wait "$role"
            ended=$?
        done
        if ((ended > code)); then code=$ended; fi
    done
    exec 3>&-
    # 75: another start may help; 137: a role was killed; 255: so was a connection. docs/failures.md has the codes.
    case $code in
        75 | 137 | 255) ((stopped || restart == most_restarts)) && break ;;
        *) break ;;
    esac
    # A machine needs a while to come back: 5 s, and twice as long each time, up to 80.
    if ((code == 255)); then pause=$((5 << (restart < 4 ? restart : 4))); else pause=0; fi
    echo "hosts.sh: ended with $code; starting again$( ((pause)) && echo " in $pause s")" >&2
    sleep $pause &
    wait $!
    kill $! 2>/dev/null
    ((stopped)) && break
done
exit "$code"
