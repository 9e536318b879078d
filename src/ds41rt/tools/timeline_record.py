"""Records decode steps: the calls into the backend, and around them the spans of the engine's own methods.

A `Recorder` puts a timed function in front of some methods, on the objects of one engine: an engine without a recorder
runs no line of this file.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41rt.engine import DecodeSequence, Engine
from ds41rt.tools.timeline_backend import HostSpan, TimelineBackend, Token


class Recorder:
    """Records tokens of an engine that was opened on a `TimelineBackend`. Close it before the engine."""

    def __init__(self, engine: Engine, backend: TimelineBackend) -> None:
        self._engine = engine
        self._backend = backend
        self._main = threading.get_ident()
        self._hooked: list[tuple[object, str]] = []
        self.tokens: list[Token] = []
        machine, bodies = engine.machine, engine.bodies
        self._hook(machine, "launch_once", "segment", self._segment, _outcome)
        self._hook(machine, "record_body", "capture", lambda idx, *_: f"record layer {idx}")
        self._hook(machine, "record_attn_in", "capture", lambda idx, *_: f"record attention input of layer {idx}")
        self._hook(machine, "close_or_disable", "capture", lambda cap, *_: f"make the graph of segment {cap.owner}")
        self._hook(bodies, "prepare", "prepare", lambda idx, *_: f"prepare segment {idx}")
        self._hook(bodies, "source_attention", "attention", lambda idx, *_: f"source attention of layer {idx}")
        self._hook(bodies, "read_headers", "headers", lambda *_: "read headers")
        self._hook(bodies, "restore", "rerun", lambda idx, *_: f"restore the snapshot of layer {idx}")
        self._hook(bodies, "eager_layer", "layer", lambda idx, *_: f"{self._why(idx)} layer {idx}")
        self._hook(bodies, "ffn_eager", "layer", lambda idx, *_: f"{self._why(idx)} ffn half of layer {idx}")
        self._hook(bodies, "load_engram", "engram", lambda *_: "engram rows")
        self._hook(engine._fetcher, "fetch", "fetch", lambda layer, *_, **__: f"fetch for layer {layer}")
        self._hook(engine._source, "read_expert", "read", _read_name)

    def step(self, seq: DecodeSequence, token: int) -> NDArray[np.float32]:
        """`Engine.decode_step`, recorded. Raises what it raises; such a token is not kept."""
        engine, now = self._engine, Token(seq.position, token)
        before = engine.stats()
        with self._backend.recording(now, engine.stream):
            span = HostSpan("step", "token", f"decode step {now.position}", time.perf_counter_ns())
            now.host.append(span)
            try:
                logits = engine.decode_step(seq, token)
            finally:
                span.end_ns = time.perf_counter_ns()
        after = engine.stats()
        now.counted = {
            "captures": after.captures - before.captures,
            "graph_launches": after.replays - before.replays,
            "clean_replays": after.clean_replays - before.clean_replays,
            "falls": {kind: n - before.falls[kind] for kind, n in after.falls.items()},
            "misses": after.misses - before.misses,
            "expert_nbytes_read": after.expert_nbytes_read - before.expert_nbytes_read,
        }
        self.tokens.append(now)
        return logits

    def close(self) -> None:
        """Take the hooks away. Idempotent."""
        while self._hooked:
            owner, method = self._hooked.pop()
            delattr(owner, method)  # the class's own comes out again
        self._backend.close_events()

    def _hook(
        self,
        owner: object,
        method: str,
        category: str,
        name: Callable[..., str],
        outcome: Callable[[Any], dict[str, Any]] = lambda result: {},
    ) -> None:
        """From now on `owner.method` is a span, called `name(*its arguments)` when it begins."""
        real, backend = getattr(owner, method), self._backend

        def timed(*args: Any, **kwargs: Any) -> Any:
            token = backend.token
            if token is None:
                return real(*args, **kwargs)
            span = HostSpan(self._track(), category, name(*args, **kwargs), time.perf_counter_ns())
            token.host.append(span)
            try:
                result = real(*args, **kwargs)
                span.args = outcome(result)
                return result
            finally:
                span.end_ns = time.perf_counter_ns()

        setattr(owner, method, timed)
        self._hooked.append((owner, method))

    def _track(self) -> str:
        thread = threading.current_thread()
        return "step" if thread.ident == self._main else thread.name

    def _segment(self, graph: Any) -> str:
        """The name of a launch, which the launch itself does not know."""
        name = f"segment {graph.moe_layers[0]} to {graph.moe_layers[-1]}"
        self._backend.graph_names[graph.graph_exec] = name
        return name

    def _why(self, idx: int) -> str:
        seg = self._engine.machine.seg
        return "rerun" if seg.segment_mode and not seg.disabled and idx < seg.eager_until else "eager"


def _read_name(layer: int, expert: int, out: NDArray[np.uint8], offset: int = 0) -> str:
    return f"read expert {layer}.{expert}, {out.size} bytes from {offset} on"


def _outcome(fall: Any) -> dict[str, Any]:
    """What a replay came to."""
    return {"fall": "none"} if fall is None else {"fall": fall.kind, "layer": fall.layer, "fetched": fall.fetched}
