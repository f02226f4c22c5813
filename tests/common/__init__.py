"""What several tests build on: cases, small files, small models and small runs."""
