"""Forked ranks with a profiler of their own, two process groups, meta tensors under FSDP2, and `os._exit`."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

for rank in (0, 1):
    if os.fork() == 0:
        torch.set_num_threads(1)
        for turn in (1, 2):
            url = f"file://{Path.cwd()}/meeting-{turn}"
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
            with torch.device("meta"):
                model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
            fully_shard(model).to_empty(device="cpu")
            dist.all_reduce(torch.ones(4, 4) @ torch.ones(4, 4))
            with profile(activities=[ProfilerActivity.CPU]) as own:
                torch.ones(2, 2).exp()
                dist.all_reduce(torch.ones(3))
            assert "aten::exp" in {row.key for row in own.key_averages()}
            own.export_chrome_trace(f"own-{rank}-{turn}.json.gz")
            dist.barrier()
            dist.destroy_process_group()
        os._exit(0)
assert [os.waitpid(-1, 0)[1] for rank in (0, 1)] == [0, 0]
