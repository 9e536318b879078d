"""`ds41rt synth`: write a synthetic checkpoint in the published layout."""

import argparse
import json

from ds41rt.capture.words import size
from ds41rt.checkpoint.synth import synthesize


def synth(args: argparse.Namespace) -> int:
    synthesize(args.dir, args.preset, args.seed)
    nbytes = sum(p.stat().st_size for p in args.dir.rglob("*") if p.is_file())
    if args.json:
        print(json.dumps({"dir": str(args.dir), "preset": args.preset, "seed": args.seed, "nbytes": nbytes}))
    else:
        print(f"{args.dir}: preset {args.preset}, seed {args.seed}, {size(nbytes)}")
    return 0
