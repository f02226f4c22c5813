import torch
from vil import build
from vil.config import get_config

model = build.build_model(get_config("scenes/mask_rcnn_vil_nano.yaml")).eval()     # heads at random: no weights yet
photos = [torch.rand(3, 120, 160), torch.rand(3, 200, 90)]                         # RGB in 0..1, any sizes
with torch.no_grad():
    for found in model(photos):
        print({name: tuple(values.shape) for name, values in found.items()})       # boxes, labels, scores, masks
