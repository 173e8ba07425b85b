"""Forked ranks that meet once a step; `sleeper` sleeps longer than the others."""

import os
import sys
import time

import torch
import torch.distributed as dist

ranks, sleeper = int(sys.argv[1]), int(sys.argv[2])
for rank in range(ranks):
    if os.fork() == 0:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=ranks)
        for _ in range(9):
            for _ in range(20):
                torch.ones(64, 64) @ torch.ones(64, 64)
            time.sleep(0.03 + 0.2 * (rank == sleeper))
            dist.all_reduce(torch.ones(1000))
        dist.destroy_process_group()
        os._exit(0)
assert [os.waitpid(-1, 0)[1] for rank in range(ranks)] == [0] * ranks
