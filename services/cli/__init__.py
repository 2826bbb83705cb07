"""The `libra` command: runs a job, serves one process of it, checks, measures."""
