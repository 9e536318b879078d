"""The update of the device slot table."""

from ds41rt.cu.kernel import I32, Array, Geometry, KernelSpec, Scalars
from ds41rt.kernels.params import r, rw, scalars


def _slot_table_set(table: Array, triples: Array, n_layers: int, n_experts: int, capacity: int) -> None:
    # A device applies the triples in parallel: one triple a (layer, expert) is the caller's duty. Going backwards makes
    # a caller that relies on "the last one wins" visibly wrong.
    count = int(triples[0])
    for layer, expert, slot in triples[1 : 1 + 3 * count].reshape(-1, 3)[::-1].tolist():
        table[layer, expert] = slot


def _geometry(s: Scalars, n_sms: int) -> Geometry:
    return Geometry((-(-s.capacity // 128), 1, 1), 128)


SLOT_TABLE_SET = KernelSpec(
    "slot_table_set",
    (
        rw("table", I32, lambda s: (s.n_layers, s.n_experts)),
        r("triples", I32, lambda s: (1 + 3 * s.capacity,)),
        *scalars("u32", "n_layers", "n_experts", "capacity"),
    ),
    _slot_table_set,
    geometry=_geometry,
)
