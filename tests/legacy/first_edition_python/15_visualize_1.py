import torch
import vil
from vil.models.attention_maps import attention_maps

model = vil.get_model("vil_tiny").eval()
found = attention_maps(model, torch.randn(1, 3, 224, 224), stage=0, block=-1, queries=[0, 1 + 28 * 56 + 28])
print(found.weights.shape, found.grid)             # (images, heads, queries, global and local keys), (56, 56)
