deepspeed --num_gpus 8 --num_nodes 4 train.py --deepspeed autotp.json --bf16 True
