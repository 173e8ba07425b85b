accelerate launch --config_file acc.yaml --num_processes 16 train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 4
