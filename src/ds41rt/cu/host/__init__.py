"""A simulated CUDA device: deferred execution, bounds and capture rules, kernels through their NumPy references."""

from ds41rt.cu.host.device import HostBackend

__all__ = ["HostBackend"]
