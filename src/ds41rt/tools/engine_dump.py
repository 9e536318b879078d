"""The captured segments of an engine as a dump: with the layers they cover, what the host reads behind them, and names
for the parts of buffers that an engine shares out.

The engine has to be opened with `capture_watch`: its graphs cannot be taken apart once they are executable.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ds41rt.attn.sequence import BlockLayout
from ds41rt.capture.dump import Dump, Graph, Range, ReadBack
from ds41rt.capture.inspect import backend_names, dump_graph, make_dump
from ds41rt.capture.keeper import GraphKeeper
from ds41rt.capture.ranges import Names
from ds41rt.capture.words import visible
from ds41rt.engine import DecodeSequence, Engine
from ds41rt.errors import InputError, UnsupportedError
from ds41rt.step.buffers import SavedLayout

_MIN_TOKENS = 3  # position 0 runs eagerly, the next token captures, one replays


def dump_checkpoint(
    path: Path, *, tokens: int, backend: str | None, schedule: str = "lazy", again: bool = False
) -> tuple[Dump, Dump | None]:
    """Decode `tokens` made-up tokens of a checkpoint as a step graph and dump the segments; with `again`, capture them
    once more for a later token and dump that too.

    Raises `InputError` for too few tokens, `UnsupportedError` where nothing was captured, and what opening and stepping
    an engine raises.
    """
    if tokens < _MIN_TOKENS:
        raise InputError(
            f"--tokens must be at least {_MIN_TOKENS}, is {tokens}: the first token runs eagerly, the second is "
            "captured, the third replays"
        )
    with (
        Engine.open(path, mode="step-graph", backend=backend, schedule=schedule, capture_watch=True) as engine,
        engine.new_sequence() as seq,
    ):
        ids = _made_up(engine, 2 * tokens)
        engine.prefill(seq, ids[:tokens])
        first = dump_engine(engine, [seq], title=f"step graph of {path.name}")
        if not again:
            return first, None
        engine.machine.drop_graphs(range(engine.machine.n), reason="captured again to compare")
        engine.prefill(seq, ids[tokens:])
        return first, dump_engine(engine, [seq], title=f"step graph of {path.name}, {tokens} tokens later")


def dump_engine(engine: Engine, sequences: Iterable[DecodeSequence] = (), *, title: str = "step graph") -> Dump:
    """The segments that an engine has captured. Memory of `sequences` is named part by part.

    Raises `InputError` for an engine that was not opened with `capture_watch`, `UnsupportedError` if nothing is
    captured.
    """
    backend: object = engine.backend
    if not isinstance(backend, GraphKeeper):
        raise InputError(
            "this engine does not keep what its graphs contain; open it with capture_watch (DS41RT_CAPTURE_WATCH=1)"
        )
    seg = engine.machine.seg
    captured = {owner: graph for owner, graph in enumerate(seg.graphs) if graph is not None}
    if not captured:
        why = "a capture failed" if seg.disabled else "the mode is off, or too few tokens were stepped"
        raise UnsupportedError(f"no segment is captured: {why}; `ds41rt -v` logs the reason")
    parts = engine_ranges(engine)
    for seq in sequences:
        parts += [_part(*part) for part in seq.step.buffers.parts()]
    names = backend_names(engine.backend, parts)
    infos = {owner: backend.infos[graph.graph_exec] for owner, graph in captured.items()}
    graphs = [
        dump_graph(
            f"segment {owner}",
            infos[owner],
            names,
            layers=(owner, graph.end),
            moe_layers=graph.moe_layers,
            reads_back=tuple(_reads_back(engine, graph.end, names)),
        )
        for owner, graph in captured.items()
    ]
    device = engine.backend.device_name
    return make_dump(title, graphs, names, engine.backend.name, device=device, unavailable=infos.values())


def only_segment(dump: Dump, owner: int | None, where: str = "the dump") -> Dump:
    """The dump with one graph, "segment `owner`"; all of it for None. Raises `InputError` naming those there are."""
    if owner is None:
        return dump
    graphs: tuple[Graph, ...] = tuple(graph for graph in dump.graphs if graph.name == f"segment {owner}")
    if not graphs:
        names = visible(", ".join(graph.name for graph in dump.graphs)) or "none"
        raise InputError(f"--segment {owner}: there is no such segment; {where} has {names}")
    return dump.model_copy(update={"graphs": graphs})


def engine_ranges(engine: Engine) -> list[Range]:
    """The parts of the buffers that an engine's kernels share, by name."""
    parts = [
        *_block_parts(engine.block.layout, engine.block.ptr),
        *_saved_parts(engine),
        *_layer_rows(engine),
    ]
    return [_part(*part) for part in parts]


