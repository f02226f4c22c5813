"""The few things that every room needs. Nothing enters here without a third caller."""
