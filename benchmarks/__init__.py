"""Benchmarks: whole processes and inner loops, timed as ratios and medians; run by `make bench`."""
