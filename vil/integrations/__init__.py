"""Use vil's models and attention in timm, and models of timm and torchvision in vil. optimize.py
makes a faster copy of any of these models for inference."""
