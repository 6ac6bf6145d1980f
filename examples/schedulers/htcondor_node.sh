#!/bin/bash
# What htcondor.sub runs on each node: the first one writes its address into the job, and the others read it there.
chirp="$(condor_config_val LIBEXEC)/condor_chirp"
if [ "$_CONDOR_PROCNO" = 0 ]; then
    MASTER_ADDR="$(hostname -f)"
    "$chirp" set_job_attr SaferunMaster "\"$MASTER_ADDR\""
else
    for _ in $(seq 60); do
        MASTER_ADDR="$("$chirp" get_job_attr SaferunMaster 2>/dev/null | tr -d '"')"
        [ "$MASTER_ADDR" ] && [ "$MASTER_ADDR" != UNDEFINED ] && break
        sleep 5
    done
fi
export MASTER_ADDR
exec saferun "$@"
