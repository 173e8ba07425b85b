"""Three all-reduces beside a matmul on each rank, spawned or started by torchrun; `victim` kills itself."""

import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, world_size, victim):
    torch.set_num_threads(1)
    how = {} if "RANK" in os.environ else {"init_method": f"file://{sys.argv[2]}"}
    dist.init_process_group("gloo", rank=rank, world_size=world_size, **how)
    for _ in range(3):
        with torch.profiler.record_function("MoELayer"):
            x = torch.ones(16, 16) @ torch.ones(16, 16)
            dist.all_reduce(x)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if victim >= 0:
        dist.barrier()  # and no destroy: the profiles must be written all the same
    else:
        dist.destroy_process_group()  # without it a thread of gloo may abort the exit


if __name__ == "__main__":
    victim = int(sys.argv[1])
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), victim)
    else:
        mp.spawn(main, args=(3, victim), nprocs=3)
