"""Options of launchers that take no value: what tells a launcher's options from the program behind them."""

from __future__ import annotations

_BY_LAUNCHER = {
    # deepspeed/launcher/runner.py parse_args 0.19.8; --elastic_training up to 0.19.6
    "deepspeed": """
        -h --help --module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid
        --bind_cores_to_rank -q --quiet --elastic_training""",
    # torch/distributed/run.py get_args_parser 2.13; --use_env of torch/distributed/launch.py
    "torchrun": """
        -h --help --standalone -m --module --no-python --no_python --run-path --run_path --virtual-local-rank
        --virtual_local_rank --use_env --use-env""",
    # accelerate/commands/launch.py launch_command_parser 0.30 to 1.15
    "accelerate": """
        -h --help -q --quiet --cpu --multi_gpu --multi-gpu --tpu --enable_cpu_affinity --enable-cpu-affinity
        --dynamo_use_fullgraph --dynamo-use-fullgraph --dynamo_use_dynamic --dynamo-use-dynamic
        --dynamo_use_regional_compilation --dynamo-use-regional-compilation --use_deepspeed --use-deepspeed
        --use_fsdp --use-fsdp --use_parallelism_config --use-parallelism-config --use_megatron_lm
        --use-megatron-lm --same_network --same-network -m --module --no_python --no-python --tpu_cluster
        --tpu-cluster --no_tpu_cluster --no-tpu-cluster --tpu_use_sudo --tpu-use-sudo --downcast_bf16
        --downcast-bf16 --fp8_use_autocast_during_eval --fp8-use-autocast-during-eval --debug --use_xpu
        --use-xpu --use_tp --use-tp --ipex""",
    # the manual page of srun, SLURM 22.05 to 25.05; a value of --exclusive and the like comes behind `=`
    "srun": """
        -h --help -H --hold -k --no-kill -K --kill-on-bad-exit -l --label -O --overcommit -q -Q --quiet -s
        --oversubscribe -u --unbuffered -v --verbose -V --version -X --disable-status -Z --no-allocate
        --contiguous --exact --exclusive --immediate -I --interactive --multi-prog --overlap --preserve-env -E
        --pty --quit-on-interrupt --reboot --resv-ports --spread-job --use-min-nodes --usage --whole
        --test-only --nice --propagate --send-libs --get-user-env --async --external-launcher
        --container-mount-home --no-container-mount-home --container-remap-root --no-container-remap-root
        --container-entrypoint --no-container-entrypoint --container-writable --container-readonly""",
    # the manual page of mpirun, Open MPI 4 and 5
    "mpirun": """
        -h --help -v --verbose -q --quiet --allow-run-as-root --oversubscribe -oversubscribe --nooversubscribe
        --tag-output --bind-to-core --display-map -display-map --report-bindings -report-bindings --bynode
        --byslot --nolocal --timestamp-output""",
    # `-m` is none for the interpreter; here the module's name stands where a script's would
    "python": "-u -O -OO -B -E -s -S -I -v -q -b -d -i -P -m",
}
_SBATCH = """
    --consolidate-segments --contiguous --exclusive --external --get-user-env --help --hold -H --ignore-pbs
    --kill-on-invalid-dep --nice --no-kill -k --no-requeue --overcommit -O --oversubscribe -s --parsable
    --propagate --quiet -Q --reboot --requeue --resv-ports --spread-job --spread-segments --stepmgr --test-only
    --usage --use-min-nodes --verbose -v --version -V --wait -W --wait-all-nodes --x11 -h"""
SBATCH = frozenset(_SBATCH.split())
"""Options of sbatch without a value, or whose value comes behind `=` (its manual page, SLURM 22.05 to 25.05)."""
SWITCHES = {launcher: frozenset(options.split()) for launcher, options in _BY_LAUNCHER.items()}

_WRAP = """
    apptainer bash clush command conda docker env eval exec micromamba ncu nice nohup nsys numactl pdsh pixi podman
    poetry pssh rocprof setsid sh singularity ssh stdbuf sudo taskset time timeout uv"""
REMOTE = frozenset({"clush", "pdsh", "pssh", "ssh"})
"""Commands whose last word a shell on other hosts reads."""
WRAPPERS = frozenset(_WRAP.split())
"""Commands that run the command behind them."""
CONTAINERS = frozenset({"docker", "podman"})
RUNS = frozenset({"exec", "run"})
"""What they are told where a command of a container follows."""
