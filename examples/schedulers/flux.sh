#!/bin/bash
# Flux: 4 hosts with 8 GPUs each. flux batch flux.sh
# flux: --job-name=train
# flux: --nodes=4
# flux: --exclusive
# flux: --time-limit=24h
# flux cancel sends SIGTERM, and SIGKILL after kill-timeout (5 s unless the site has changed it). So --shutdown-timeout is
# shorter than that: there is a report about ranks that do not stop, too.
flux run --nodes=4 --tasks-per-node=1 saferun --nproc-per-node 8 --shutdown-timeout 4 train.py
