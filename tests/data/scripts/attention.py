import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

every, half, double = range(4), torch.half, torch.double
for kernels, v_dim, dtype in ([2], 32, half), ([0], 32, half), (every, 16, half), (every, 32, double):
    q, v = (torch.ones(1, 2, 64, n, device="cuda", dtype=dtype) for n in (32, v_dim))
    with sdpa_kernel(list(map(SDPBackend, kernels))):
        assert torch.nn.functional.scaled_dot_product_attention(q, q, v).shape == v.shape
