deepspeed --num_gpus 8 --num_nodes 2 train.py --deepspeed autotp.json --bf16 True
