import timm
import torch
import vil
import vil.models.timm_models                                      # registers every name with timm

digits = vil.get_model("vil_nano", weights=vil.ViL_Nano_Weights.DIGITS)
backbone = timm.create_model("vil_tiny_rpb", features_only=True, out_indices=(1, 2, 3))
print([m.shape for m in backbone(torch.randn(1, 3, 128, 160))])

vit = timm.create_model("vit_tiny_patch16_224", img_size=512)      # pretrained=True: with its weights, which stay
vil.patch_attention(vit, window=8)
