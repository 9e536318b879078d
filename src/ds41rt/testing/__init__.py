"""For tests of code that uses `GpuBackend`: a pytest fixture over schedules and devices, and checks for its end.

Put `pytest_plugins = ["ds41rt.testing.plugin"]` into the top-level conftest.py (or run pytest with
`-p ds41rt.testing.plugin`): a test that takes `gpu` then runs on the simulated device under several schedules and,
where there is a driver, on the real one. It is not an entry point, because every pytest run of an environment that
merely has ds41rt installed would load it. This package must not know engines or models.
"""

from ds41rt.testing.checks import CountingBackend, assert_no_leaks, assert_no_open_capture, assert_no_races

__all__ = ["CountingBackend", "assert_no_leaks", "assert_no_open_capture", "assert_no_races"]
