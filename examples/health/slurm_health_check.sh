#!/bin/sh
# Slurm's HealthCheckProgram: slurmd runs it as root when it starts and every HealthCheckInterval seconds, and does
# nothing about what it finds. So it drains the node itself; Slurm puts no new job there, and jobs that run go on.
#
#   slurm.conf:  HealthCheckProgram=/etc/slurm/slurm_health_check.sh
#                HealthCheckInterval=300
#                HealthCheckNodeState=ANY,CYCLE
#
# It always ends with 0: some releases of slurmd do not register a node before it does. What such a program prints is
# normally in no log, so what an administrator has to know goes to syslog: journalctl -t saferun
#
# Settings of the site. Run the script once by hand, as root on a node: it prints nothing if the node is healthy.
SAFERUNCTL=${SAFERUNCTL:-/opt/saferun/bin/saferunctl}
STORAGE=${STORAGE:-} # what is mounted on every node, such as "/scratch /home": a node without one of them is drained
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # slurmd sets none; scontrol has to be there
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
echo "$reason"

# A node that has been drained by hand keeps that reason.
case $(scontrol show node --oneliner "$NODE") in
*DRAIN*) ;;
*) scontrol update NodeName="$NODE" State=DRAIN Reason="saferun: $reason" || note "$NODE cannot be drained: $reason" ;;
esac
exit 0
