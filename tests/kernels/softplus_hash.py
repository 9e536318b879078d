"""The committed hashes of `sqrt_softplus` over all inputs. Run this file to write the table anew (a few minutes)."""

from pathlib import Path

import numpy as np

from ds41rt.kernels.softplus_check import BLOCKS, block_hash

TABLE = Path(__file__).parents[1] / "goldens_own" / "sqrt_softplus_hashes.npy"

if __name__ == "__main__":
    TABLE.parent.mkdir(exist_ok=True)
    np.save(TABLE, np.array([block_hash(b) for b in range(BLOCKS)], np.uint64))
