"""Use vil's models and attention in timm, and models of timm and torchvision in vil."""
