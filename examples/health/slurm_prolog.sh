#!/bin/sh
# A prolog: slurmd runs it as root on each node of a job before the first step. Where it does not exit with 0, Slurm
# drains the node and puts the job back into the queue (held, unless SchedulerParameters has nohold_on_prolog_fail). So
# nothing but a fault of the node may end it with 1.
#
#   slurm.conf:  Prolog=/etc/slurm/slurm_prolog.sh
#                PrologFlags=Alloc
#
# Slurm gives "Prolog error" as the reason, and keeps nothing that a prolog prints: the reason of saferunctl goes to
# syslog, and so does a line if the node could not be checked: journalctl -t saferun
#
# Settings of the site. Run the script once by hand, as root on a node: it prints nothing if the node is healthy.
SAFERUNCTL=${SAFERUNCTL:-/opt/saferun/bin/saferunctl}
STORAGE=${STORAGE:-} # what is mounted on every node, such as "/scratch /home": a node without one of them is drained
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # slurmd sets none
export PATH
set -u
NODE=${SLURMD_NODENAME:-$(hostname -s)}

note() {
    echo "$0: $1" >&2
    logger -t saferun -p daemon.warning -- "$1"
}

set -- health --brief --timeout 20
for path in $STORAGE; do
    set -- "$@" --path "$path"
done
reason=$("$SAFERUNCTL" "$@")
code=$?
# 0: healthy, or it could not be checked.
[ $code -ne 0 ] || exit 0
# 127: there is no such program; 2: the command line is wrong; 1 without a reason: its Python is broken. None of these is
# a fault of the node.
if [ $code -ne 1 ] || [ -z "$reason" ]; then
    note "$NODE is not checked: $SAFERUNCTL health ended with exit code $code"
    exit 0
fi
note "$NODE is not fit for a job: $reason"
exit 1
