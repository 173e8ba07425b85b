python3 -m verl.trainer.main_ppo model_engine=veomni actor_rollout_ref.rollout.n=8 data.train_batch_size=64
