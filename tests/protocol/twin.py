"""The all-eager twin: what any text must give, from an engine without graphs that has every expert resident.

Works on either backend, because it reads device memory by copies only. Each prefix of a text is run once a session.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds41rt.cu.backend import GpuBackend, Stream, open_backend
from ds41rt.engine import DecodeSequence, Engine
from ds41rt.step.hash_log import hash64

MAX_CONTEXT = 64
_N_SEQUENCES = 6
_N_KEPT = 30_000


@dataclass(frozen=True, slots=True)
class Expected:
    """One token: logits, the sequence's state after it, every layer's streams (hashed) and picks.

    `state` is all that later steps can read; `pool` is the whole ratio-2 pool, of which they read less.
    """

    logits: bytes
    state: bytes
    pool: bytes
    streams: list[int]
    picks: list[list[int]]


class Reader:
    """Copies device memory into a pinned image: `put` enqueues, `take` waits and gives the bytes back in order."""

    def __init__(self, backend: GpuBackend, nbytes: int) -> None:
        self._backend = backend
        self._host = backend.alloc_pinned("test image", nbytes)
        self._parts: list[tuple[int, int]] = []
        self._end = 0

    def put(self, addr: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            self._backend.copy_d2h(self._host, addr, nbytes, stream, self._end, "test")
        self._parts.append((self._end, nbytes))
        self._end += nbytes

    def take(self, stream: Stream) -> list[NDArray[np.uint8]]:
        self._backend.synchronize(stream)
        out = [self._host.array[at : at + nbytes].copy() for at, nbytes in self._parts]
        self._parts.clear()
        self._end = 0
        return out

    def close(self) -> None:
        self._backend.free_pinned(self._host)


def read_state(reader: Reader, engine: Engine, seq: DecodeSequence) -> tuple[bytes, bytes]:
    """Hashes of (what later steps can read of the sequence, the whole of its pools)."""
    cfg, buf, n = engine.config, seq.step.buffers, seq.position
    row, stream = 2 * cfg.head_dim, engine.stream
    for ring in buf.ring:
        reader.put(ring, min(n, cfg.window) * row, stream)
    for source in cfg.kv_source_layers:
        rows = n // cfg.compress_ratios[source]
        reader.put(buf.comp[source], rows * row, stream)
        reader.put(buf.ikey[source], rows * 2 * cfg.index_head_dim, stream)
        # at an odd position the next step pools slot 0 with its own
        reader.put(buf.pool.get(source, 0), 8 * cfg.head_dim * (n % 2) * (source in buf.pool), stream)
    n_state = len(reader._parts)
    for pool in buf.pool.values():
        reader.put(pool, min(n, 2) * 8 * cfg.head_dim, stream)
    parts = reader.take(stream)
    return digest(parts[:n_state]), digest(parts[n_state:])


def digest(parts: list[NDArray[np.uint8]]) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part.tobytes())
    return state.digest()


class StreamsSeen:
    """A step observer: the hash of every layer's streams, and how often each layer was seen since `clear`."""

    def __init__(self, reader: Reader, n_layers: int) -> None:
        self._reader = reader
        self.hashes = [0] * n_layers
        self.times = [0] * n_layers

    def clear(self) -> None:
        self.times = [0] * len(self.times)

    def selection(self, layer: int, rows: NDArray[np.int32]) -> None: ...

    def point(self, position: int, layer: int, part: str, addr: int, nbytes: int, stream: Stream) -> None:
        if part == "streams":
            self._reader.put(addr, nbytes, stream)
            self.hashes[layer] = hash64(self._reader.take(stream)[0])
            self.times[layer] += 1


class Twin:
    """Expected values of any prefix. A few sequences are kept, so that texts which alternate need no replay."""

    def __init__(self, path: Path, backend_name: str) -> None:
        self._backend, _ = open_backend(backend_name)
        self._engine = Engine.open(
            path, mode="eager", backend=self._backend, max_context=MAX_CONTEXT, device_route=True
        )
        self._reader = Reader(self._backend, 1 << 20)
        self._seen = StreamsSeen(self._reader, self._engine.config.n_layers)
        self._engine.observe(self._seen)
        self._known: dict[tuple[int, ...], Expected] = {}
        self._at: OrderedDict[tuple[int, ...], DecodeSequence] = OrderedDict()
        cfg = self._engine.config
        source, nbytes = self._engine._source, self._engine.arena.layout.nbytes
        self.expert_bytes = np.empty((cfg.n_layers * cfg.n_experts, nbytes), np.uint8)
        for i, out in enumerate(self.expert_bytes):
            source.read_expert(*divmod(i, cfg.n_experts), out)
        legal = np.setdiff1d(np.arange(cfg.vocab), [cfg.image_token])
        self.texts: list[list[int]] = []
        for seed in range(4):
            text: list[int] = np.random.default_rng(seed).choice(legal, MAX_CONTEXT).tolist()
            text[30:36] = text[20:26]  # n-grams and experts come back
            self.texts.append(text)

    def expect(self, tokens: tuple[int, ...]) -> Expected:
        """What the last of `tokens` gives."""
        found = self._known.get(tokens)
        if found is not None:
            return found
        if len(self._known) > _N_KEPT:
            self._known.clear()
        seq = self._at.pop(tokens[:-1], None)
        if seq is None:
            seq = self._engine.new_sequence() if len(self._at) < _N_SEQUENCES else self._at.popitem(last=False)[1]
            seq.reset()
            for i in range(len(tokens) - 1):
                self._step(seq, tokens[: i + 1])
        expected = self._step(seq, tokens)
        self._at[tokens] = seq
        return expected

    def _step(self, seq: DecodeSequence, tokens: tuple[int, ...]) -> Expected:
        logits = self._engine.decode_step(seq, tokens[-1])
        if tokens not in self._known:
            state, pool = read_state(self._reader, self._engine, seq)
            picks = [row.picks for row in self._engine.router.picks if row is not None]
            self._known[tokens] = Expected(logits.tobytes(), state, pool, list(self._seen.hashes), picks)
        return self._known[tokens]

    def close(self) -> None:
        self._engine.close()
        self._reader.close()
        self._backend.close()