def _part(name: str, addr: int, nbytes: int) -> Range:
    return Range(name=name, addr=addr, nbytes=nbytes, space="device", source="caller")


def _block_parts(lay: BlockLayout, ptr: int) -> Iterator[tuple[str, int, int]]:
    rope = 4 * lay.rope_dim
    parts = [("step", lay.step_off, 8), ("rotary cell, plain", lay.rope_plain_off, rope)]
    parts += [("rotary cell, yarn", lay.rope_yarn_off, rope), ("rotary cell, pair", lay.rope_pair_off, rope)]
    parts += [(f"ring cell layer {layer}", off, 8) for layer, off in enumerate(lay.ring_off)]
    for what, offs in (("compressed rows", lay.comp_off), ("index keys", lay.ikey_off), ("pool", lay.pool_off)):
        parts += [(f"{what} cell layer {source}", off, 8) for source, off in offs.items()]
    parts += [(f"selection layer {source}", off, lay.sel_nbytes) for source, off in lay.sel_off.items()]
    for name, off, nbytes in parts:
        yield f"sequence block: {name}", ptr + off, nbytes


def _saved_parts(engine: Engine) -> Iterator[tuple[str, int, int]]:
    lay, ptr = SavedLayout.of(engine.config), engine.buffers.saved.ptr
    offs = [0, lay.attn_out_off, lay.pre_a_off, lay.post_off, lay.comb_off, lay.nbytes]
    for name, off, end in zip(("streams", "attn_out", "pre_a", "post", "comb"), offs, offs[1:], strict=False):
        yield f"saved block: {name}", ptr + off, end - off


def _layer_rows(engine: Engine) -> Iterator[tuple[str, int, int]]:
    arena, table, cfg = engine.arena, engine.table, engine.config
    for layer in range(cfg.n_layers):
        row = arena.header_row(layer)
        yield f"route header layer {layer}", row, arena.header_row(layer + 1) - row
        yield f"slot table layer {layer}", table.row_ptr(layer), 4 * cfg.n_experts


def _reads_back(engine: Engine, end: int, names: Names) -> Iterator[ReadBack]:
    """What the host reads between this segment and the next: the routing, and the scores that it selects rows by."""
    arena, cfg = engine.arena, engine.config
    headers = names.place(arena.headers_ptr, arena.headers_nbytes, "r")
    yield ReadBack(what="routing headers", nbytes=arena.headers_nbytes, place=headers)
    if end in cfg.index_source_layers:
        scores = engine.buffers.index_scores
        nbytes = 4 * (engine.max_context // cfg.compress_ratios[end])
        yield ReadBack(
            what=f"index scores of layer {end}, at most", nbytes=nbytes, place=names.place(scores.ptr, nbytes, "r")
        )


def _made_up(engine: Engine, n: int) -> list[int]:
    """Token ids that every model of this kind has."""
    cfg = engine.config
    known = [i for i in range(min(cfg.vocab, 256)) if i != cfg.image_token]
    ids: list[int] = np.random.default_rng(0).choice(known, n).tolist()
    return ids
