#!/usr/bin/env bash
# llama3_70b: what every rank runs, started by launch.sh (which has set RANK and the like) or by srun (`rank.sh slurm`).
# How it ended is kept in ranks/RANK.exit: launchers do not always hand a status on.
# shellcheck disable=SC2016 # values are meant literally
set -euo pipefail

fail() {
  printf 'rank.sh: %s\n' "$1" >&2
  exit 2
}

if [[ ${1:-} == slurm ]]; then
  # Left over from an MPI job in the submitting shell, these would be taken for this rank's place.
  # shellcheck disable=SC2086
  unset ${!OMPI_@} ${!PMI_@} ${!PMIX_@} ${!MV2_@}
  export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" NODE_RANK="$SLURM_NODEID" WORLD_SIZE="$SLURM_NTASKS"
  export LOCAL_WORLD_SIZE=8 LOCAL_SIZE=8
fi
[[ ${WORLD_SIZE:-unset} == 64 && -n ${RANK:-} ]] ||
  fail "WORLD_SIZE is ${WORLD_SIZE:-unset}, the plan has 64 ranks on 8 node(s) of 8. Start it with launch.sh or job.sbatch, on that many"

here="$(dirname -- "${BASH_SOURCE[0]}")"
DSLAUNCH_RUN_DIR="$(cd -- "${DSLAUNCH_RUN_DIR:-$here}" >/dev/null && pwd)"
export DSLAUNCH_RUN_DIR
export DSLAUNCH_WORK_DIR="${DSLAUNCH_WORK_DIR:-$PWD}"
python=python3
export DSLAUNCH_PYTHON="${DSLAUNCH_PYTHON:-$python}"
export DSLAUNCH_PLAN="$DSLAUNCH_RUN_DIR/plan.json"
export DSLAUNCH_DS_CONFIG="$DSLAUNCH_RUN_DIR/ds_config.json"
megatron_path=/opt/Megatron-DeepSpeed
export DSLAUNCH_MEGATRON_PATH="${DSLAUNCH_MEGATRON_PATH:-$megatron_path}"
# shellcheck source=/dev/null
source "$DSLAUNCH_RUN_DIR/env.sh"
cd -- "$DSLAUNCH_WORK_DIR"
[[ -d $DSLAUNCH_MEGATRON_PATH ]] ||
  fail "engine.path: '$DSLAUNCH_MEGATRON_PATH' is no folder on $HOSTNAME. Set engine.path, or DSLAUNCH_MEGATRON_PATH, to a checkout of Megatron-LM"
# A script that stands elsewhere imports from the checkout.
export PYTHONPATH="$DSLAUNCH_MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}"
declare -a arguments
eval "arguments=($(<"$DSLAUNCH_RUN_DIR/megatron_args.txt"))"

mkdir -p "$DSLAUNCH_RUN_DIR/ranks"
record="$DSLAUNCH_RUN_DIR/ranks/$RANK.exit"
echo running >"$record"
trap : INT TERM # the program gets them too, and decides; its status is what counts
status=0
"$DSLAUNCH_PYTHON" -u "$DSLAUNCH_MEGATRON_PATH"/pretrain_gpt.py "${arguments[@]}" || status=$?
echo "$status" >"$record"
exit "$status"
