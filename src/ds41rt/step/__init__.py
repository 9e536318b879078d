"""The decode step: how one token runs over all layers, replayed as a few CUDA graphs or eagerly.

`machine` decides what runs, `state` is what it remembers, `bodies_protocol` is what it asks of the layers.
"""
