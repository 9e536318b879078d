// What the views of the panel are built from: links, tables, and how a place, a parameter or a finding is written.

const MANY = 300; // rows of a list that are shown

/** A link to another state of the page; `hashOf` is in page.js. */
function link(changes, ...text) {
  return el("a", {href: hashOf(changes)}, ...text);
}

function nodeLink(node) {
  return el("a", {href: hashOf(toNode(node)), class: "node-link", title: describeNode(node)},
    el("i", {class: `swatch ${colourClasses(node)}`}), node.short);
}

function none(text) {
  return el("p", {class: "none"}, text);
}

/** Nothing where there is nothing to show. */
function section(title, ...children) {
  const inside = children.flat(Infinity).filter((child) => child);
  return inside.length ? el("section", {}, el("h3", {}, title), inside) : null;
}

/** A table from rows of cells, the `numbers`th of which stand right. `heads` may be null; null without rows. */
function table(heads, rows, numbers, kind) {
  if (!rows.length) return null;
  const cell = (tag) => (content, i) => el(tag, {class: numbers.includes(i) ? "n" : null}, content);
  return el("div", {class: "wide"}, el("table", {class: kind},
    heads && el("thead", {}, el("tr", {}, heads.map(cell("th")))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell("td")))))));
}

/** A list of the first of many, and how many more there are; null without any. */
function list(all, row) {
  if (!all.length) return null;
  const left = all.length - MANY;
  return [el("ul", {class: "list"}, all.slice(0, MANY).map(row)), left > 0 && none(`and ${digits(left)} more`)];
}

function facts(...pairs) {
  const known = pairs.filter(([, value]) => value !== undefined && value !== null && value !== false);
  return el("dl", {}, known.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function head(kicker, title, closes) {
  return el("header", {},
    el("div", {}, el("p", {class: "kicker"}, kicker), el("h2", {}, title)),
    closes && el("button",
      {type: "button", class: "close", "data-escape": "", "aria-label": "close", title: "close (Escape)"}, "\u00d7"));
}

function mono(text) {
  return el("span", {class: "mono"}, text);
}

function kindsOf(graph) {
  return Object.entries(graph.kinds).map(([kind, n]) => counted(n, kind)).join(", ");
}

/** How a kernel is launched, in a sentence. */
function shapeOf(kernel) {
  const shared = kernel.shared ? `, ${bytes(kernel.shared)} shared` : "";
  return `${triple(kernel.grid)} blocks of ${triple(kernel.block)}${shared}`;
}

/** Bytes that are at least moved, where some nodes do not say. */
function movedAtLeast(moved, nUnknown) {
  return [size(moved), nUnknown > 0 && ` at least; unknown for ${plural(nUnknown, "node")}`];
}

function accessTag(access) {
  const words = {r: "read", w: "written", rw: "read and written"};
  const title = words[access] || "nobody declared how it is used";
  return el("span", {class: `access a-${access || "none"}`, title}, access || "?");
}

/** A place as a link to its buffer. */
function placeLine(place) {
  const owned = place.owner !== undefined;
  const range = owned ? (ranges.get(place.owner) || [])[0] : undefined;
  const special = !["device", "unknown"].includes(place.space);
  const small = [owned && place.addr, place.nbytes !== undefined && bytes(place.nbytes), special && place.space];
  return el("span", {class: "place"},
    link(toBuffer(keyOf(place)), keyOf(place)),
    owned && place.off ? ` + ${digits(place.off)}` : "",
    !owned && el("em", {}, data.complete ? " in no allocation" : " in no known range"),
    range && range.freed && el("em", {class: "bad"}, " freed"),
    el("small", {}, small.filter((part) => part).join(", ")));
}

function rawBytes(raw) {
  const text = guesses(raw);
  const shown = el("code", {class: "raw"}, text);
  if (text.length <= 60) return shown;
  return el("details", {}, el("summary", {}, el("code", {}, `${text.slice(0, 23)} \u2026`)), shown);
}

function meaningOf(param) {
  const value = param.value !== undefined && el("code", {}, param.value);
  if (param.place) return [value && el("div", {}, value), placeLine(param.place), accessTag(param.place.access)];
  if (value) return value;
  const inside = (param.inside || []).map((at) => el("div", {}, `byte ${at.off}: `, placeLine(at.place)));
  return [inside, rawBytes(param.raw)];
}

function paramTable(params) {
  return table(["at", "name", "value"], params.map((param) => [
    digits(param.off),
    [el("b", {}, param.name || ""), " ", el("small", {}, param.type || plural(param.nbytes, "byte"))],
    el("div", {class: "meaning"}, meaningOf(param)),
  ]), [0], "params");
}

/** Findings that say the same of several nodes are one. */
function findingList(found, withPlace) {
  const same = new Map();
  for (const f of found) {
    const key = JSON.stringify([f.rule, f.why, f.todo]);
    same.set(key, [...(same.get(key) || []), f]);
  }
  const place = (f) => el("li", {}, f.at ? nodeLink(f.at) : f.of ? link(toGraph(f.of), f.of.name) : "the whole dump",
    f.at && el("small", {}, `${f.of.name} #${f.node}`));
  return [...same.values()].map((all) => el("article", {class: "finding"},
    el("p", {}, el("b", {}, all[0].rule), all.length > 1 && ` at ${plural(all.length, "place")}`),
    el("p", {}, all[0].why),
    el("p", {class: "todo"}, all[0].todo),
    withPlace && list(all, place)));
}

function nodeRow(node) {
  return el("li", {}, nodeLink(node), el("small", {}, ` ${node.graph.name} #${node.index}`),
    node.moved !== undefined && el("small", {class: "right"}, bytes(node.moved)));
}

function bufferRow(buffer) {
  const range = (ranges.get(buffer.owner) || [])[0];
  return el("li", {}, link(toBuffer(buffer.key), buffer.key),
    range && range.freed && el("em", {class: "bad"}, "freed"),
    el("small", {class: "right"}, range ? `${bytes(range.nbytes)}, ` : "", plural(buffer.uses.length, "use")));
}
