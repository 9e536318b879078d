// The picture: the lanes with their nodes and edges, and the chart of the layers.

const CHAR = 6.03; // width of a name's letter

/** A node's name in at most two lines of `room` letters, broken at underlines where there are some. */
function nameLines(name, room) {
  const clip = (line) => (line.trimEnd().length > room ? line.slice(0, room - 1) + "\u2026" : line.trimEnd());
  const [bare, operation] = name.split(" ");
  if (operation && name.length > room) return [clip(bare), clip(operation)];
  const parts = name.match(/[^_.\s:]+[_.\s:]*|[_.\s:]+/g) || [""];
  const lines = [""];
  for (const part of parts) {
    const last = lines.length - 1;
    if ((lines[last] + part).trimEnd().length <= room || !lines[last]) lines[last] += part;
    else if (lines.length < 2) lines.push(part);
    else lines[last] += part;
  }
  return lines.map(clip);
}

function describeNode(node) {
  const said = [`${node.graph.name}, node ${node.index}`, node.short, node.kind];
  if (node.kernel && node.kernel.name !== undefined && node.kernel.name !== node.short) said.push(node.kernel.name);
  if (node.layer !== undefined) said.push(`layer ${node.layer}`);
  if (node.moved !== undefined) said.push(bytes(node.moved));
  if (node.next.length > 1) said.push("fork");
  if (node.deps.length > 1) said.push("join");
  if (node.findings.length) said.push(plural(node.findings.length, "finding"));
  return said.join(", ");
}

/** A path through points that differ in one coordinate from one to the next, with round corners. */
function rounded(points) {
  let d = `M${points[0][0]} ${points[0][1]}`;
  for (let i = 1; i < points.length; i++) {
    const [[x0, y0], [x, y], after] = [points[i - 1], points[i], points[i + 1]];
    const length = Math.abs(x - x0) + Math.abs(y - y0);
    const r = after ? Math.min(4, length / 2, (Math.abs(after[0] - x) + Math.abs(after[1] - y)) / 2) : 0;
    d += `L${x - r * Math.sign(x - x0)} ${y - r * Math.sign(y - y0)}`;
    if (r) d += `Q${x} ${y} ${x + r * Math.sign(after[0] - x)} ${y + r * Math.sign(after[1] - y)}`;
  }
  return d;
}

/** What an edge is (chain, fork or join), and its path: along the lower of its two rows, or above it where a node of
 * the row is in the way. In pieces where it goes over several lines. */
function edgePath(lane, from, to) {
  const {w, h, right, gapX, gapY} = lane;
  const [a, b] = [lane.at(from), lane.at(to)];
  const kind = from.row === to.row ? "chain" : from.row < to.row ? "fork" : "join";
  const carry = Math.max(from.row, to.row);
  const blocked = lane.between(from, to, carry);
  const along = (line) => lane.top(line, carry) + (blocked ? -gapY / 2 : h / 2);
  // Past rows in between, the way down or up leads between two columns.
  const near = Math.abs(from.row - to.row) === 1;
  let start = [[a.x + w, a.mid]];
  if (kind === "fork") start = near ? [[a.x + w / 2, a.y + h]] : [...start, [a.x + w + gapX / 2, a.mid]];
  else if (blocked) start = [[a.x + w / 2, a.y]];
  let end = [[b.x, b.mid]];
  if (kind === "join") end = near ? [[b.x + w / 2, b.y + h]] : [[b.x - gapX / 2, b.mid], ...end];
  else if (blocked) end = [[b.x + w / 2, b.y]];
  const [down, up] = [start[start.length - 1][0], end[0][0]];
  if (a.line === b.line) return {kind, d: rounded([...start, [down, along(a.line)], [up, along(a.line)], ...end])};
  let d = rounded([...start, [down, along(a.line)], [right + 5, along(a.line)]]);
  for (let l = a.line + 1; l < b.line; l++) d += rounded([[-5, along(l)], [right + 5, along(l)]]);
  return {kind, d: d + rounded([[-5, along(b.line)], [up, along(b.line)], ...end])};
}

