import timm
import torch
import vil.models.timm_models                                      # registers every name

model = timm.create_model("vil_small_rpb", num_classes=10, img_size=(224, 320)).eval()
backbone = timm.create_model("vil_tiny", features_only=True, out_indices=(1, 2, 3))
print([tuple(m.shape) for m in backbone(torch.randn(1, 3, 200, 150))])
digits = timm.create_model("vil_nano.digits", pretrained=True)
