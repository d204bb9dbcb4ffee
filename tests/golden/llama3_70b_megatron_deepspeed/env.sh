# Environment of every rank. Sourced by launch.sh and rank.sh.
# shellcheck disable=SC2016 # values are meant literally
# launcher.timeout_minutes: limit of a collective
export DEEPSPEED_TIMEOUT=30
# infiniband: rides out a rerouted link; 7 tries of 17 s take 2 minutes, NCCL's own 20 gives up after 30 s
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT-22}"
# the node's cores, shared out among its ranks
export OMP_NUM_THREADS=16