function drawLane(graph, pitch, width) {
  const broken = breakLines(graph, pitch, width);
  const {lineOf, y, rowHeight, height} = measure(graph, broken, pitch);
  const [w, h] = [boxWidth(pitch), boxHeight(pitch)];
  const above = topOf(graph);
  const taken = new Set(graph.nodes.map((node) => `${node.column} ${node.row}`));
  const top = (line, row) => y[line] + above + row * rowHeight;
  const lane = {
    w, h, top, gapX: pitch - w, gapY: rowHeight - h,
    right: Math.max(0, ...broken.lines.map((groups) => groups.reduce((end, g) => Math.max(end, g.x + g.n * pitch), 0))),
    at: (node) => {
      const line = lineOf[node.column];
      return {line, x: broken.x[node.column], y: top(line, node.row), mid: top(line, node.row) + h / 2};
    },
    between: (from, to, row) => {
      for (let c = from.column + 1; c < to.column; c++) if (taken.has(`${c} ${row}`)) return true;
      return false;
    },
  };
  graph.lane = lane;
  const paths = {chain: "", fork: "", join: "", implied: ""};
  for (const node of graph.nodes) {
    for (const j of node.next) {
      const edge = edgePath(lane, node, graph.nodes[j]);
      paths[edge.kind] += edge.d;
    }
    for (const j of node.impliedNext) {
      // No line is kept free for it, so only where it needs none.
      const to = graph.nodes[j];
      if (lineOf[node.column] === lineOf[to.column]) paths.implied += edgePath(lane, node, to).d;
    }
  }
  const lines = broken.lines.flatMap((groups, l) => groups.map((g) => drawGroup(graph, g, y[l], pitch)));
  graph.svg = svg(
    "svg", {width: lane.right + 12, height, viewBox: `-6 0 ${lane.right + 12} ${height}`, role: "group",
      "aria-label": `Graph ${graph.name}`},
    lines,
    Object.entries(paths).map(([kind, d]) => d && svg("path", {class: `edge ${kind}`, d})),
    (graph.over = svg("g", {class: "over"})),
    graph.nodes.map((node) => drawNode(lane, node, pitch)),
  );
  return graph.svg;
}

function drawGroup(graph, group, top, pitch) {
  if (group.layer === undefined) return null;
  const total = (graph.layer_moved.find(([layer]) => layer === group.layer) || [])[1];
  const long = group.n * pitch;
  const known = total !== undefined;
  const text = known && pitch * group.n > 150 ? `layer ${group.layer}, ${bytes(total)}` : `${group.layer}`;
  const full = long - (pitch - boxWidth(pitch));
  const bar = known && heaviest.moved ? Math.max(1, (full * Number(total)) / heaviest.moved) : 0;
  return svg("g", {class: `group ${layerClass(group.layer)}`, "data-layer": group.layer},
    svg("title", {}, `layer ${group.layer}: ${bytes(total)} in this graph`),
    svg("text", {x: group.x, y: top + 9}, text),
    svg("rect", {class: "rail", x: group.x, y: top + 12, width: full, height: 3}),
    bar && svg("rect", {class: "load", x: group.x, y: top + 12, width: Math.min(full, bar), height: 3}),
  );
}

function drawNode(lane, node, pitch) {
  const {x, y} = lane.at(node);
  const {w, h} = lane;
  const round = node.kind === "copy" || node.kind === "fill" ? Math.min(w, h) / 2 : 2;
  const names = pitch >= NAMES ? nameLines(node.short, Math.floor((w - 4) / CHAR)) : [];
  const flag = Math.min(9, w);
  node.drawn = svg("g", {
    class: `node ${colourClasses(node)}`, tabindex: -1, role: "button",
    "data-g": node.graph.index, "data-i": node.index, "aria-label": describeNode(node),
  },
    svg("rect", {x, y, width: w, height: h, rx: round}),
    names.map((line, i) => svg("text", {x: x + w / 2, y: y + h / 2 + 3.5 + (i - (names.length - 1) / 2) * 12}, line)),
    node.findings.length > 0 && svg("path", {class: "flag", d: `M${x + w - flag} ${y - 2}h${flag + 2}v${flag + 2}z`}),
  );
  return node.drawn;
}

function layerSpan([first, end]) {
  return end - first === 1 ? `layer ${first}` : `layers ${first}\u2013${end - 1}`;
}

