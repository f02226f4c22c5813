import torch
import vil

model = vil.get_model("vil_tiny_rpb", num_classes=10, img_size=96)
print(model(torch.randn(1, 3, 96, 128)).shape)
print([stage.shape for stage in model.forward_stages(torch.randn(1, 3, 160, 96))])

attention = vil.build_attention("longformer", dim=96, num_heads=3, window=7, rel_pos=True)
print(attention(torch.randn(2, 1 + 30 * 17, 96), (30, 17)).shape)
