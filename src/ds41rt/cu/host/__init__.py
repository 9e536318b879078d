"""A simulated CUDA device: deferred execution, bounds and capture rules, kernels through their NumPy references."""

from ds41rt.cu.host.device import HostBackend
from ds41rt.cu.host.race_report import Access, Race, RaceError

__all__ = ["Access", "HostBackend", "Race", "RaceError"]
