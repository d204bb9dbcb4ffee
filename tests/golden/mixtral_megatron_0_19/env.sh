# Environment of every rank. Sourced by launch.sh and rank.sh.
# shellcheck disable=SC2016 # values are meant literally
# Megatron stops without it where tp or cp is above 1, before Blackwell
export CUDA_DEVICE_MAX_CONNECTIONS=1
# the node's cores, shared out among its ranks
export OMP_NUM_THREADS=14
