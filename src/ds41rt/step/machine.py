"""The layer-state machine: one token as graph segments over streamed experts, or eagerly.

A segment starts in the middle of its owner (layer 0, or a layer whose attention needs the host) and ends with the
attention input of the next owner. Its graph is launched at the owner's step; the layers it covered then return at once.
The headers that the replay left behind say which layer, if any, ran on a missing expert: its snapshot is restored and
it and the layers after it, up to the segment's end, run eagerly. On a *capture token* the bodies are recorded on a
second stream while the same token runs eagerly on the compute stream, so a bad recording cannot harm the token.

This file must not know which backend runs, how a layer computes, or any setting beyond its two flags. It is not
thread-safe: one thread steps.
"""

from collections.abc import Sequence
from functools import partial

from ds41rt.cu.backend import Event, GpuBackend, Graph, Stream
from ds41rt.cu.result import CudaError, Status
from ds41rt.errors import Ds41Error
from ds41rt.log import Logger
from ds41rt.moe.header import Fall
from ds41rt.step.bodies_protocol import LayerBodies
from ds41rt.step.state import Classes, LayerRole, Recording, SegCapture, SegGraph, SegState

logger = Logger("ds41rt.step")


def capturable(role: LayerRole) -> bool:
    """True when the layer's attention needs no host work, so that a graph may contain all of it."""
    return not role.is_kv_source and not role.is_index_source


def geometry(roles: Sequence[LayerRole], s: int) -> tuple[int, Classes]:
    """(end, classes) of the segment that layer `s` owns: it covers `s`..end-1 and the attention input of `end`."""
    covered = [s]
    while covered[-1] + 1 < len(roles) and capturable(roles[covered[-1] + 1]):
        covered.append(covered[-1] + 1)
    ratios = [roles[i].ratio for i in covered if capturable(roles[i])]
    return covered[-1] + 1, (any(r > 0 for r in ratios), any(r == 0 for r in ratios))


