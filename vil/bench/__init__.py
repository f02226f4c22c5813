"""What `vil benchmark` measures: candidates in turns on one machine, in plain rows."""
