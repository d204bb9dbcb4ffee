# Environment of every rank. Sourced by launch.sh and rank.sh.
# shellcheck disable=SC2016 # values are meant literally
# the node's cores, shared out among its ranks
export OMP_NUM_THREADS=16
