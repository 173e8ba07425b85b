TP=2; PP=$((4 / $TP))
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size $(( 2*(TP + PP) )) --vocab-size 32000 --num-experts 8 --moe-router-topk 2 --bf16 --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP}; echo done
