# Environment of every rank. Sourced by launch.sh and rank.sh.
# shellcheck disable=SC2016 # values are meant literally
# launcher.timeout_minutes: limit of a collective
export DEEPSPEED_TIMEOUT=30
# the node's cores, shared out among its ranks
export OMP_NUM_THREADS=16
