#!/usr/bin/env bash
# vla_tiny: 20 ranks on 3 hosts of 8, 8, 4, under DeepSpeed's launcher or torchrun.
# Every rank runs rank.sh. Read from the environment, where set:
#   DSLAUNCH_RUN_DIR      the folder of the rendered files; default: the folder of this script
#   DSLAUNCH_WORK_DIR     the folder that the program runs in; default: the current one
#   DSLAUNCH_PYTHON       the interpreter; default: python3
#   DSLAUNCH_RUNNER       deepspeed or torchrun; default: deepspeed
#   DSLAUNCH_MASTER_PORT  port of the rendezvous; default: 29500
#   DSLAUNCH_HOSTFILE     hosts, for the DeepSpeed runner; default: hostfile in DSLAUNCH_RUN_DIR
#   DSLAUNCH_NODE_RANK    set on each host by who starts this script there: it then starts that host's ranks only
#   DSLAUNCH_MASTER_ADDR  the first host's address; needed with DSLAUNCH_NODE_RANK
#   DSLAUNCH_SLOTS        ranks of this host, for torchrun: 8, 8, 4 in the order of the hosts
# shellcheck disable=SC2016 # values are meant literally
set -euo pipefail

fail() {
  printf 'launch.sh: %s\n' "$1" >&2
  exit 2
}

if [[ ${1:-} == slurm ]]; then # one task of srun on each node, by job.sbatch
  export DSLAUNCH_NODE_RANK="$SLURM_PROCID" DSLAUNCH_MASTER_ADDR="$MASTER_ADDR" DSLAUNCH_MASTER_PORT="$MASTER_PORT"
  slots=(8 8 4)
  export DSLAUNCH_SLOTS="${slots[SLURM_PROCID]}"
fi
here="$(dirname -- "${BASH_SOURCE[0]}")"
DSLAUNCH_RUN_DIR="$(cd -- "${DSLAUNCH_RUN_DIR:-$here}" >/dev/null && pwd)"
export DSLAUNCH_RUN_DIR
export DSLAUNCH_WORK_DIR="${DSLAUNCH_WORK_DIR:-$PWD}"
python=python3
export DSLAUNCH_PYTHON="${DSLAUNCH_PYTHON:-$python}"
runner="${DSLAUNCH_RUNNER:-deepspeed}"
port="${DSLAUNCH_MASTER_PORT:-29500}"

# shellcheck source=/dev/null
source "$DSLAUNCH_RUN_DIR/env.sh"
cd -- "$DSLAUNCH_WORK_DIR"
command -v -- "$DSLAUNCH_PYTHON" >/dev/null ||
  fail "launcher.python: '$DSLAUNCH_PYTHON' is not found. Set launcher.python to the interpreter of the training environment, or DSLAUNCH_PYTHON"
rank=(bash "$DSLAUNCH_RUN_DIR/rank.sh")
deepspeed=("$DSLAUNCH_PYTHON" -m deepspeed.launcher.runner --no_local_rank --no_python)
torchrun=("$DSLAUNCH_PYTHON" -m torch.distributed.run --nnodes 3 --nproc-per-node "${DSLAUNCH_SLOTS:-}" --no-python)

case "$runner" in
  deepspeed)
    hostfile="$DSLAUNCH_RUN_DIR/hostfile"
    hostfile="${DSLAUNCH_HOSTFILE:-$hostfile}"
    if [[ ${1:-} == slurm ]]; then
      hostfile="$DSLAUNCH_RUN_DIR/hostfile.$SLURM_JOB_ID"
      node=0
      while read -r host; do printf '%s slots=%s\n' "$host" "${slots[node++]}"; done \
        <<<"$DSLAUNCH_NODES" >"$hostfile.$SLURM_PROCID"
      mv -- "$hostfile.$SLURM_PROCID" "$hostfile" # each node writes the same
    fi
    [[ -s $hostfile ]] ||
      fail "hostfile '$hostfile' is missing or empty. Set cluster.hosts, launcher.hostfile=FILE or DSLAUNCH_HOSTFILE; a line is: NAME slots=4"
    deepspeed+=(--hostfile "$hostfile" --master_port "$port") # the slots of each host stand in it
    [[ -z ${DSLAUNCH_MASTER_ADDR:-} ]] || deepspeed+=(--master_addr "$DSLAUNCH_MASTER_ADDR")
    if [[ -n ${DSLAUNCH_NODE_RANK:-} ]]; then
      exec "${deepspeed[@]}" --no_ssh --node_rank "$DSLAUNCH_NODE_RANK" "${rank[@]}"
    fi
    DSLAUNCH_PYTHON="$("$DSLAUNCH_PYTHON" -c 'import sys; print(sys.executable)')" # as the runner starts it there
    # The runner hands these to a remote shell, by way of pdsh, without quoting them.
    [[ "$DSLAUNCH_RUN_DIR$DSLAUNCH_WORK_DIR$DSLAUNCH_PYTHON" =~ ^[A-Za-z0-9_@+=:,./-]+$ ]] ||
      fail "the DeepSpeed runner cannot carry '$DSLAUNCH_RUN_DIR', '$DSLAUNCH_WORK_DIR' or '$DSLAUNCH_PYTHON' to other hosts. Use paths of letters, digits and _@+=:,./- only, or start this script on each host with DSLAUNCH_NODE_RANK"
    export DS_ENV_FILE="$DSLAUNCH_RUN_DIR/ds_env"
    exec "${deepspeed[@]}" --launcher pdsh --force_multi env DSLAUNCH_RUN_DIR="$DSLAUNCH_RUN_DIR" \
      DSLAUNCH_WORK_DIR="$DSLAUNCH_WORK_DIR" DSLAUNCH_PYTHON="$DSLAUNCH_PYTHON" \
      DSLAUNCH_ATTEMPT="${DSLAUNCH_ATTEMPT:-1}" "${rank[@]}"
    ;;
  torchrun)
    [[ -n ${DSLAUNCH_NODE_RANK:-} && -n ${DSLAUNCH_MASTER_ADDR:-} ]] ||
      fail "torchrun starts one node only. Run this script on each of the 5 nodes, with DSLAUNCH_NODE_RANK (counted from 0) and DSLAUNCH_MASTER_ADDR (the first node) set"
    exec "${torchrun[@]}" --node-rank "$DSLAUNCH_NODE_RANK" --master-addr "$DSLAUNCH_MASTER_ADDR" \
      --master-port "$port" "${rank[@]}"
    ;;
  *) fail "DSLAUNCH_RUNNER is '$runner'; allowed are deepspeed and torchrun" ;;
esac
