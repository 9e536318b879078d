// The classes that give a node its colour, for each way to colour; the style sheet has the colours.

const KINDS = ["kernel", "copy", "fill", "host", "graph", "empty", "wait event", "record event", "alloc", "free"];

function kindClass(kind) {
  return "k-" + (KINDS.includes(kind) ? kind.replace(" ", "-") : "other");
}

/** Steps of equal ratio: the heaviest node is 6, a node of less than 1/1000 of it is 1. */
function weightClass(node) {
  if (node.moved === undefined) return "w-unknown";
  const ratio = heaviestNode ? weightOf(node) / heaviestNode : 0;
  return "w" + (ratio <= 0.001 ? 1 : Math.min(6, Math.max(2, Math.ceil(6 + Math.log10(ratio) * 5 / 3))));
}

function layerClass(layer) {
  return layer === undefined ? "l-none" : "l" + (layer % 8);
}

/** The twelve kernels that come first in the list have a colour of their own. */
function kernelClass(name) {
  const kernel = kernels.get(name);
  return !kernel || kernel.rank >= 12 ? "n-none" : "n" + kernel.rank;
}

/** The mark of a node that uses a buffer, by its access. */
function markClass(access) {
  return "mark-" + (access === "?" ? "x" : access);
}

/** What all colours of a node depend on. */
function colourClasses(node) {
  const kernel = kernelClass(node.kernel && node.kernel.name);
  return `${kindClass(node.kind)} ${layerClass(node.layer)} ${weightClass(node)} ${kernel}`;
}

/** What the colours mean; the style sheet shows the part that is of use. */
function drawLegend() {
  const kinds = [...new Set(graphs.flatMap((graph) => Object.keys(graph.kinds)))];
  const swatch = (classes) => el("i", {class: `swatch ${classes}`});
  const steps = [1, 2, 3, 4, 5, 6].map((i) => swatch(`w${i}`));
  return el("span", {class: "key"},
    el("span", {class: "for-kind"}, kinds.map((kind) => [swatch(`of-kind ${kindClass(kind)}`), el("span", {}, kind)])),
    graphs.some((graph) => graph.forks) && el("span", {class: "always"}, el("i", {class: "dash"}), "fork, join"),
    el("span", {class: "for-kernel"}, "the first twelve of the list of kernels"),
    el("span", {class: "for-layer"}, layerList.length ? "a colour a layer, eight in turn" : "no layer is known"),
    el("span", {class: "for-weight"}, 
      anyMoved ? ["0", steps, bytes(heaviestNode), swatch("w-unknown"), "unknown"] : "no weight is known"));
}
