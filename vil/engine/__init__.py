"""Training and evaluation of any model: the loop, checkpoints, logs and ranks.

Start reading at loop.py. The engine is handed objects and imports neither models nor data.
"""
