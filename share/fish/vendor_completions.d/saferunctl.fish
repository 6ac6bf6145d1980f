# made by saferun.ctl.completion
complete -c saferunctl -n __fish_use_subcommand -a list -d 'the runs of this user, one line each: running, hung, succeeded, failed, stopped, left, lost, unknown'
complete -c saferunctl -n '__fish_seen_subcommand_from list' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from list' -l here
complete -c saferunctl -n '__fish_seen_subcommand_from list' -l running
complete -c saferunctl -n '__fish_seen_subcommand_from list' -l json
complete -c saferunctl -n __fish_use_subcommand -a logs -d 'the output of a run\'s ranks, in the order of time, also while it runs'
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l follow
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l lines
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l rank
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l host
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l attempt
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l stdout
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l stderr
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l grep
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l since
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l prefix
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l time
complete -c saferunctl -n '__fish_seen_subcommand_from logs' -l json
complete -c saferunctl -n __fish_use_subcommand -a diff -d 'how two runs differ: settings, versions, hosts, environment, outcome'
complete -c saferunctl -n '__fish_seen_subcommand_from diff' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from diff' -l json
complete -c saferunctl -n __fish_use_subcommand -a status -d 'what the ranks of a run do now: progress, output, memory, CPU, GPUs, and how long each waits for the others'
complete -c saferunctl -n '__fish_seen_subcommand_from status' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from status' -l watch
complete -c saferunctl -n '__fish_seen_subcommand_from status' -l json
complete -c saferunctl -n __fish_use_subcommand -a stop -d 'stop a running job on all its hosts, as SIGTERM to each saferun does'
complete -c saferunctl -n '__fish_seen_subcommand_from stop' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from stop' -l no-wait
complete -c saferunctl -n '__fish_seen_subcommand_from stop' -l json
complete -c saferunctl -n '__fish_seen_subcommand_from stop' -l after-checkpoint
complete -c saferunctl -n '__fish_seen_subcommand_from stop' -l signal
complete -c saferunctl -n '__fish_seen_subcommand_from stop' -l timeout
complete -c saferunctl -n __fish_use_subcommand -a kill -d 'kill a running job at once on all its hosts, by SIGKILL to its ranks'
complete -c saferunctl -n '__fish_seen_subcommand_from kill' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from kill' -l no-wait
complete -c saferunctl -n '__fish_seen_subcommand_from kill' -l json
complete -c saferunctl -n __fish_use_subcommand -a restart -d 'stop the ranks of a running job and start them again, on all its hosts'
complete -c saferunctl -n '__fish_seen_subcommand_from restart' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from restart' -l no-wait
complete -c saferunctl -n '__fish_seen_subcommand_from restart' -l json
complete -c saferunctl -n __fish_use_subcommand -a stacks -d 'where the processes of a run, or any process, are in their code'
complete -c saferunctl -n '__fish_seen_subcommand_from stacks' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from stacks' -l native
complete -c saferunctl -n '__fish_seen_subcommand_from stacks' -l json
complete -c saferunctl -n __fish_use_subcommand -a record -d 'where ranks spend their time over some seconds, as a flame graph and for speedscope'
complete -c saferunctl -n '__fish_seen_subcommand_from record' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from record' -l rank
complete -c saferunctl -n '__fish_seen_subcommand_from record' -l seconds
complete -c saferunctl -n '__fish_seen_subcommand_from record' -l rate
complete -c saferunctl -n '__fish_seen_subcommand_from record' -l idle
complete -c saferunctl -n '__fish_seen_subcommand_from record' -l output
complete -c saferunctl -n '__fish_seen_subcommand_from record' -l json
complete -c saferunctl -n __fish_use_subcommand -a attach -d 'connect this terminal to one rank of a running job, for a debugger or a prompt'
complete -c saferunctl -n '__fish_seen_subcommand_from attach' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from attach' -l rank
complete -c saferunctl -n '__fish_seen_subcommand_from attach' -l here
complete -c saferunctl -n __fish_use_subcommand -a debug -d 'attach pdb or gdb to a running rank; hang detection is paused'
complete -c saferunctl -n '__fish_seen_subcommand_from debug' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from debug' -l rank
complete -c saferunctl -n '__fish_seen_subcommand_from debug' -l with
complete -c saferunctl -n '__fish_seen_subcommand_from debug' -l here
complete -c saferunctl -n __fish_use_subcommand -a report -d 'the report of a run: text, JSON, an HTML page, or a trace for Perfetto or speedscope'
complete -c saferunctl -n '__fish_seen_subcommand_from report' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from report' -l text
complete -c saferunctl -n '__fish_seen_subcommand_from report' -l json
complete -c saferunctl -n '__fish_seen_subcommand_from report' -l html
complete -c saferunctl -n '__fish_seen_subcommand_from report' -l format
complete -c saferunctl -n '__fish_seen_subcommand_from report' -l output
complete -c saferunctl -n '__fish_seen_subcommand_from report' -l open
complete -c saferunctl -n __fish_use_subcommand -a story -d 'the last events of a run in which something went wrong, and what saferun did about them'
complete -c saferunctl -n '__fish_seen_subcommand_from story' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from story' -l json
complete -c saferunctl -n __fish_use_subcommand -a core -d 'the stacks in a core file'
complete -c saferunctl -n '__fish_seen_subcommand_from core' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from core' -l exe
complete -c saferunctl -n '__fish_seen_subcommand_from core' -l json
complete -c saferunctl -n '__fish_seen_subcommand_from core' -l gdb
complete -c saferunctl -n __fish_use_subcommand -a clean -d 'remove old run directories: beyond the newest N, or older than a time'
complete -c saferunctl -n '__fish_seen_subcommand_from clean' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from clean' -l keep
complete -c saferunctl -n '__fish_seen_subcommand_from clean' -l older-than
complete -c saferunctl -n '__fish_seen_subcommand_from clean' -l everywhere
complete -c saferunctl -n '__fish_seen_subcommand_from clean' -l dry-run
complete -c saferunctl -n '__fish_seen_subcommand_from clean' -l json
complete -c saferunctl -n __fish_use_subcommand -a shim -d 'make a directory with a torchrun that runs saferun, for tools that call torchrun'
complete -c saferunctl -n '__fish_seen_subcommand_from shim' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from shim' -l force
complete -c saferunctl -n __fish_use_subcommand -a completion -d 'print the shell completion script'
complete -c saferunctl -n '__fish_seen_subcommand_from completion' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from completion' -a bash
complete -c saferunctl -n '__fish_seen_subcommand_from completion' -a zsh
complete -c saferunctl -n '__fish_seen_subcommand_from completion' -a fish
complete -c saferunctl -n __fish_use_subcommand -a env -d 'env profiles and variables: list, show, explain, diff, lint'
complete -c saferunctl -n '__fish_seen_subcommand_from env' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from env' -l env-profile-path
complete -c saferunctl -n '__fish_seen_subcommand_from env' -l json
complete -c saferunctl -n '__fish_seen_subcommand_from env' -l vendor
complete -c saferunctl -n '__fish_seen_subcommand_from env' -a list
complete -c saferunctl -n '__fish_seen_subcommand_from env' -a show
complete -c saferunctl -n '__fish_seen_subcommand_from env' -a explain
complete -c saferunctl -n '__fish_seen_subcommand_from env' -a diff
complete -c saferunctl -n '__fish_seen_subcommand_from env' -a lint
complete -c saferunctl -n __fish_use_subcommand -a health -d 'whether this host is fit for a job, for Slurm\'s HealthCheckProgram, a prolog or a Kubernetes probe'
complete -c saferunctl -n '__fish_seen_subcommand_from health' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from health' -l full
complete -c saferunctl -n '__fish_seen_subcommand_from health' -l path
complete -c saferunctl -n '__fish_seen_subcommand_from health' -l gpus
complete -c saferunctl -n '__fish_seen_subcommand_from health' -l strict
complete -c saferunctl -n '__fish_seen_subcommand_from health' -l brief
complete -c saferunctl -n '__fish_seen_subcommand_from health' -l json
complete -c saferunctl -n '__fish_seen_subcommand_from health' -l record
complete -c saferunctl -n '__fish_seen_subcommand_from health' -l timeout
complete -c saferunctl -n __fish_use_subcommand -a doctor -d 'check this host, or the hosts of a job, as a launch does before it starts anything'
complete -c saferunctl -n '__fish_seen_subcommand_from doctor' -l help
complete -c saferunctl -n '__fish_seen_subcommand_from doctor' -l json
complete -c saferunctl -n '__fish_seen_subcommand_from doctor' -l collective
complete -c saferunctl -n '__fish_seen_subcommand_from doctor' -l backend
complete -c saferunctl -n '__fish_seen_subcommand_from doctor' -l trial-timeout
