MODEL=(
--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048
--num-experts 8 --moe-layer-freq '([0]*1+[1]*3)' --max-position-embeddings 2048
)
TRAINING=(--micro-batch-size 1 --bf16)
DDP=(--use-distributed-optimizer)
TRAINING+=("${DDP[@]}")
if [ "${FEW:-0}" = 1 ]; then
  TRAINING=(
    "${TRAINING[@]}"
 --global-batch-size 8
  )
fi
MORE="--tokenizer-type Llama2Tokenizer"
MORE+=" --grad-reduce-in-bf16"
torchrun --nproc-per-node 8 pretrain_gpt.py ${MODEL[@]} "${TRAINING[@]}" $MORE
