import torch
from vil.ops import LocalBias, Window, local_attention

B, N, D, X, Y, G, w = 2, 3, 32, 30, 41, 1, 7
q = torch.randn(B, N, X * Y, D)                    # local tokens ask
k, v = torch.randn(2, B, N, G + X * Y, D)          # global tokens come first
bias = LocalBias(table=torch.randn(N, (4 * w - 1) ** 2), to_global=torch.randn(N, G))
valid = torch.tensor([[30, 41], [17, 22]])         # the second image fills a part of the grid; the rest is never seen
out = local_attention(q, k, v, Window((X, Y), w), num_global=G, bias=bias, valid=valid)
print(out.shape)                                   # (B, N, L, D)
