"""DDP on one visible GPU with a hook, experts without dropping, known and unknown values, a custom op."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(0)  # as where each task sees one GPU
used = torch.nn.Linear(8, 4)
used.unused = torch.nn.Linear(8, 8)
model = DistributedDataParallel(used.cuda(), device_ids=[0], find_unused_parameters=True)
model.register_comm_hook(None, bf16_compress_hook)
for _ in range(2):
    x = torch.randn(32, 8, device="cuda", requires_grad=True)
    _, chosen = (scores := model(x).softmax(-1)).topk(2)
    counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
    parts = x[chosen.flatten().argsort() // 2].split(counts)
    loss = scores.sum() + sum((part @ torch.ones(8, 8, device="cuda")).sum() for part in parts)
    loss.backward()

x = torch.tensor([3, 0, 5], device="cuda")
assert x.sum().item() == 8 and (x == 0).any() and (x + 1).tolist() == [4, 1, 6] and x[x > 0].shape == (2,)
x[0] = 7
assert x[:1].item() == 7
x += torch.randint(9, (3,), device="cuda")
assert x[0].item() == 1  # not known any more

sent = torch.tensor([2, 0, 1, 5], device="cuda")
received = torch.zeros_like(sent)
dist.all_to_all_single(received, sent)
assert received.tolist() == [5] * 4
assert functional.all_to_all_single(received, None, None, dist.group.WORLD).tolist() == [5] * 4
dist.gather(received, places := [torch.zeros_like(sent) for _ in range(4)], dst=3)
dist.scatter(received, None, src=0)
assert torch.repeat_interleave(places[0], sent).tolist() == [5] * 8
rows, weights = (torch.ones(size, device="cuda", dtype=torch.bfloat16) for size in ((64, 32), (4, 32, 16)))
torch.nn.functional.grouped_mm(rows, weights, offs=torch.full((4,), 16, device="cuda", dtype=torch.int32))
large = torch.empty(1 << 20, device="cuda")
torch.cuda.reset_peak_memory_stats()
total = functional.all_reduce(large, "sum", dist.group.WORLD).wait()
assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
assert torch.isfinite(large).all() and large.norm() < 10 and not torch.isnan(large).any().cpu()
assert functional.all_reduce(torch.isinf(large).any().float(), "max", dist.group.WORLD).item() == 0
found = torch.zeros((), device="cuda")
found += torch.isnan(large).sum()
assert found == 0
torch.nn.init.trunc_normal_(large)
half = torch.library.custom_op("mine::half", lambda x: x / 2, mutates_args=(), schema="(Tensor x) -> Tensor")
half.register_fake(torch.empty_like)
half.register_autograd(lambda context, grad: half(grad))
half(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()