class StepMachine:
    """Steps tokens through `bodies` on `compute_stream`.

    `step_graph`: use segments where the token allows it (the caller has made sure that routing runs on the device and
    that nothing asks for a synchronisation per layer); otherwise every token is eager. `log`: one line per token.
    """

    def __init__(
        self, backend: GpuBackend, bodies: LayerBodies, compute_stream: Stream, *, step_graph: bool, log: bool
    ) -> None:
        self.backend = backend
        self.bodies = bodies
        self.stream = compute_stream
        self.n = bodies.n_layers
        self.seg = SegState(self.n)
        self.position = 0
        self.log = log
        roles = [bodies.role(i) for i in range(self.n)]
        self.owners = frozenset(i for i in range(self.n) if i == 0 or not capturable(roles[i]))
        self.geometry = {s: geometry(roles, s) for s in self.owners}
        # The layers whose window rings layer i's step may use: a whole segment for an owner.
        self.reach = [range(i, self.geometry[i][0] if i in self.owners else i + 1) for i in range(self.n)]
        self.step_graph = step_graph and capturable(roles[0])
        if step_graph and not self.step_graph:
            logger.warning("step graph not usable, the step runs eagerly", reason="layer 0 is a source layer")

    def run_token(self, position: int) -> None:
        """Step one token of the current sequence at `position` through all layers.

        Any exception leaves no capture open and no mark set, keeps the mode on, and reaches the caller: the same
        position can then be run again, and no other.
        """
        if self.seg.in_step:
            self.abort_step()
        self.seg.in_step = True
        self.position = position
        try:
            for idx in range(self.n):
                self.step_seg(idx)
        except BaseException:
            self.abort_step()
            raise
        self.end_token()

    def step_seg(self, idx: int) -> None:
        """One layer's step. The order of the decisions is the protocol."""
        seg, bodies, stream, n = self.seg, self.bodies, self.stream, self.n
        if idx == 0:
            self.new_step()
        else:
            self.sync_sequence(self.reach[idx])
        if not seg.segment_mode:
            return bodies.eager_layer(idx, stream)
        if idx < seg.skip_until:
            return None
        if seg.ffn_only_at == idx:
            seg.ffn_only_at = None
            return bodies.ffn_eager(idx, stream)
        if idx < seg.eager_until:
            return bodies.eager_layer(idx, stream)
        owner = idx in self.owners
        rec = self.recording()

        if seg.capturing is not None:
            cap, seg.capturing = seg.capturing, None
            if cap.owner >= idx:
                raise Ds41Error(f"step graph: layer {idx} met a capture that layer {cap.owner} owns")
            if owner:
                # The closer: its recorded attention input ends the segment before. Below, it makes the same input
                # eagerly, like any owner that no replay reached.
                error = self.record_attn_in(idx, rec)
                self.close_or_disable(cap, idx, error)
            else:
                error = self.record_body(idx, cap.rows_b, rec)
                cap.moe_layers.append(idx)
                if error is not None or idx + 1 == n:
                    self.close_or_disable(cap, n, error)
                else:
                    seg.capturing = cap
                return bodies.eager_layer(idx, stream)
        if seg.disabled:
            return bodies.eager_layer(idx, stream)
        if not owner:
            raise Ds41Error(f"step graph: layer {idx} reached outside any segment")

        if idx > 0 and seg.skip_until != idx:
            bodies.attn_in(idx, stream)
        end, classes = self.geometry[idx]
        rows_b = bodies.prepare(idx, classes, end, stream)
        graph = seg.graphs[idx]
        if graph is not None and (graph.end, graph.classes, graph.rows_b) != (end, classes, rows_b):
            self.drop_graphs([idx], reason="the segment bakes other rows")
            graph = None

        if graph is not None:
            fall = self.launch_once(graph)
            if fall is None:
                seg.skip_until = end
                return None
            logger.debug("miss fall", segment=idx, layer=fall.layer, kind=fall.kind, fetched=fall.fetched)
            bodies.restore(fall.layer, stream)
            seg.eager_until = end
            if fall.layer == idx:
                return bodies.ffn_eager(idx, stream)
            seg.skip_until = fall.layer
            seg.ffn_only_at = fall.layer
            return None

        # No graph yet: record from here on while this token runs eagerly.
        error = self.record_body(idx, rows_b, rec)
        cap = SegCapture(idx, [idx], classes, rows_b)
        if error is not None or idx + 1 == n:
            self.close_or_disable(cap, n, error)
        else:
            seg.capturing = cap
        if idx == 0:
            return bodies.eager_layer(idx, stream)
        return bodies.ffn_eager(idx, stream)  # its attention ran in `prepare`

    def new_step(self) -> None:
        """Layer 0's part of the step: clear the marks, latch the mode, compare what graphs bake, start the token."""
        seg = self.seg
        seg.clear_marks()
        if seg.doomed:
            self.destroy_doomed()  # what an earlier token could not
        seg.segment_mode = self.step_graph and seg.wanted and self.position > 0 and not seg.disabled
        if seg.segment_mode:
            baked = self.bodies.baked()
            if baked != seg.baked:
                self.drop_graphs(range(self.n), reason="baked buffers changed")
                seg.baked = baked
            if seg.recording is None:
                self.create_recording()
        self.sync_sequence(range(self.n))
        self.bodies.start_token(self.position, self.stream)

    def end_token(self) -> None:
        seg = self.seg
        seg.in_step = False
        seg.tokens += 1
        seg.segment_tokens += seg.segment_mode
        if self.log:
            logger.info(
                "step graph token",
                position=self.position,
                segment_mode=seg.segment_mode,
                captures=seg.captures,
                launches=seg.launches,
                clean_replays=seg.clean_replays,
                falls=sum(seg.falls.values()),
            )

    def abort_step(self) -> None:
        """Abandon the token in flight; graphs that were already complete and the mode stay.

        The compute stream is drained, because the next attempt rewrites pinned memory that its work may still read.
        """
        seg = self.seg
        seg.clear_marks()
        self.abort_open_capture()
        self.destroy_doomed()
        try:
            self.backend.synchronize(self.stream)
        except CudaError as error:
            logger.warning("compute stream failed while a step was abandoned", error=str(error))
        seg.in_step = False

    # ---- the sequence block

    def note_window(self, layer: int, window: int) -> None:
        """Note a layer's window ring, every step in any mode; a change raises the generation."""
        if self.seg.windows[layer] != window:
            self.seg.windows[layer] = window
            self.seg.generation += 1

    def sync_sequence(self, layers: range) -> None:
        """Note the rings of `layers`; upload the sequence block if sequence or generation is not the uploaded one.

        Graphs reach a sequence through the block alone, so nothing is captured again.
        """
        for layer in layers:
            self.note_window(layer, self.bodies.window(layer))
        key = (self.bodies.sequence_key(), self.seg.generation)
        if key != self.seg.uploaded:
            self.seg.uploaded = None
            self.bodies.upload_sequence(self.stream)
            self.seg.uploaded = key

    # ---- replay

    def launch_once(self, graph: SegGraph) -> Fall | None:
        """Launch a segment and read its headers; counts the outcome. Returns the first layer to run again, or None."""
        seg = self.seg
        self.backend.launch_graph(graph.graph_exec, self.stream)
        fall = self.bodies.read_headers(graph.moe_layers, self.stream)
        seg.launches += 1
        if fall is None:
            seg.clean_replays += 1
        else:
            seg.falls[fall.kind] += 1
            seg.falls_by_layer[fall.layer] += 1
        return fall

    # ---- recording: a `Ds41Error` is a capture failure and returned; anything else is a bug or an interrupt and passes

    def recording(self) -> Recording:
        if self.seg.recording is None:
            raise Ds41Error("step graph: no recording streams; layer 0 was not stepped first")
        return self.seg.recording

    def record_body(self, idx: int, rows_b: int | None, rec: Recording) -> Ds41Error | None:
        """Record a layer: an owner opens the capture and, layer 0 apart, starts at its snapshot; any other is whole."""
        try:
            if idx in self.owners:
                self.backend.begin_capture(rec.cap_stream)
            if idx == 0 or idx not in self.owners:
                self.bodies.body_attn(idx, rows_b, rec.cap_stream)
            self.bodies.save_nodes(idx, rec.cap_stream)
            self.bodies.body_ffn(idx, rec.cap_stream, rec.fork)
        except Ds41Error as error:
            return error
        return None

    def record_attn_in(self, idx: int, rec: Recording) -> Ds41Error | None:
        """Append the closing owner's attention input to the open capture."""
        try:
            self.bodies.attn_in(idx, rec.cap_stream)
        except Ds41Error as error:
            return error
        return None

    def close_or_disable(self, cap: SegCapture, end: int, error: Ds41Error | None) -> None:
        """End the open capture as the segment cap.owner..end, or turn the mode off if anything about it failed."""
        seg = self.seg
        if error is None:
            try:
                graph = self.backend.end_capture(self.recording().cap_stream)
                # Only what is instantiated from it is kept.
                seg.doomed.append((f"template of segment {cap.owner}", partial(self.backend.destroy_graph, graph)))
                self.refuse_memory_nodes(graph)
                graph_exec = self.backend.instantiate(graph)
                seg.graphs[cap.owner] = SegGraph(graph_exec, end, tuple(cap.moe_layers), cap.classes, cap.rows_b)
            except Ds41Error as failed:
                error = failed
        if error is not None:
            return self.disable(error, cap.owner)
        seg.captures += 1
        logger.info("segment captured", owner=cap.owner, end=end, moe_layers=len(cap.moe_layers))
        self.destroy_doomed()

    def refuse_memory_nodes(self, graph: Graph) -> None:
        """Raise `Ds41Error` for a graph that allocates or frees: its memory is in no ledger, and a replay that is not
        over keeps the next one out."""
        for node in self.backend.describe_graph(graph).nodes:
            if node.kind in ("alloc", "free"):
                raise Ds41Error(
                    f"the captured graph has a node that would {node.kind} memory in every replay: node {node.index}, "
                    f"{node.label!r}; allocate before the capture and keep the memory until the graph is destroyed"
                )

    def disable(self, error: Ds41Error, owner: int) -> None:
        """Turn the mode off for good: the token in flight finishes eagerly and no graph is kept."""
        seg = self.seg
        seg.disabled = True
        seg.eager_until = self.n
        seg.capture_failures += 1
        self.doom_graphs(range(self.n))
        logger.warning("capture failed, step graph off, the step runs eagerly", owner=owner, error=str(error))
        self.abort_open_capture()
        self.destroy_doomed()

    def abort_open_capture(self) -> None:
        """End a capture if the recording stream is in one: the stream is asked, not our marks."""
        if self.seg.recording is not None:
            try:
                self.backend.abort_capture(self.seg.recording.cap_stream)
            except CudaError as error:
                logger.warning("open capture could not be aborted", error=str(error))

    # ---- what the machine owns on the device

    def create_recording(self) -> None:
        """Create the recording streams and events. If one fails, those made are destroyed and the mode goes off."""
        seg, backend = self.seg, self.backend
        streams: list[Stream] = []
        events: list[Event] = []
        try:
            for name in ("step recording", "step recording side"):
                streams.append(backend.create_stream(name))
            for name in ("recorded fork", "recorded join"):
                events.append(backend.create_event(name))
            seg.recording = Recording(streams[0], streams[1], events[0], events[1])
        except Ds41Error as error:
            self.disable(error, 0)
        finally:
            if seg.recording is None:
                self.doom_recording(streams, events)
                self.destroy_doomed()

    def drop_graphs(self, owners: Sequence[int], reason: str) -> None:
        """Destroy captured segments that will be recorded again."""
        dropped = self.doom_graphs(owners)
        if dropped:
            self.seg.recaptures += dropped
            logger.info("recapture", reason=reason, segments=dropped, first_owner=owners[0])
            self.destroy_doomed()

    def doom_graphs(self, owners: Sequence[int]) -> int:
        """Take graphs out of use, to be destroyed by `destroy_doomed`; returns how many there were."""
        seg = self.seg
        dropped = 0
        for owner in owners:
            graph = seg.graphs[owner]
            if graph is not None:
                seg.doomed.append((f"graph of segment {owner}", partial(self.backend.destroy_exec, graph.graph_exec)))
                seg.graphs[owner] = None
                dropped += 1
        return dropped

    def doom_recording(self, streams: Sequence[Stream], events: Sequence[Event]) -> None:
        self.seg.doomed += [("recording event", partial(self.backend.destroy_event, e)) for e in events]
        self.seg.doomed += [("recording stream", partial(self.backend.destroy_stream, s)) for s in streams]

    def destroy_doomed(self) -> None:
        """Destroy what is out of use. What cannot be destroyed is logged, kept, and tried again the next time."""
        doomed = self.seg.doomed
        at = 0
        while at < len(doomed):
            what, destroy = doomed[at]
            try:
                destroy()
            except CudaError as error:
                if error.status is Status.INVALID_HANDLE:
                    del doomed[at]  # an interrupt came between its destruction and the line below
                    continue
                logger.warning("handle not destroyed, kept for another try", what=what, error=str(error))
                at += 1
            else:
                del doomed[at]

    def close(self) -> None:
        """Drain the compute stream and destroy graphs, streams and events. Idempotent; the backend stays open."""
        seg = self.seg
        self.abort_step()
        self.doom_graphs(range(self.n))
        if seg.recording is not None:
            rec, seg.recording = seg.recording, None
            self.doom_recording([rec.cap_stream, rec.cap_side], [rec.ev_fork, rec.ev_join])
        self.destroy_doomed()
