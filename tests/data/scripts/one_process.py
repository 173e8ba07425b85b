import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(16, 16)
for x in DataLoader(torch.ones(8, 16), batch_size=4, num_workers=1):
    model(x).sum().backward()
print("done", model.weight.grad.sum().item())
