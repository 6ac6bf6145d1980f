#!/bin/bash
# MPI's launchers: 4 hosts with 8 GPUs each, which ssh reaches. ./mpirun.sh [open_mpi|mpich|intel_mpi|mvapich2] node1 node2 node3 node4
launcher=$1
shift
hosts=$(IFS=,; echo "$*")
command=(saferun --nproc-per-node 8 train.py)
case $launcher in
    open_mpi)  # it hands on the environment only by -x
        exec mpirun --host "${hosts//,/:1,}:1" -np $# --map-by ppr:1:node --bind-to none -x PATH "${command[@]}" ;;
    mpich)
        exec mpiexec -hosts "$hosts" -ppn 1 -n $# "${command[@]}" ;;
    intel_mpi)
        exec mpiexec.hydra -launcher ssh -hosts "$hosts" -ppn 1 -n $# "${command[@]}" ;;
    mvapich2)
        exec mpirun_rsh -np $# "$@" "${command[@]}" ;;
    *)
        echo "$0: no such launcher: $launcher" >&2
        exit 2 ;;
esac
