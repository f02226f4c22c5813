"""Train the combinations of a grid of settings: plan and start the runs, and tabulate results."""
