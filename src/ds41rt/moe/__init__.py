"""Routed experts: route headers, the device slot table, the expert cache and its fetcher.

Nothing in this package knows segments, captures or how a step is replayed.
"""
