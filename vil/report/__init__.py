"""Draw plots and HTML pages for training runs, sweeps, benchmarks and attention patterns."""
