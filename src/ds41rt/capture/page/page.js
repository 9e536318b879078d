// What is chosen, in the page's hash: every state is a link. Pointer and keys change the hash, the hash the page.

const KEYS = ["graph", "node", "buffer", "off", "kernel", "layer", "q", "colour", "size"];
const COLOURS = ["kind", "kernel", "layer", "weight"];
const NOTHING = Object.fromEntries(KEYS.slice(0, 7).map((key) => [key, undefined]));
const [main, panel, tip, box] = ["picture", "panel", "tip", "q"].map((id) => document.getElementById(id));
let state = {};
let marked = []; // the highlighted nodes, in order
let drawn = {}; // what the picture was drawn for

// A node is chosen inside of what is highlighted; anything else replaces it.
const toNode = (node) => ({graph: node.graph.name, node: String(node.index)});
const toGraph = (graph) => ({...NOTHING, graph: graph.name});
const toBuffer = (key, off) => ({...NOTHING, buffer: key, off});
const toKernel = (name) => ({...NOTHING, kernel: name});
const toLayer = (layer) => ({...NOTHING, layer: String(layer)});

function hashOf(changes) {
  const next = {...state, ...changes};
  const said = new URLSearchParams();
  for (const key of KEYS) if (next[key] !== undefined && next[key] !== "") said.set(key, next[key]);
  return "#" + said.toString();
}

/** Goes to another state; in the history only if `kept`. */
function go(changes, kept) {
  const hash = hashOf(changes);
  if (hash === location.hash || (hash === "#" && !location.hash)) return;
  if (kept) location.hash = hash;
  else {
    history.replaceState(null, "", hash);
    show();
  }
}

function chosenGraph() {
  return state.graph === undefined ? undefined : graphs.find((graph) => graph.name === state.graph);
}

function chosenNode() {
  const graph = state.graph === undefined ? graphs[0] : chosenGraph();
  return state.node === undefined || !graph ? undefined : graph.nodes[Number(state.node)];
}

/** The highlighted nodes by the class that marks them; undefined where nothing is highlighted. */
function highlights() {
  if (state.buffer !== undefined) {
    const uses = buffers.has(state.buffer) ? usesOf(buffers.get(state.buffer), state.off) : [];
    return new Map([...accesses(uses)].map(([node, access]) => [node, markClass(access)]));
  }
  const list = state.kernel !== undefined ? (kernels.get(state.kernel) || {nodes: []}).nodes
    : state.layer !== undefined ? (layers.get(Number(state.layer)) || {nodes: []}).nodes
    : state.q !== undefined ? search(state.q) : undefined;
  return list && new Map(list.map((node) => [node, "mark-x"]));
}

/** What the link names and there is not, if anything: its key. */
function lost() {
  if (state.graph !== undefined && !chosenGraph()) return "graph";
  if (state.node !== undefined && !chosenNode()) return "node";
  if (state.buffer !== undefined && !buffers.has(state.buffer)) return "buffer";
  if (state.kernel !== undefined && !kernels.has(state.kernel)) return "kernel";
  return state.layer !== undefined && !layers.has(Number(state.layer)) ? "layer" : undefined;
}

function view() {
  const key = lost();
  const where = key === "node" && chosenGraph() ? `Graph ${state.graph}` : "This dump";
  return [key && el("p", {class: "bad"}, `${where} has no ${key} ${state[key]}.`), chosenView()];
}

function chosenView() {
  const node = chosenNode();
  if (node) return nodeView(node);
  if (chosenGraph()) return graphView(chosenGraph());
  if (buffers.has(state.buffer)) return bufferView(buffers.get(state.buffer), state.off);
  if (kernels.has(state.kernel)) return kernelView(kernels.get(state.kernel));
  if (layers.has(Number(state.layer))) return layerView(layers.get(Number(state.layer)));
  if (state.q !== undefined) return searchView(state.q, search(state.q));
  return overview();
}

