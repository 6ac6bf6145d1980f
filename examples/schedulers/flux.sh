#!/bin/bash
# Flux: 4 hosts with 8 GPUs each. flux batch flux.sh
# flux: --job-name=train
# flux: --nodes=4
# flux: --exclusive
# flux: --time-limit=24h
flux run --nodes=4 --tasks-per-node=1 saferun --nproc-per-node 8 train.py
