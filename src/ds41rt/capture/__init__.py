"""Diagnostics of captured graphs, for our own and for anybody's: dump, lint, compare, draw, explain.

Works on what `cu.graphinfo` reads out of a graph; knows neither the step nor the command line.
"""
