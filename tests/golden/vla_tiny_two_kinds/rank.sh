#!/usr/bin/env bash
# vla_tiny: what every rank runs, started by launch.sh or an agent (which have set RANK and the like), by
# srun (`rank.sh slurm`) or by mpirun (`rank.sh openmpi`).
# Its process is kept in ranks/RANK.pid, and how it ended in ranks/RANK.exit: launchers do not always hand a status on.
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
  export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
  # Not SLURM_NODEID, which goes by SLURM's order of the nodes and not by that of the tasks.
  sizes=(8 8 4) NODE_RANK=0
  for ((first = sizes[0]; first <= RANK; first += sizes[NODE_RANK])); do NODE_RANK=$((NODE_RANK + 1)); done
  export NODE_RANK LOCAL_WORLD_SIZE="${sizes[NODE_RANK]}"
elif [[ ${1:-} == openmpi ]]; then
  export RANK="$OMPI_COMM_WORLD_RANK" LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"
  export NODE_RANK="$((RANK / 4))" # mpirun fills node after node
fi
export LOCAL_WORLD_SIZE="${LOCAL_WORLD_SIZE:-$LOCAL_SIZE}" # torchrun's, or DeepSpeed's, which knows this host's slots
export LOCAL_SIZE="$LOCAL_WORLD_SIZE"
[[ ${WORLD_SIZE:-unset} == 20 && -n ${RANK:-} ]] ||
  fail "WORLD_SIZE is ${WORLD_SIZE:-unset}, the plan has 20 ranks on 5 node(s) of 4. Start it with launch.sh or job.sbatch, on that many"

HOSTNAME="$(</proc/sys/kernel/hostname)" # srun hands on that of the job's first node
here="$(dirname -- "${BASH_SOURCE[0]}")"
DSLAUNCH_RUN_DIR="$(cd -- "${DSLAUNCH_RUN_DIR:-$here}" >/dev/null && pwd)"
export DSLAUNCH_RUN_DIR
export DSLAUNCH_WORK_DIR="${DSLAUNCH_WORK_DIR:-$PWD}"
python=python3
export DSLAUNCH_PYTHON="${DSLAUNCH_PYTHON:-$python}"
export DSLAUNCH_PLAN="$DSLAUNCH_RUN_DIR/plan.json"
export DSLAUNCH_DS_CONFIG="$DSLAUNCH_RUN_DIR/ds_config.json"
# shellcheck source=/dev/null
source "$DSLAUNCH_RUN_DIR/env.sh"
cd -- "$DSLAUNCH_WORK_DIR"

# Attempt 1 is the launch; a resume or a restart of the same files counts on.
export DSLAUNCH_ATTEMPT="${DSLAUNCH_ATTEMPT:-1}"
logs="$DSLAUNCH_RUN_DIR/logs"
if ((DSLAUNCH_ATTEMPT > 1)); then
  export DSLAUNCH_RESUME=1
  logs+="/attempt-$DSLAUNCH_ATTEMPT"
fi
mkdir -p "$DSLAUNCH_RUN_DIR/ranks" "$logs"
# Held open: a rank that outlives its attempt, on a host that was cut off, writes to that attempt's folder once it is
# put aside, and not to the next one's.
exec {held}<"$DSLAUNCH_RUN_DIR/ranks"
ranks="/proc/$$/fd/$held"
record="$ranks/$RANK.exit"
echo running >"$record"
if [[ ${LOCAL_RANK:-} == 0 ]]; then # what this host's GPUs do; it ends with this script
  "$DSLAUNCH_PYTHON" -I "$DSLAUNCH_RUN_DIR/gpus.py" "$ranks/$RANK.gpus" </dev/null >/dev/null 2>&1 &
  counting=$!
fi
# What this rank says goes to a file of its own as well as to the launcher.
exec > >(trap '' INT TERM HUP && exec tee -a -- "$logs/rank-$RANK.log") 2>&1
copier=$!
status=0
# From here on the program gets them too, and decides; its status is what counts. Earlier, they end this script.
trap : INT TERM
(
  # The program keeps this process id; with the start time (clock ticks since boot) it is never taken for another.
  read -ra stat <"/proc/$BASHPID/stat"
  printf '{"host": "%s", "pid": %d, "pgid": %d, "start_time": %d}\n' "$HOSTNAME" "$BASHPID" "${stat[4]}" "${stat[21]}" \
    >"$ranks/$RANK.pid"
  exec "$DSLAUNCH_PYTHON" -I "$DSLAUNCH_RUN_DIR/cores.py" "${1:-launcher}" "$LOCAL_RANK" "$LOCAL_WORLD_SIZE" "$DSLAUNCH_PYTHON" -u train.py
) || status=$?
echo "$status" >"$record"
[[ -z ${counting:-} ]] || kill "$counting" 2>/dev/null || true
exec >&- 2>&-
for ((waited = 0; waited < 100; waited++)); do # a process that the program left behind may hold the pipe
  kill -0 "$copier" || break
  sleep 0.05
done
exit "$status"
