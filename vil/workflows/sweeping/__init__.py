"""Parts of a sweep, which trains all combinations in a grid of settings.

The modules plan the runs, start them, and write tables of the results.
"""
