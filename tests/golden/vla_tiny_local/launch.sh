#!/usr/bin/env bash
# vla_tiny: 2 ranks on 1 node(s) of 2, under DeepSpeed's launcher or torchrun.
# Every rank runs rank.sh. Read from the environment, where set:
#   DSLAUNCH_RUN_DIR      the folder of the rendered files; default: the folder of this script
#   DSLAUNCH_WORK_DIR     the folder that the program runs in; default: the current one
#   DSLAUNCH_PYTHON       the interpreter; default: python3
#   DSLAUNCH_RUNNER       deepspeed or torchrun; default: deepspeed
#   DSLAUNCH_MASTER_PORT  port of the rendezvous; default: a free one
# shellcheck disable=SC2016 # values are meant literally
set -euo pipefail

fail() {
  printf 'launch.sh: %s\n' "$1" >&2
  exit 2
}

if [[ ${1:-} == slurm ]]; then # one task of srun on each node, by job.sbatch
  export DSLAUNCH_NODE_RANK="$SLURM_PROCID" DSLAUNCH_MASTER_ADDR="$MASTER_ADDR" DSLAUNCH_MASTER_PORT="$MASTER_PORT"
fi
here="$(dirname -- "${BASH_SOURCE[0]}")"
DSLAUNCH_RUN_DIR="$(cd -- "${DSLAUNCH_RUN_DIR:-$here}" >/dev/null && pwd)"
export DSLAUNCH_RUN_DIR
export DSLAUNCH_WORK_DIR="${DSLAUNCH_WORK_DIR:-$PWD}"
python=python3
export DSLAUNCH_PYTHON="${DSLAUNCH_PYTHON:-$python}"
runner="${DSLAUNCH_RUNNER:-deepspeed}"
port="${DSLAUNCH_MASTER_PORT:-}"

# shellcheck source=/dev/null
source "$DSLAUNCH_RUN_DIR/env.sh"
cd -- "$DSLAUNCH_WORK_DIR"
command -v -- "$DSLAUNCH_PYTHON" >/dev/null ||
  fail "launcher.python: '$DSLAUNCH_PYTHON' is not found. Set launcher.python to the interpreter of the training environment, or DSLAUNCH_PYTHON"
rank=(bash "$DSLAUNCH_RUN_DIR/rank.sh")
deepspeed=("$DSLAUNCH_PYTHON" -m deepspeed.launcher.runner --no_local_rank --no_python)
torchrun=("$DSLAUNCH_PYTHON" -m torch.distributed.run --nnodes 1 --nproc-per-node 2 --no-python)
if [[ -z $port ]]; then
  port="$("$DSLAUNCH_PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
fi

case "$runner" in
  deepspeed)
    # Without a hostfile named, the runner would read /job/hostfile.
    deepspeed+=(--hostfile /dev/null --master_port "$port")
    exec "${deepspeed[@]}" --num_gpus 2 "${rank[@]}"
    ;;
  torchrun)
    exec "${torchrun[@]}" --master-addr 127.0.0.1 --master-port "$port" "${rank[@]}"
    ;;
  *) fail "DSLAUNCH_RUNNER is '$runner'; allowed are deepspeed and torchrun" ;;
esac
