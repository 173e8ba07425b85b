import torch

layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(2)]
model = torch.nn.Sequential(*layers).cuda().requires_grad_(False)
optimizer = torch.optim.SGD(model[1:].requires_grad_().parameters())
model(torch.ones(1, 512, device="cuda")).sum().backward()
optimizer.step()