function show() {
  const said = new URLSearchParams(location.hash.slice(1));
  state = Object.fromEntries(KEYS.filter((key) => said.has(key)).map((key) => [key, said.get(key)]));
  if (!COLOURS.includes(state.colour)) delete state.colour;
  document.body.dataset.colour = state.colour || "kind";
  draw();
  const found = highlights();
  const node = chosenNode();
  marked = found ? nodes.filter((n) => found.has(n)) : [];
  mark(found, node);
  for (const graph of graphs) if (graph.over) graph.over.replaceChildren(...overlay(graph, node));
  panel.replaceChildren(...[view()].flat(Infinity).filter((part) => part));
  panel.scrollTop = 0;
  if (document.activeElement !== box) box.value = state.q || "";
  const at = marked.indexOf(node);
  const hits = at < 0 ? plural(marked.length, "node") : `${at + 1} of ${marked.length}`;
  document.getElementById("hits").textContent = found ? hits : "";
  press("colour", state.colour || "kind");
  press("size", state.size || "fit");
  reveal(node);
}

function mark(found, node) {
  const first = node || marked[0] || nodes[0];
  const near = new Set(node ? [...node.next, ...node.deps].map((i) => node.graph.nodes[i]) : []);
  main.classList.toggle("muted", found !== undefined);
  for (const n of nodes) {
    const classes = n.drawn.classList;
    classes.remove("mark-r", "mark-w", "mark-rw", "mark-x");
    if (found && found.has(n)) classes.add(found.get(n));
    classes.toggle("dim", found !== undefined && !found.has(n) && n !== node);
    classes.toggle("chosen", n === node);
    classes.toggle("beside", near.has(n));
    n.drawn.setAttribute("tabindex", n === first ? 0 : -1);
  }
}

function press(group, value) {
  for (const button of document.querySelectorAll(`#${group} button`)) {
    button.setAttribute("aria-pressed", button.value === value);
  }
}

/** The edges of the chosen node, drawn over all others. */
function overlay(graph, node) {
  if (!node || node.graph !== graph) return [];
  return [...node.deps.map((i) => [graph.nodes[i], node]), ...node.next.map((i) => [node, graph.nodes[i]])]
    .map(([from, to]) => svg("path", {d: edgePath(graph.lane, from, to).d}));
}

function draw() {
  const wanted = state.size === "names" ? 92 : Number(state.size) >= 6 ? Math.min(200, Number(state.size)) : "fit";
  const now = {wanted, width: main.clientWidth, height: wanted === "fit" ? main.clientHeight : 0};
  if (Object.keys(now).every((key) => now[key] === drawn[key])) return;
  drawn = {...now, pitch: drawPicture(main, wanted)};
}

function reveal(node) {
  if (!node) {
    const graph = chosenGraph();
    const first = graph ? graph.svg || main : marked.length ? marked[0].drawn : null;
    if (first && first !== main && !marked.some((n) => inSight(n.drawn))) first.scrollIntoView({block: "nearest"});
    return;
  }
  const typing = document.activeElement === box || panel.contains(document.activeElement);
  if (!typing) node.drawn.focus({preventScroll: true});
  if (!inSight(node.drawn)) node.drawn.scrollIntoView({block: "center", inline: "nearest"});
}

function inSight(drawnNode) {
  const [inner, outer] = [drawnNode.getBoundingClientRect(), main.getBoundingClientRect()];
  return inner.top >= outer.top && inner.bottom <= outer.bottom;
}

// ---- keys

/** One step closer to the overview: the node, then the graph or what is highlighted, then the search. */
function escape() {
  if (state.node !== undefined) go({graph: undefined, node: undefined}, true);
  else go(NOTHING, true);
}

/** The node of `list` (indices) in the same row, else in the nearest one. */
function nearest(node, list) {
  const far = (i) => Math.abs(node.graph.nodes[i].row - node.row);
  const best = list.slice().sort((a, b) => far(a) - far(b) || a - b)[0];
  return best === undefined ? undefined : node.graph.nodes[best];
}

/** Along an edge to a row further up (-1) or down (1), else to the row's nearest node, else to the next lane. */
function across(node, way) {
  const all = node.graph.nodes;
  const further = (i) => (all[i].row - node.row) * way > 0;
  const edge = nearest(node, node.next.filter(further)) || nearest(node, node.deps.filter(further));
  if (edge) return edge;
  const box = node.drawn.getBoundingClientRect();
  let best;
  let least = Infinity;
  for (const other of nodes) {
    const there = other.drawn.getBoundingClientRect();
    const down = (there.top - box.top) * way;
    const cost = down * 4 + Math.abs(there.left - box.left);
    if (down > 4 && cost < least) [best, least] = [other, cost];
  }
  return best;
}

