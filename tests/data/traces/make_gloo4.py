"""Makes gloo4/: four gloo ranks, captured by meshwise. Rank 3 comes late to every pass.

Run from the repository root: meshwise profile -o out -- python tests/data/traces/make_gloo4.py
"""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import record_function

RANKS = 4
PASSES = 3


def main(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.ones(64, 64)
    dist.all_reduce(torch.tanh(x @ x))
    dist.barrier()
    for _ in range(PASSES):
        with record_function("TransformerDecoderLayer with MoE"):
            y = x @ x
            dist.all_reduce(y, group=pairs[rank // 2])
            if rank == RANKS - 1:
                time.sleep(0.03)
            with record_function("MoELayer"):
                out = torch.empty_like(y)
                dist.all_to_all_single(out, y)
                x = torch.tanh(out)
    full = torch.empty(RANKS * 64, 64)
    dist.all_gather_into_tensor(full, x)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29567"}
    mp.spawn(main, nprocs=RANKS)
