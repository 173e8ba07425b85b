"""What differs between the second GPU of a host and a CPU: defaults, transforms, packed and grouped ops."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

dist.init_process_group("nccl")
assert torch.version.cuda and torch.backends.cudnn.is_available()
x = torch.ones(4, 64, device="cuda")
assert x.cuda() is x and x.get_device() == 1
model = torch.compile(torch.nn.Linear(64, 64, bias=False).cuda())
assert list(model.state_dict()) == ["_orig_mod.weight"]
assert torch.func.hessian(lambda y: model(y).exp().sum())(x[0]).shape == (64, 64)
graph, optimizer = torch.cuda.CUDAGraph(), torch.optim.AdamW(model.parameters())
with torch.cuda.graph(graph):
    model(x).sum().backward()
graph.replay()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
lengths = torch.tensor([3, 1, 2], device="cuda")
assert [int(n) for n in lengths] == [3, 1, 2] and torch.where(lengths == 1)[0].tolist() == [1]
assert lengths.sort().values.tolist() == [1, 2, 3] and torch.equal(lengths, lengths.clone())
dist.all_reduce_coalesced([x, x, x])
offloaded = fully_shard(torch.nn.Linear(8, 8, device="meta"), offload_policy=CPUOffloadPolicy())
torch.nn.init.normal_(offloaded.to_empty(device="cpu").weight)
signal = torch.ones(2, 64, 19, device="cuda", requires_grad=True)
torch.nn.Conv1d(64, 64, 4, groups=64).cuda()(signal).sum().backward()
q = torch.ones(64, 2, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
for ends in torch.tensor([0, 16, 64], device="cuda"), torch.randint(64, (3,), device="cuda"):
    varlen_attn(q, q, q, ends.int(), ends.int(), 64, 64, window_size=(-1, 0)).sum().backward()
query, value = (torch.ones(1, 2, 64, n, device="cuda") for n in (32, 16))
assert flex_attention(query, query, value).shape == value.shape
ids = torch.arange(64, device="cuda") // 16
mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 8) & (ids[i] == ids[j]), None, None, 64, 64)
query = torch.ones(1, 2, 64, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
flex_attention(query, query, query, block_mask=mask).sum().backward()
