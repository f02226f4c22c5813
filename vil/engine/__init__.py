"""Training and evaluation of any model: the loop, checkpoints, logs and ranks.

Start reading at loop.py. The engine imports neither models nor data: its functions receive them as
arguments.
"""