function forksAndJoins(graph) {
  const [forks, joins] = [(graph.forks || []).length, (graph.joins || []).length];
  const starts = graph.starts ? `${graph.starts.length} starts, ` : "";
  if (forks === joins && forks > 1) return `${starts}${forks} forks and joins`;
  return `${starts}${plural(forks, "fork")}, ${plural(joins, "join")}`;
}

function counted(n, kind) {
  return plural(n, kind, {copy: "copies", empty: "empty", host: "host", other: "other"}[kind]);
}

/** What stands in the lane's title line: the summary of the graph. */
function laneFacts(graph) {
  const facts = [
    kindsOf(graph),
    graph.moved !== undefined && size(graph.moved),
    graph.heaviest !== undefined &&
      `heaviest layer ${graph.heaviest}`,
    (graph.starts || graph.forks || graph.joins) && forksAndJoins(graph),
    graph.findings > 0 && el("b", {class: "bad"}, plural(graph.findings, "finding")),
    graph.reads_back.length > 0 && `reads back ${bytes(graph.read_back_nbytes)}`,
  ];
  return facts.filter((fact) => fact).flatMap((fact, i) => (i ? [" \u00b7 ", fact] : [fact]));
}

/** Bytes by layer over all graphs; nothing where no layer's weight is known. */
function drawChart(width) {
  if (!heaviest) return null;
  const [h, left] = [48, 2];
  const [first, last] = [layerList[0].layer, layerList[layerList.length - 1].layer];
  const step = Math.min(80, (width - left) / (last - first + 1));
  const every = [1, 2, 5, 10, 20, 50, 100, 1000].find((n) => n * step >= 22) || 10000;
  const x = (layer) => left + (layer - first) * step;
  const room = Math.min(step - 1, Math.max(step * 0.8, step - 4));
  return svg("svg", {id: "chart", width, height: h + 18, role: "img",
    "aria-label": `Bytes moved by layer; the heaviest is layer ${heaviest.layer} with ${bytes(heaviest.moved)}`},
    layerList.map((l) => {
      const tall = l.known ? Math.max(1, (h * l.moved) / (heaviest.moved || 1)) : 0;
      const weight = l.known ? bytes(l.moved) : "unknown";
      return svg("g", {class: `bar ${layerClass(l.layer)}${l === heaviest ? " heaviest" : ""}`, "data-layer": l.layer},
        svg("title", {}, `layer ${l.layer}: ${weight}, ${plural(l.nodes.length, "node")}`),
        svg("rect", {class: "back", x: x(l.layer), y: 0, width: room, height: h}),
        svg("rect", {class: "load", x: x(l.layer), y: h - tall, width: room, height: tall}),
        (l.layer % every === 0 || l === heaviest && every < 3) &&
          svg("text", {x: x(l.layer) + room / 2, y: h + 13}, String(l.layer)),
      );
    }),
  );
}

/** Draws everything anew; `wanted` is a number of pixels a column, or "fit". Returns the pixels. */
function drawPicture(main, wanted) {
  const width = main.clientWidth - 44;
  const chart = drawChart(width + 12);
  const above = chart ? 100 : 10;
  const pitch = wanted === "fit" ? fitPitch(width, main.clientHeight - above - 10) : wanted;
  const lanes = graphs.map((graph) => el("section", {class: "lane", "data-g": graph.index},
    el("h2", {}, el("button", {type: "button", class: "lane-name", "data-graph": graph.name}, graph.name),
      graph.layers && graph.name !== graph.layers.join("..") && el("span", {class: "tag"}, layerSpan(graph.layers)),
      el("span", {class: "facts"}, laneFacts(graph))),
    graph.nodes.length ? drawLane(graph, pitch, width) : none("This graph has no nodes."),
  ));
  const title = chart && ["Bytes moved by layer", el("span", {class: "facts"}, "heaviest: ",
    el("button", {type: "button", class: "link", "data-layer": heaviest.layer}, `layer ${heaviest.layer}`),
    ` with ${bytes(heaviest.moved)}`)];
  main.replaceChildren(
    el("section", {class: "chart"}, el("h2", {}, title, drawLegend()), chart),
    ...lanes,
    ...(graphs.length ? [] : [none("This dump has no graphs.")]),
  );
  return pitch;
}
