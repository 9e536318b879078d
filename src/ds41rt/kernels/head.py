"""The output head: final norm and the float32 logits over the vocabulary."""

import numpy as np

from ds41rt.cu.kernel import BF16, F32, Array, Geometry, KernelSpec, Scalars
from ds41rt.kernels.geometry import BF16_PLAIN, matrix_geometry, shared_nbytes, tiles_of, units
from ds41rt.kernels.linear import plain_matvec, rms_norm
from ds41rt.kernels.params import r, scalars, w


def _head(
    hidden: Array, norm_w: Array, w: Array, normed: Array, logits: Array, dim: int, vocab: int, eps: float
) -> None:
    normed[...] = rms_norm(hidden.astype(np.float32), norm_w, eps)
    logits[...] = plain_matvec(w, normed)


def _geometry(s: Scalars, n_sms: int) -> Geometry:
    return matrix_geometry(
        n_sms, units(BF16_PLAIN, s.dim, tiles_of(BF16_PLAIN, s.vocab)), shared_nbytes(BF16_PLAIN, s.dim)
    )


HEAD = KernelSpec(
    "head",
    (
        r("hidden", BF16, lambda s: (s.dim,)),
        r("norm_w", BF16, lambda s: (s.dim,)),
        r("w", BF16, lambda s: (s.vocab, s.dim)),
        w("normed", BF16, lambda s: (s.dim,)),
        w("logits", F32, lambda s: (s.vocab,)),
        *scalars("u32", "dim", "vocab"),
        *scalars("f32", "eps"),
    ),
    _head,
    geometry=_geometry,
)
