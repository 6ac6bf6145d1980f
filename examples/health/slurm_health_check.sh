#!/bin/sh
# Slurm's HealthCheckProgram: slurmd runs it as root every HealthCheckInterval seconds, and looks at nothing that it
# says. So it drains the node itself; Slurm puts no new job there, and jobs that run go on.
#
#   slurm.conf:  HealthCheckProgram=/etc/slurm/slurm_health_check.sh
#                HealthCheckInterval=300
#                HealthCheckNodeState=ANY,CYCLE
set -u
SAFERUNCTL=${SAFERUNCTL:-/opt/saferun/bin/saferunctl}
NODE=${SLURMD_NODENAME:-$(hostname -s)}

reason=$("$SAFERUNCTL" health --brief --timeout 20 --path /scratch)
# 0: healthy, or it could not be checked; 2: the command line is wrong. Neither is a fault of the node.
[ $? -eq 1 ] || exit 0

# A node that has been drained by hand keeps that reason.
case $(scontrol show node --oneliner "$NODE") in
*DRAIN*) ;;
*) scontrol update NodeName="$NODE" State=DRAIN Reason="saferun: $reason" ;;
esac
