"""timm and torchvision: our models there, their models here."""
