# Environment of every rank. Sourced by launch.sh and rank.sh.
# shellcheck disable=SC2016 # values are meant literally
# launcher.timeout_minutes: limit of a collective
export DEEPSPEED_TIMEOUT=30
export NCCL_IB_HCA=mlx5_0,mlx5_1
# infiniband: rides out a rerouted link; 7 tries of 17 s take 2 minutes, NCCL's own 20 gives up after 30 s
export NCCL_IB_TIMEOUT="${NCCL_IB_TIMEOUT-22}"
export NOTE='it'"'"'s $5; a "quote"'
# the node's cores, shared out among its ranks
export OMP_NUM_THREADS=16
: "${WANDB_API_KEY:?is named in launcher.pass_env, but is not set. Export it where the job is launched, and on each host for launches over ssh}"
export WANDB_API_KEY
