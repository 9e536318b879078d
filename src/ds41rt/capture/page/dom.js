"use strict";
// Elements and text. Everything a dump says becomes a text node or an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "on") for (const [type, handler] of Object.entries(value)) made.addEventListener(type, handler);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== undefined && child !== null && child !== false) made.append(child);
  }
  return made;
}

/** An element: el("p", {class: "x", on: {click: f}}, "text", other). Children that are null or false are left out. */
function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A number or, where a double cannot hold it, its digits, with separators: 12,345. */
function digits(n) {
  return String(n).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** 3 digits and a decimal unit; the exact number belongs into a title. */
function bytes(n) {
  if (n === undefined || n === null) return "unknown";
  let value = Number(n);
  for (const unit of ["B", "kB", "MB", "GB", "TB", "PB", "EB"]) {
    if (value < 999.5 || unit === "EB") {
      const shown = unit === "B" || value >= 99.95 ? Math.round(value) : value.toPrecision(3);
      return `${shown}\u00a0${unit}`;
    }
    value /= 1000;
  }
}

function plural(n, one, many) {
  return `${digits(n)} ${n === 1 ? one : many || one + "s"}`;
}

/** A span with the rounded size, the exact one on hover. */
function size(n) {
  return el("span", {title: n === undefined ? null : `${digits(n)} bytes`}, bytes(n));
}

function triple(t) {
  return t ? t.join(" \u00d7 ") : "unknown";
}

/** The bytes of a parameter of which nothing is known, as what they may mean. Little-endian. */
function guesses(raw) {
  const pairs = raw.match(/../g) || [];
  if (![1, 2, 4, 8].includes(pairs.length)) return pairs.join(" ");
  const hex = "0x" + pairs.slice().reverse().join("");
  const whole = BigInt(hex);
  const said = [hex];
  if (whole < 1n << 32n) said.push(digits(whole));
  if (pairs.length === 4) {
    const view = new DataView(new ArrayBuffer(4));
    view.setUint32(0, Number(whole));
    const real = view.getFloat32(0);
    if (Math.abs(real) > 1e-9 && Math.abs(real) < 1e9) said.push(`f32 ${Number(real.toPrecision(6))}`);
  }
  return said.join(" = ");
}
