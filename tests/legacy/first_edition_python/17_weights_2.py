import torch
import vil

model = vil.get_model("vil_tiny_rpb", img_size=96, num_classes=3)
vil.save_pretrained(model, "flowers", classes=["aster", "broom", "clover"])
same = vil.from_pretrained("flowers")                              # a folder, a file of vil convert, or owner/name on the Hub
larger = vil.from_pretrained("flowers", img_size=160)
assert torch.equal(same.head.weight, model.head.weight)
