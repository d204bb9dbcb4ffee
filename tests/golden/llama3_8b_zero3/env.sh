# Environment of every rank. Sourced by launch.sh and rank.sh.
# shellcheck disable=SC2016 # values are meant literally
# launcher.timeout_minutes: limit of a collective
export DEEPSPEED_TIMEOUT=30
export NCCL_IB_HCA=mlx5_0,mlx5_1
export NOTE='it'"'"'s $5; a "quote"'
# the node's cores, shared out among its ranks
export OMP_NUM_THREADS=16
: "${WANDB_API_KEY:?is named in launcher.pass_env, but is not set. Export it where the job is launched, and on each host for launches over ssh}"
export WANDB_API_KEY
