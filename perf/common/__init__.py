"""What the scripts of perf/ share; one job per module."""
