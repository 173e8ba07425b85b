"""DDP that finds unused parameters, experts without dropping, known and unknown values, a custom op."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(8, 4), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


model = DistributedDataParallel(Model().cuda(), find_unused_parameters=True)
for _ in range(2):
    x = torch.randn(32, 8, device="cuda", requires_grad=True)
    _, chosen = (scores := model(x).softmax(-1)).topk(2)
    counts = torch.bincount(chosen.flatten(), minlength=4).tolist()
    parts = x[chosen.flatten().argsort() // 2].split(counts)
    loss = scores.sum() + sum((part @ torch.ones(8, 8, device="cuda")).sum() for part in parts)
    loss.backward()
    print(f"{loss:.3f}", torch.cuda.memory_summary(), torch.cuda.memory_snapshot())

x = torch.tensor([3, 0, 5], device="cuda")
assert x.sum().item() == 8 and (x == 0).any() and (x + 1).tolist() == [4, 1, 6]
assert x[x > 0].shape == (2,)
x[0] = 7
assert x[:1].item() == 7
x += torch.randint(9, (3,), device="cuda")
assert x[0].item() == 1  # not known any more


@torch.library.custom_op("mine::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


half.register_fake(torch.empty_like)
half.register_autograd(lambda context, grad: half(grad))
half(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()
