"""The parts of a sweep: its grid, its runs and their folder, the processes, and the table."""
