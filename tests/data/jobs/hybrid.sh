torchrun --nproc_per_node 8 --nnodes 8 pretrain_mamba.py --hybrid-override-pattern 'M-M-M-M*-M-M-' --mamba-num-heads 128 \
  --no-such-argument 3 --num-layers 12 --hidden-size 4096 --num-attention-heads 32 --vocab-size 131072 --seq-length 8192 \
  --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 128 --lr 1e-4 --log-interval 10
