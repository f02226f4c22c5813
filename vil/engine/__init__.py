"""Training and evaluation of any model: the loop, its tasks, checkpoints, logs and ranks.

Start reading at train.py. The engine is handed objects and imports neither models nor data.
"""
