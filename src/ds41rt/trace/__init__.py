"""Traces of runs: recording what a step computed, files of it, and the place where two runs part."""
