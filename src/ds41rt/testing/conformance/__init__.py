"""The rules of the device, as small programs whose outcome can be compared between backends.

`run_case` runs one of `CASES` on a backend. `tools/record_conformance.py` in the repository asks a real driver; the
committed record is what the simulated device is held to. This package must not know which backend it runs on.
"""

from ds41rt.testing.checks import CountingBackend
from ds41rt.testing.conformance import capture_cases, capture_event_cases, memory_cases, stream_cases  # noqa: F401 - they fill CASES
from ds41rt.testing.conformance.case import CASES, Case, Outcome, Rig

__all__ = ["CASES", "Case", "Outcome", "run_case"]


def run_case(case: Case, backend: CountingBackend) -> Outcome:
    """The outcome of one case on a fresh backend, which is closed afterwards.

    Raises `CudaError` where the case fails at a place that it does not expect to fail at.
    """
    try:
        return case.run(Rig(backend))
    finally:
        backend.close()
