from vil.layers.attention import set_progress
from vil.utils.progress import Progress

vil.patch_attention(model, window=7, mode=1).train()
set_progress(model, Progress(seed=0, step=0, epoch=0, epochs=10, steps_per_epoch=100))   # before each step
model(images).logsumexp(1).sum().backward()
