import timm
import torch
import vil.models.timm_models

model = timm.create_model("vil_tiny_rpb", num_classes=7, drop_path_rate=0.1)   # where swin_tiny_patch4_window7_224 stood
model.set_input_size((256, 320))
print(model(torch.randn(1, 3, 256, 320)).shape, [info["reduction"] for info in model.feature_info])
