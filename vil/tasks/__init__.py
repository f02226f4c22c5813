"""What is learned: one folder per task."""
