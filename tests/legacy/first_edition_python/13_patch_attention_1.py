import timm
import torch
import vil

model = timm.create_model("vit_tiny_patch16_224", img_size=448)    # pretrained=True: with its weights
images = torch.randn(1, 3, 448, 448)                               # 28x28 patches
before = model.eval()(images)

vil.patch_attention(model, window=7)                               # every block: 3x3 chunks of 7x7 patches, and the class token
print((model(images) - before).abs().max())                        # another model: what is far away is not seen any more

vil.patch_attention(model, window=14)                              # again: two chunks a side, so each sees the whole grid
assert torch.allclose(model(images), before, atol=1e-5)            # the same model

vil.patch_attention(model, window=7, blocks=range(10))             # only some blocks; the others stay as they are
vil.patch_attention(model, "full")                                 # timm's own modules back
assert torch.equal(model(images), before)
