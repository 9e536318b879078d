"""`python -m ds41rt`."""

import sys

from ds41rt.cli import main

sys.exit(main())
