// The embedded data with what the page looks up again and again: edges both ways, users of buffers, text to search.

const data = JSON.parse(document.getElementById("data").textContent);
const graphs = data.graphs;
const ranges = new Map(); // name -> ranges of that name
const buffers = new Map(); // owner, or address where there is none -> {key, owner, uses: [{node, role, place}]}
const kernels = new Map(); // full name -> {name, nodes}
const layers = new Map(); // number -> {layer, moved, nodes}
let nodes = []; // all of them, graph by graph

for (const range of data.ranges) {
  if (!ranges.has(range.name)) ranges.set(range.name, []);
  ranges.get(range.name).push(range);
}

/** Every place that a node names, with its role: a parameter's name or offset, dst, src. */
function placesOf(node) {
  const found = [];
  for (const param of (node.kernel && node.kernel.params) || []) {
    const role = param.name || `at ${param.off}`;
    if (param.place) found.push({role, place: param.place});
    for (const at of param.inside || []) found.push({role: `${role}, byte ${at.off}`, place: at.place});
  }
  if (node.copy) found.push({role: "dst", place: node.copy.dst}, {role: "src", place: node.copy.src});
  if (node.fill) found.push({role: "dst", place: node.fill.dst});
  return found;
}

function keyOf(place) {
  return place.owner === undefined ? place.addr : place.owner;
}

function weightOf(node) {
  return node.moved === undefined ? 0 : Number(node.moved);
}

graphs.forEach((graph, g) => {
  graph.index = g;
  graph.nodes.forEach((node, i) => {
    Object.assign(node, {graph, index: i, next: [], impliedNext: [], findings: []});
    node.deps = node.deps || [];
    node.implied = node.implied || [];
  });
  for (const node of graph.nodes) {
    for (const dep of node.deps) graph.nodes[dep].next.push(node.index);
    for (const dep of node.implied) graph.nodes[dep].impliedNext.push(node.index);
    node.uses = placesOf(node);
    for (const {role, place} of node.uses) {
      const key = keyOf(place);
      if (!buffers.has(key)) buffers.set(key, {key, owner: place.owner, uses: []});
      buffers.get(key).uses.push({node, role, place});
    }
    if (node.kernel && node.kernel.name !== undefined) {
      const name = node.kernel.name;
      if (!kernels.has(name)) kernels.set(name, {name, short: node.label ? name : node.short, nodes: [], moved: 0});
      const kernel = kernels.get(name);
      kernel.nodes.push(node);
      kernel.moved += weightOf(node);
    }
    if (node.layer !== undefined) {
      if (!layers.has(node.layer)) layers.set(node.layer, {layer: node.layer, moved: 0, known: false, nodes: []});
      const layer = layers.get(node.layer);
      layer.nodes.push(node);
      layer.moved += weightOf(node);
      layer.known = layer.known || node.moved !== undefined;
    }
    const said = [node.kind, node.label, node.kernel && node.kernel.name, node.short];
    for (const {role, place} of node.uses) said.push(role, place.owner, place.addr);
    node.text = said.filter((text) => text).join("\n").toLowerCase();
  }
  nodes = nodes.concat(graph.nodes);
});
// Buffers that no node names are there to be found as well.
for (const name of ranges.keys()) if (!buffers.has(name)) buffers.set(name, {key: name, owner: name, uses: []});

for (const finding of data.findings) {
  finding.of = graphs.find((graph) => graph.name === finding.graph);
  if (!finding.of) continue; // about the whole dump
  finding.of.findings = (finding.of.findings || 0) + 1;
  finding.at = finding.node === undefined ? undefined : finding.of.nodes[finding.node];
  if (finding.at) finding.at.findings.push(finding);
}

// The order of the list of kernels, and of their colours.
const kernelList = [...kernels.values()].sort(
  (a, b) => b.moved - a.moved || b.nodes.length - a.nodes.length || (a.name < b.name ? -1 : 1));
kernelList.forEach((kernel, rank) => { kernel.rank = rank; });
const layerList = [...layers.values()].sort((a, b) => a.layer - b.layer);
const heaviest = layerList.reduce((best, l) => (l.known && (!best || l.moved > best.moved) ? l : best), undefined);
const heaviestNode = nodes.reduce((most, node) => Math.max(most, weightOf(node)), 0);
const anyMoved = nodes.some((node) => node.moved !== undefined);

/** First and last byte + 1 of a place or a range, as integers of any size. */
function reach(at) {
  const first = BigInt(at.addr);
  return [first, first + BigInt(at.nbytes === undefined ? 1 : at.nbytes)];
}

/** The uses of a buffer, or of what begins `off` bytes into it; without `off` those that reach into its memory under
 * another name as well, such as a part's or the whole's. */
function usesOf(buffer, off) {
  if (off !== undefined) return buffer.uses.filter(({place}) => String(place.off) === off);
  const spans = (ranges.get(buffer.owner) || []).map(reach);
  const spaces = new Set((ranges.get(buffer.owner) || []).map((range) => range.space === "pageable"));
  const overlaps = ({place}) => {
    if (place.owner === buffer.key || !spaces.has(place.space === "pageable")) return place.owner === buffer.key;
    const [first, end] = reach(place);
    return spans.some(([from, to]) => first < to && from < end);
  };
  if (!spans.length) return buffer.uses;
  return nodes.flatMap((node) => node.uses.filter(overlaps).map((use) => ({node, ...use})));
}

function wordsOf(query) {
  return query.toLowerCase().split(/\s+/).filter((word) => word);
}

/** Nodes of which every word of the query is in the text. */
function search(query) {
  const words = wordsOf(query);
  return words.length ? nodes.filter((node) => words.every((word) => node.text.includes(word))) : [];
}

/** By node how it uses a buffer: "r", "w", "rw", or "?" where nobody said. */
function accesses(uses) {
  const said = new Map();
  for (const {node, place} of uses) said.set(node, (said.get(node) || "") + (place.access || "?"));
  for (const [node, all] of said) {
    said.set(node, (all.includes("r") ? "r" : "") + (all.includes("w") ? "w" : "") || "?");
  }
  return said;
}
