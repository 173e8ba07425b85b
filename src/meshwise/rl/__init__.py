"""A step of post-training by reinforcement: rollout, scoring, update, weight sync."""
