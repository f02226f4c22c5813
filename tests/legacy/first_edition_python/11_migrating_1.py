import torch
import vil
from vil.models.original import original_names

model = vil.get_model("vil_tiny", img_size=64)
net = {f"module.{original_names(model)[name]}": value for name, value in model.state_dict().items()}
torch.save({"net": net, "arch": "msvit", "epoch": 300}, "model_best.pth")      # as the 2021 code wrote it

report = vil.load_weights(vil.get_model("vil_tiny", img_size=96), "model_best.pth", rule="bicubic")
print(report)                                                                  # loaded, resized, ignored: each key
assert report.complete and len(report.resized) == 8
