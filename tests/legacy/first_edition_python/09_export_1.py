import torch
from vil.models.arch import parse_arch
from vil.models.export import export_model
from vil.models.exported import load_exported, quantize_linears
from vil.models.msvit import MsViT

arch = "l1,h2,d32,n1,g1,p8,f3,a0"                        # or model = vil.get_model("vil_tiny")
model = MsViT(parse_arch(arch), img_size=64, num_classes=10)
for found in export_model(model, "small.onnx", size=(64, 64), metadata={"labels": "ten digits"}):
    print(found.shape, found.largest)                    # how far the file is from the model

images = torch.randn(3, 3, 96, 80)                       # another batch and size
file = load_exported("small.onnx")                        # a module; .pt2 files too
with torch.no_grad():
    print((file(images) - model.eval()(images)).abs().max())
print(file.metadata["arch"], file.metadata["labels"])

print(quantize_linears("small.onnx", "small.int8.onnx"), "linear layers in int8")
