torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 \
  --ffn-hidden-size 4096 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 \
  --micro-batch-size 1 --global-batch-size 16 --num-experts 8 --bf16 \
  --moe-layer-freq '([0]*2+[1]*3+[0]+[1]*2)'
