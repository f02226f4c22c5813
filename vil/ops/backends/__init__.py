"""Ways to compute local attention. Each module offers `attend*` functions and says what it cannot
do.
"""
