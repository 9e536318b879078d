// What the panel shows: the whole dump, or what is chosen: a node, a graph, a buffer, a kernel, a layer, a search.

const HELP = [
  ["\u2190 \u2192", "along the edges"], ["\u2191 \u2193", "to the other row, or lane"],
  ["/", "search; Enter for the next hit"], ["n, N", "next, last highlighted node"],
  ["+, \u2212, 0", "size, fit"], ["c", "colour"], ["Escape", "close, step by step"],
];

function overview() {
  const totals = new Map();
  for (const graph of graphs) {
    for (const [kind, n] of Object.entries(graph.kinds)) totals.set(kind, (totals.get(kind) || 0) + n);
  }
  const kinds = [...totals].sort((a, b) => b[1] - a[1]);
  const total = graphs.reduce((sum, graph) => sum + Number(graph.moved || 0), 0);
  const unknown = graphs.reduce((sum, graph) => sum + graph.n_unknown, 0);
  const heavy = layerList.filter((l) => l.known).sort((a, b) => b.moved - a.moved || a.layer - b.layer).slice(0, 5);
  const owned = [...buffers.values()].filter((b) => b.owner !== undefined);
  return [
    head(plural(graphs.length, "graph"), plural(nodes.length, "node")),
    el("ul", {class: "legend"}, kinds.map(([kind, n]) =>
      el("li", {}, el("i", {class: `swatch of-kind ${kindClass(kind)}`}), `${digits(n)} ${kind}`))),
    facts(["moved", anyMoved && movedAtLeast(total, unknown)]),
    section(plural(data.findings.length, "finding"), findingList(data.findings, true)),
    section("Graphs", graphTable(kinds.map(([kind]) => kind))),
    section("Heaviest layers", table(null, heavy.map((l) =>
      [link(toLayer(l.layer), `layer ${l.layer}`), plural(l.nodes.length, "node"), size(l.moved)]), [1, 2])),
    section("Kernels", kernelTable(kernelList)),
    section("Buffers, the most used first", list(owned.sort((a, b) => b.uses.length - a.uses.length), bufferRow)),
    section("Made by", facts(...Object.entries(data.made_by))),
    section("Keys", facts(...HELP)),
  ];
}

/** One row a graph; where there are many kinds of nodes, the rarer ones are one column. */
function graphTable(all) {
  const kinds = all.length > 4 ? all.slice(0, 3) : all;
  const rest = all.slice(kinds.length);
  const count = (graph, some) => some.reduce((sum, kind) => sum + (graph.kinds[kind] || 0), 0);
  const short = (text, title) => el("span", {title}, text);
  const columns = [
    ["graph", (graph) => link(toGraph(graph), graph.name)],
    ...kinds.map((kind) => [kind, (graph) => digits(count(graph, [kind]))]),
    rest.length && [short("rest", rest.join(", ")), (graph) => digits(count(graph, rest))],
    anyMoved && ["moved", (graph) => size(graph.moved)],
    heaviest && [short("heavy", "the heaviest layer"), (graph) => graph.heaviest],
    [short("f/j", "forks and joins"), (graph) => `${(graph.forks || []).length}/${(graph.joins || []).length}`],
    graphs.some((graph) => graph.reads_back.length) &&
      [short("read", "what the host reads back"), (graph) => size(graph.read_back_nbytes)],
  ].filter((column) => column);
  const rows = graphs.map((graph) => columns.map(([, of]) => of(graph)));
  return table(columns.map(([title]) => title), rows, columns.slice(1).map((_, i) => i + 1), "graphs");
}

function kernelTable(all) {
  const weighed = (kernel) => kernel.nodes.some((node) => node.moved !== undefined);
  const any = all.some(weighed);
  return table(["kernel", "nodes", any && "moved"].filter((title) => title), all.slice(0, MANY).map((kernel) => [
    [el("i", {class: `swatch for-kernel ${kernelClass(kernel.name)}`}),
      el("a", {href: hashOf(toKernel(kernel.name)), title: kernel.name}, kernel.short || "(no name)")],
    digits(kernel.nodes.length),
    ...(any ? [weighed(kernel) ? size(kernel.moved) : "unknown"] : []),
  ]), [1, 2]);
}

