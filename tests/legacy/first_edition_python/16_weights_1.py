import torch
import vil
from PIL import Image

print(vil.list_models("vil_*_rpb"))                                # 8 of the 15 names
weights = vil.ViL_Nano_Weights.DIGITS                              # ships with the package
model = vil.get_model("vil_nano", weights=weights).eval()
transform, classes = weights.transforms(), weights.meta["categories"]
picture = Image.new("L", (40, 30), 200)                            # any PIL picture
with torch.no_grad():
    print(classes[model(transform(picture)[None]).argmax()])
print(vil.get_model_weights("vil_small").DEFAULT.meta["metrics"])  # {'ImageNet-1K': {'acc@1': 82.0, 'acc@5': 95.8}}
