deepspeed --num_gpus 8 --num_nodes 2 train.py --deepspeed ds.json --bf16 True --gradient_checkpointing 2>&1 | tee log.txt
