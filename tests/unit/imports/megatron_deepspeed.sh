#!/bin/bash
# A model of GPT-3 13B's shape under Megatron-DeepSpeed: its runner, flags with underscores, a JSON beside it.
BASE=/data
megatron_options=" \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
    --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 2048 --max-position-embeddings 2048 \
    --micro-batch-size 2 --global-batch-size 256 --train-iters 50000 \
    --lr 1.0e-4 --min-lr 1.0e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16 \
    --data-path ${BASE}/text_document --split 98,2,0 --tokenizer-type GPT2BPETokenizer \
    --vocab-file ${BASE}/vocab.json --merge-file ${BASE}/merges.txt"
deepspeed_options="--deepspeed --deepspeed_config ds.json --zero-stage 1 --enable-zbh1-pipeline"
deepspeed --num_nodes 4 --num_gpus 8 pretrain_gpt.py ${megatron_options} ${deepspeed_options} &> log.txt
