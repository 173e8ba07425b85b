torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \
--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 256 \
--tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type allgather --pipeline-model-parallel-size 4 \
--num-layers-per-virtual-pipeline-stage 4 --num-experts 8 --moe-router-topk 2 \
--expert-model-parallel-size 8 --bf16 --swiglu --normalization RMSNorm --position-embedding-type \
rope --untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 32000 \
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --sequence-parallel \
--moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall \
--recompute-activations --fp8-format e4m3 --expert-tensor-parallel-size 1
