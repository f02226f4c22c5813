"""The few things that every room of the package needs. Nothing enters here without a third caller."""
