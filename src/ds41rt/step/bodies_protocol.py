"""What the layer-state machine asks of the layers. Their arithmetic, buffers and caches live behind this.

Every method enqueues on the given stream and may do host work; the ones marked *recorded* are also called on a stream
in capture and must then enqueue device work only: no host copies, no read-back, nothing that changes per token baked
into a node (position, ring slot, selection and all buffers of a sequence come from device memory).

The invariant that makes a fall safe: a recorded body holds no state that a second run would spoil. It writes scratch,
the streams (which the snapshot restores) and ring slots derived from the position (which a rerun writes again). No
counters, no shift registers, no cell that says what was published last.
"""

from typing import Protocol

from ds41rt.cu.backend import Stream
from ds41rt.moe.header import Fall
from ds41rt.step.state import Classes, Fork, LayerRole


class LayerBodies(Protocol):
    """The layers of one engine, bound to whatever sequence is being stepped."""

    @property
    def n_layers(self) -> int: ...

    def role(self, idx: int) -> LayerRole:
        """Constant for the life of the engine."""

    def baked(self) -> tuple[int, ...]:
        """Every address that recorded nodes contain: hidden, streams, normed, arena bases and offsets, slot table,
        headers, snapshots, the sequence block. The graphs are destroyed when it changes between two tokens."""

    def window(self, idx: int) -> int:
        """Address of layer `idx`'s window ring in the current sequence."""

    def sequence_key(self) -> tuple[int, int]:
        """(id of the current sequence, count of the moves of its buffers other than the window rings)."""

    def upload_sequence(self, stream: Stream) -> None:
        """Write the current sequence's addresses to the sequence block in device memory."""

    def start_token(self, position: int, stream: Stream) -> None:
        """Before layer 0, in every mode: position and token to the device, cached decode uploads dropped, and at
        position 0 the sequence's caches reset. Must not move a buffer of the sequence. The embedding and the reset of
        the delayed mix come here, or first in layer 0's body."""

    def attn_in(self, idx: int, stream: Stream) -> None:
        """Attention input of a segment's owner (never layer 0): engram rows added to the streams, then mixes,
        collapse and norm. *Recorded*, as the last part of the segment before."""

    def prepare(self, idx: int, classes: Classes, end: int, stream: Stream) -> int | None:
        """Everything of the segment idx..end-1 that only the host can do, so that its graph may be launched next.

        Owner 0 preloads the engram rows of all layers; any other owner runs its own attention, eagerly, on the input
        that `attn_in` made, and drops cached decode uploads. Then position and the selections of `classes` are
        uploaded if they changed, and the expert cache's slot changes are written to the slot table.
        Returns the compressed-row cache that the segment's bodies bake (None: they bake none).
        """

    def body_attn(self, idx: int, rows_b: int | None, stream: Stream) -> None:
        """*Recorded*. A capturable layer from its engram rows and attention input to `attn_out`, mixes finished."""

    def save_nodes(self, idx: int, stream: Stream) -> None:
        """*Recorded*. Layer `idx`'s snapshot, taken before the attention's expand."""

    def restore(self, idx: int, stream: Stream) -> None:
        """Bring back what `save_nodes(idx)` saved."""

    def body_ffn(self, idx: int, stream: Stream, fork: Fork) -> None:
        """*Recorded*. The ffn half on device routing, shared expert on `fork`; for the last layer the final collapse
        as well."""

    def eager_layer(self, idx: int, stream: Stream) -> None:
        """The whole layer: engram rows, attention input, attention, `ffn_eager`."""

    def ffn_eager(self, idx: int, stream: Stream) -> None:
        """The ffn half with experts fetched as they are routed; for the last layer the final collapse as well."""

    def read_headers(self, layers: tuple[int, ...], stream: Stream) -> Fall | None:
        """After a launch: one read-back of the routing headers, which drains `stream`; then layer by layer an epoch of
        the expert cache, the check of the plan slots, and touch or fetch of the picks. Stops at the first layer that
        has to run again, with its experts made resident and its slot-table entries right; looks at no layer after it.
        """
