"""Shared by all tests: two threads, as on the machine the time limits are made for."""

import torch

torch.set_num_threads(2)
