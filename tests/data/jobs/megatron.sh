#!/bin/bash
GPUS_PER_NODE=8
NODES=${NODES:-4}
TP=4
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096  # a comment
    --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu
    --group-query-attention --num-query-groups 8
    --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --max-position-embeddings 8192
    --vocab-size 128256 --untie-embeddings-and-output-weights
)
TRAINING="--micro-batch-size 2 --global-batch-size 128 --seq-length 8192 --bf16 --lr 3e-4"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NODES pretrain_gpt.py \
    ${MODEL_ARGS[@]} $TRAINING --tensor-model-parallel-size $TP --sequence-parallel \
    --use-distributed-optimizer --overlap-grad-reduce --cuda-graph-impl local
