"""Base of the tasks that train a network without its head, from images without labels.

build.py  task from a config             target.py  predictions, which are features
model.py  network with additional layers for pretraining

The tasks are distillation and simmim.
"""
