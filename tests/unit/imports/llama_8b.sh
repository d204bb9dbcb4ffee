#!/bin/bash
# Starts a model of Llama 3 8B's shape. Arrays, defaults of arguments, a redirected log.
set -e
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NNODES=${NNODES:-4}
CHECKPOINTS=${1:-"checkpoints/llama"}
LOGS=$2

DISTRIBUTED=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --rdzv-backend c10d  # found at launch
)

SHAPE=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.0134
)

TRAINING=(
    --micro-batch-size 1 --global-batch-size 128 --train-iters 20000
    --lr 1.5e-4 --min-lr 1.0e-5 --lr-decay-style cosine --lr-warmup-iters 300 --lr-decay-iters 20000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --manual-gc --empty-unused-memory-level 1
)
LAYOUT=(
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
DATA=(--data-path 0.3 /data/a_text 0.7 /data/b_text --split 99,1,0 --padded-vocab-size 128256
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tokenizer)

torchrun "${DISTRIBUTED[@]}" pretrain_gpt.py ${SHAPE[@]} ${TRAINING[@]} ${LAYOUT[@]} ${DATA[@]} \
    --save "$CHECKPOINTS" --save-interval 1000 --log-interval 10 --tensorboard-dir "$LOGS" \
    --no-such-flag 3 2>&1 | tee log.txt
