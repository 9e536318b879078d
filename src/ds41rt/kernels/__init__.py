"""The kernels of one decode step: each a `KernelSpec` beside its NumPy reference, one file a family.

The references hold the published rounding points and are the meaning of a kernel: what runs on a device is tested
against them, and the host backend runs them. Nothing here knows layers, caches, sequences or a backend.

Arithmetic that saturates or meets NaN behaves as on a device: references do not guard against NumPy's floating point
warnings, whoever executes them does so under `numpy.errstate(all="ignore")`.
"""