function nodeView(node) {
  const {kernel, copy, fill, graph} = node;
  const named = kernel && kernel.name !== undefined;
  const name = named ? link(toKernel(kernel.name), mono(kernel.name)) : kernel && "the driver does not tell its name";
  const side = (title, near, implied) => section(title, el("ul", {class: "list"},
    !near.length && el("li", {class: "none"}, "nothing"),
    near.map((i) => el("li", {}, nodeLink(graph.nodes[i]), el("small", {}, ` #${i}`))),
    implied.map((i) => el("li", {class: "faint"}, nodeLink(graph.nodes[i]),
      el("small", {title: "another of these implies it"}, ` #${i}, implied`)))));
  const share = graph.moved ? Number(((100 * weightOf(node)) / Number(graph.moved)).toPrecision(2)) : 0;
  return [
    head([`${node.kind} in `, link(toGraph(graph), graph.name), ` #${node.index}`], node.short, true),
    section(plural(node.findings.length, "finding"), findingList(node.findings, false)),
    facts(
      ["kernel", name],
      ["label", node.label],
      ["layer", node.layer !== undefined && link(toLayer(node.layer), String(node.layer))],
      ["stream", node.stream],
      ["grid", kernel && triple(kernel.grid)],
      ["block", kernel && triple(kernel.block)],
      ["shared", kernel && size(kernel.shared)],
      ["moved", node.moved !== undefined && [size(node.moved), ` (${share} % of the graph)`]],
      ["to", copy && placeLine(copy.dst)],
      ["from", copy && placeLine(copy.src)],
      ["copied", copy && size(copy.nbytes)],
      ["fills", fill && placeLine(fill.dst)],
      ["with", fill && `${fill.value} in elements of ${plural(fill.element_nbytes, "byte")}, ${bytes(fill.nbytes)}`],
      ["reads", kernel && kernel.reads_through && "also through pointers in device memory"],
    ),
    kernel && (kernel.params
      ? section(plural(kernel.params.length, "parameter"), paramTable(kernel.params))
      : section("Parameters", none("The driver does not tell the parameters of this kernel."))),
    el("div", {class: "two"},
      side("Before it", node.deps, node.implied), side("After it", node.next, node.impliedNext)),
  ];
}

function graphView(graph) {
  const one = (i) => el("div", {}, nodeLink(graph.nodes[i]), el("small", {}, ` #${i}`));
  const forks = (graph.forks || []).map((i) => [one(i), graph.nodes[i].next.map(one)]);
  const joins = (graph.joins || []).map((i) => [graph.nodes[i].deps.map(one), one(i)]);
  const found = data.findings.filter((f) => f.of === graph);
  const reads = graph.reads_back.map((read) =>
    [[read.what, read.place && el("div", {}, placeLine(read.place))], size(read.nbytes)]);
  return [
    head("graph", graph.name, true),
    facts(
      ["nodes", `${graph.nodes.length}: ${kindsOf(graph)}`],
      ["layers", graph.layers && `${graph.layers[0]} to ${graph.layers[1] - 1}`],
      ["experts in", graph.moe_layers && `layers ${graph.moe_layers.join(", ")}`],
      ["moved", graph.moved !== undefined && movedAtLeast(graph.moved, graph.n_unknown)],
      ["heaviest", graph.heaviest !== undefined && link(toLayer(graph.heaviest), `layer ${graph.heaviest}`)],
    ),
    section(`Reads back ${reads.length ? bytes(graph.read_back_nbytes) : "nothing"}`,
      table(null, reads, [1]) || none("The host reads nothing after a launch of it, or nobody said.")),
    section(plural(found.length, "finding"), findingList(found, true)),
    graph.starts && section("Starts in parallel", list(graph.starts, one)),
    section("Forks", table(["at", "into"], forks, [], "halves")),
    section("Joins", table(["of", "at"], joins, [], "halves")),
    section("Bytes by layer", table(null, graph.layer_moved.map(([layer, moved]) =>
      [link(toLayer(layer), `layer ${layer}`), size(moved)]), [1])),
    section("Nodes", list(graph.nodes, nodeRow)),
  ];
}

function rangeFacts(range) {
  const sources = {ledger: "the ledger of allocations", caller: "the caller", driver: "the driver"};
  return facts(
    ["size", size(range.nbytes)],
    ["addresses", mono(`${range.addr} to ${range.end}`)],
    ["memory", range.space],
    ["known from", sources[range.source]],
    ["state", range.freed && el("em", {class: "bad"}, "freed")],
  );
}

/** Links to what begins at each offset into a buffer, where there are several. */
function offsetChips(buffer, chosen) {
  const counts = new Map();
  for (const {place} of buffer.uses) {
    if (place.off !== undefined) counts.set(String(place.off), (counts.get(String(place.off)) || 0) + 1);
  }
  if (counts.size < 2) return null;
  const sorted = [...counts].sort(([a], [b]) => Number(a) - Number(b));
  return el("p", {class: "chips"},
    chosen !== undefined && link(toBuffer(buffer.key), "all"),
    sorted.slice(0, 80).map(([off, n]) => {
      const href = hashOf(toBuffer(buffer.key, off));
      return el("a", {href, class: off === chosen && "on", title: plural(n, "use")}, `+${digits(off)}`);
    }),
    sorted.length > 80 && ` and ${sorted.length - 80} more`);
}

