import fractions

import torch.distributed as dist

dist.init_process_group("nccl")
for objects in [{"a": [1, "b"]}], [fractions.Fraction(1, 3)]:
    got = [None]
    dist.recv_object_list(got, 0) if dist.get_rank() else dist.send_object_list(objects, 1)
    assert not dist.get_rank() or got == objects
