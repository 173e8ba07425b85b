SP=${SP:-${CP:-2}}
ROLLOUT=(
  actor_rollout_ref.rollout.name=vllm  # or sglang
  actor_rollout_ref.rollout.n=8
)
python3 -m verl.trainer.main_ppo ${ROLLOUT[@]} data.train_batch_size=64 trainer.nnodes=$NODES \
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=$OTHER
