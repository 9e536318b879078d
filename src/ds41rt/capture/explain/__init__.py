"""Why did this capture fail: the first failing call, with its line, the rule it broke, and what to do.

`explain` is the entry. Inside: `run` runs captures, `lines` watches those of other libraries, `blame` finds whose line
it was, `rules` knows what captures forbid, `answer` is the result.
"""

from ds41rt.capture.explain.answer import Explanation, Failure, Related, Site
from ds41rt.capture.explain.run import explain, from_recording, takes

__all__ = ["Explanation", "Failure", "Related", "Site", "explain", "from_recording", "takes"]