function bufferView(buffer, off) {
  const uses = usesOf(buffer, off);
  const marks = [...accesses(uses).values()];
  const words = [["r", "read it"], ["w", "write it"], ["rw", "do both"], ["?", "do not say"]];
  const where = (place) => place.owner !== buffer.owner ? link(toBuffer(keyOf(place)), keyOf(place))
    : place.off !== undefined && `+${digits(place.off)}`;
  return [
    head(buffer.owner === undefined ? "address" : "buffer", buffer.key, true),
    (ranges.get(buffer.owner) || []).map(rangeFacts),
    buffer.owner === undefined && none(`${data.complete ? "No allocation" : "No known range"} holds this address.`),
    el("ul", {class: "legend"}, words.map(([access, word]) => {
      const n = marks.filter((mark) => mark === access).length;
      return n > 0 && el("li", {}, el("i", {class: `swatch ${markClass(access)}`}), `${digits(n)} ${word}`);
    })),
    section("Offsets in it", offsetChips(buffer, off)),
    section(plural(uses.length, "use"),
      table(["node", "as", ""], uses.slice(0, MANY).map(({node, role, place}) => [
        [nodeLink(node), el("small", {}, ` ${node.graph.name} #${node.index}`)],
        el("span", {title: role}, role),
        [where(place), " ", accessTag(place.access)],
      ]), [2], "uses") || none("No node names it."),
      uses.length > MANY && none(`and ${digits(uses.length - MANY)} more, all of them highlighted`)),
  ];
}

function kernelView(kernel) {
  const shapes = new Map();
  for (const node of kernel.nodes) shapes.set(shapeOf(node.kernel), (shapes.get(shapeOf(node.kernel)) || 0) + 1);
  return [
    head("kernel", kernel.short, true),
    facts(
      ["name", mono(kernel.name)],
      ["nodes", digits(kernel.nodes.length)],
      ["moved", kernel.nodes.some((node) => node.moved !== undefined) && size(kernel.moved)],
    ),
    section("Launch shapes", table(null, [...shapes].map(([shape, n]) => [shape, `${digits(n)} \u00d7`]), [1])),
    section("Nodes", list(kernel.nodes, nodeRow)),
  ];
}

function layerView(layer) {
  const sorted = layer.nodes.slice().sort((a, b) => weightOf(b) - weightOf(a));
  const homes = [...new Set(layer.nodes.map((node) => node.graph))];
  return [
    head("layer", String(layer.layer), true),
    facts(
      ["nodes", digits(layer.nodes.length)],
      ["moved", layer.known && size(layer.moved)],
      ["in", homes.map((graph, i) => [i > 0 && ", ", link(toGraph(graph), graph.name)])],
    ),
    section("Nodes, the heaviest first", list(sorted, nodeRow)),
  ];
}

function searchView(query, found) {
  const words = wordsOf(query);
  const named = [...buffers.values()].filter((b) => words.every((word) => b.key.toLowerCase().includes(word)));
  return [
    head("search", query, true),
    section(plural(found.length, "node"), list(found, nodeRow) || none("No kernel, label or parameter has this text.")),
    section(plural(named.length, "buffer"), list(named, bufferRow)),
  ];
}

/** The short story of a node, for the pointer that rests on it. */
function tipOf(node) {
  const {kernel, copy, fill} = node;
  const to = (place) => `\u2192 ${keyOf(place)}${place.off ? ` + ${digits(place.off)}` : ""}`;
  const value = (p) => p.place ? to(p.place) : p.value !== undefined ? p.value : guesses(p.raw).slice(0, 60);
  const params = (kernel && kernel.params) || [];
  const rows = params.slice(0, 14).map((p) => [p.name || `at ${p.off}`, value(p)]);
  if (copy) rows.push(["to", to(copy.dst)], ["from", to(copy.src)], ["copied", bytes(copy.nbytes)]);
  if (fill) rows.push(["fills", to(fill.dst)], ["with", fill.value]);
  const layer = node.layer === undefined ? "" : `, layer ${node.layer}`;
  return [
    el("b", {}, node.short),
    el("small", {}, ` ${node.graph.name} #${node.index}${layer}, ${node.kind}`),
    kernel && kernel.name !== undefined && kernel.name !== node.short && el("p", {class: "mono"}, kernel.name),
    kernel && kernel.grid && el("p", {}, shapeOf(kernel)),
    node.moved !== undefined && el("p", {}, `moves ${bytes(node.moved)}`),
    table(null, rows, []),
    params.length > 14 && none(`and ${params.length - 14} more`),
    node.findings.map((f) => el("p", {class: "bad"}, `${f.rule}: ${f.why}`)),
  ];
}
