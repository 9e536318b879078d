// How lanes are broken into lines, and at which size they fit the window. Only numbers: nothing is drawn here.

const SIZES = [10, 14, 18, 22, 28, 34, 46, 64, 92, 130]; // distance of columns in pixels
const NAMES = 64; // the size from which on nodes have names
const LANE = 25; // height of a lane's title

/** Columns in groups of one layer, in order: [{layer, from, n}]. Without layers there is one group. */
function groupsOf(graph) {
  if (graph.groups) return graph.groups;
  const layerOf = [];
  for (const node of graph.nodes) {
    if (layerOf[node.column] === undefined || node.row === 0) layerOf[node.column] = node.layer;
  }
  const groups = [];
  layerOf.forEach((layer, column) => {
    const last = groups[groups.length - 1];
    if (last && last.layer === layer) last.n += 1;
    else groups.push({layer, from: column, n: 1});
  });
  graph.columns = layerOf.length;
  return (graph.groups = groups);
}

// Above the rows: the layers, if any are known.
const topOf = (graph) => (groupsOf(graph).some((group) => group.layer !== undefined) ? 17 : 6);
const gapOf = (pitch) => Math.min(12, Math.max(6, pitch / 2)); // between layers
const boxWidth = (pitch) => pitch - (pitch < 12 ? 1.5 : pitch < 20 ? 3 : pitch < NAMES ? 5 : 8);
const boxHeight = (pitch) => (pitch < 16 ? 15 : pitch < NAMES ? 22 : 34);

/** By column, how many edges run over its left side. */
function crossings(graph) {
  if (graph.crossings) return graph.crossings;
  const change = new Array(graph.columns + 1).fill(0);
  for (const node of graph.nodes) {
    for (const j of node.next) {
      change[node.column + 1] += 1;
      change[graph.nodes[j].column + 1] -= 1;
    }
  }
  let now = 0;
  return (graph.crossings = change.map((n) => (now += n)));
}

/** How many of `left` columns, from `from` on, go into a line of `room`: lines of about one length, cut where few edges
 * run. */
function cut(graph, from, left, room) {
  if (left <= room) return left;
  const n = Math.ceil(left / room);
  const even = Math.ceil(left / n);
  const over = crossings(graph);
  let best = even;
  for (const other of [even + 1, even - 1, even + 2, even - 2]) {
    const possible = other >= 1 && other <= room && Math.ceil((left - other) / room) < n;
    if (possible && over[from + other] < over[from + best]) best = other;
  }
  return best;
}

/** The x of every column and the lines that they fill, each [{layer, from, n}] of a group or a part of one. */
function breakLines(graph, pitch, width) {
  const lines = [];
  const x = [];
  let line = [];
  let used = 0;
  const close = () => {
    if (line.length) lines.push(line);
    line = [];
    used = 0;
  };
  const room = Math.max(1, Math.floor(width / pitch));
  for (const group of groupsOf(graph)) {
    const fits = group.n * pitch <= width;
    if (line.length && (!fits || used + gapOf(pitch) + group.n * pitch > width)) close();
    for (let done = 0; done < group.n; ) {
      if (line.length) {
        if (done) close();
        else used += gapOf(pitch);
      }
      const n = cut(graph, group.from + done, group.n - done, room);
      for (let i = 0; i < n; i++) x[group.from + done + i] = used + i * pitch;
      line.push({layer: group.layer, from: group.from + done, n, x: used, whole: n === group.n});
      used += n * pitch;
      done += n;
    }
  }
  close();
  return {lines, x};
}

/** Which rows each line needs: those of its nodes, and of the edges that pass through it. */
function measure(graph, broken, pitch) {
  const lineOf = [];
  broken.lines.forEach((groups, l) => groups.forEach((g) => {
    for (let i = 0; i < g.n; i++) lineOf[g.from + i] = l;
  }));
  const rows = broken.lines.map(() => 1);
  for (const node of graph.nodes) {
    const l = lineOf[node.column];
    rows[l] = Math.max(rows[l], node.row + 1);
    for (const j of node.next) {
      const to = graph.nodes[j];
      const row = Math.max(node.row, to.row) + 1;
      for (let m = l; m <= lineOf[to.column]; m++) rows[m] = Math.max(rows[m], row);
    }
  }
  const rowHeight = boxHeight(pitch) + (pitch < NAMES ? 5 : 12);
  const y = [];
  let height = 0;
  rows.forEach((n, l) => {
    y[l] = height;
    height += topOf(graph) + n * rowHeight + (pitch < NAMES ? 1 : 10);
  });
  return {lineOf, y, rowHeight, height};
}

/** With names if that fits on the screen; else all lanes in one line each if that can be read; else what fits. */
function fitPitch(width, height) {
  const fits = (pitch) => graphs.reduce(
    (sum, graph) => sum + LANE + measure(graph, breakLines(graph, pitch, width), pitch).height, 0) <= height;
  const named = SIZES.filter((pitch) => pitch >= NAMES && pitch < 100).reverse().find(fits);
  if (named) return named;
  let single = Infinity;
  for (const graph of graphs) {
    const groups = groupsOf(graph);
    if (graph.columns) single = Math.min(single, (width - 6 * (groups.length - 1)) / graph.columns);
  }
  single = Math.floor(single * 4) / 4;
  while (single >= 9 && graphs.some((graph) => breakLines(graph, single, width).lines.length > 1)) single -= 0.25;
  return single >= 9 ? Math.min(single, NAMES) : SIZES.slice().reverse().find(fits) || 14;
}
