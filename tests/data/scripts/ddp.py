import os, torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler
def main():
    dist.init_process_group("nccl"); r = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(r)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.BatchNorm1d(512), nn.Linear(512, 10)).cuda(r)
    model = DDP(model, device_ids=[r])
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=2, pin_memory=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9); scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward(); scaler.step(opt); scaler.update(); opt.zero_grad(set_to_none=True)
        if i == 3: break
    if r == 0: torch.save(model.state_dict(), "/tmp/st/ck.pt")
    print("loss", loss.item(), "mem", torch.cuda.max_memory_allocated() / 1e6)
    dist.barrier(); dist.destroy_process_group()
main()