function step(way) {
  if (!marked.length) return;
  const node = chosenNode();
  const at = marked.indexOf(node);
  const from = at >= 0 ? at : way > 0 ? -1 : 0;
  go(toNode(marked[(from + way + marked.length) % marked.length]));
}

function resize(way) {
  const sizes = SIZES.filter((size) => (size - drawn.pitch) * way > 0.5);
  const next = way > 0 ? sizes[0] : sizes[sizes.length - 1];
  if (next) go({size: String(next)});
}

const ON_KEY = {
  Escape: escape,
  "/": () => { box.focus(); box.select(); },
  n: () => step(1),
  N: () => step(-1),
  "+": () => resize(1),
  "-": () => resize(-1),
  0: () => go({size: undefined}),
  c: () => go({colour: COLOURS[(COLOURS.indexOf(document.body.dataset.colour) + 1) % COLOURS.length]}),
};
const ON_NODE_KEY = {
  ArrowRight: (node) => nearest(node, node.next),
  ArrowLeft: (node) => nearest(node, node.deps),
  ArrowDown: (node) => across(node, 1),
  ArrowUp: (node) => across(node, -1),
  Home: (node) => node.graph.nodes[0],
  End: (node) => node.graph.nodes[node.graph.nodes.length - 1],
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  tip.hidden = true;
  if (event.target === box) {
    if (event.key === "Escape") {
      box.value = "";
      box.blur();
      go(NOTHING, true);
    } else if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
    else return;
  } else if (ON_KEY[event.key]) ON_KEY[event.key]();
  else if (ON_NODE_KEY[event.key] && !panel.contains(event.target)) {
    const node = chosenNode();
    const next = node ? ON_NODE_KEY[event.key](node) : marked[0] || nodes[0];
    if (next) go(toNode(next));
  } else if ((event.key === "Enter" || event.key === " ") && event.target.closest(".node")) {
    go(toNode(nodeOf(event.target)));
    panel.focus();
  } else return;
  event.preventDefault();
});

// ---- pointer

function nodeOf(target) {
  const drawnNode = target.closest && target.closest(".node");
  return drawnNode ? graphs[drawnNode.dataset.g].nodes[drawnNode.dataset.i] : undefined;
}

main.addEventListener("click", (event) => {
  const node = nodeOf(event.target);
  const layer = event.target.closest("[data-layer]");
  const graph = event.target.closest("[data-graph]");
  if (node) go(toNode(node), true);
  else if (layer) go(toLayer(layer.dataset.layer), true);
  else if (graph) go(toGraph(graphs.find((g) => g.name === graph.dataset.graph)), true);
  else if (state.node !== undefined) escape();
});
panel.addEventListener("click", (event) => {
  if (event.target.closest("[data-escape]")) escape();
});
main.addEventListener("pointermove", (event) => {
  const node = nodeOf(event.target);
  if (!node) return void (tip.hidden = true);
  if (tip.hidden || tip.node !== node) tip.replaceChildren(...tipOf(node).flat(Infinity).filter((part) => part));
  tip.node = node;
  tip.hidden = false;
  const [wide, tall] = [tip.offsetWidth, tip.offsetHeight];
  const left = event.clientX + 16 + wide > innerWidth ? event.clientX - 16 - wide : event.clientX + 16;
  const top = event.clientY + 16 + tall > innerHeight ? innerHeight - tall - 8 : event.clientY + 16;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
});
main.addEventListener("pointerleave", () => { tip.hidden = true; });
main.addEventListener("scroll", () => { tip.hidden = true; });

document.getElementById("find").addEventListener("submit", (event) => event.preventDefault());
box.addEventListener("input", () => go({...NOTHING, q: box.value || undefined}));
document.getElementById("colour").addEventListener("click", (event) => {
  if (event.target.value) go({colour: event.target.value === "kind" ? undefined : event.target.value});
});
document.getElementById("size").addEventListener("click", (event) => {
  const value = event.target.value;
  if (value === "smaller" || value === "larger") resize(value === "larger" ? 1 : -1);
  else if (value) go({size: value === "fit" ? undefined : value});
});

addEventListener("hashchange", show);
addEventListener("resize", () => requestAnimationFrame(show));
show();
