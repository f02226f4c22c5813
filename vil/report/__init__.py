"""Pictures and pages drawn from what runs have logged."""
