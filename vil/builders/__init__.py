"""From a config to the objects that every task needs: model, data loading, optimizer, processes.

Config objects end here and in the tasks' own build.py: everything below takes explicit arguments.
"""
