// The map of a device: squares (cells), each an equal part of the device, filled from below by kind of content.

import { bytes, count, el, percent, say, show } from "./draw.js";

/** Name and explanation of each kind, in the order in which they are drawn from below. */
const WORDS = {
  pages: {
    compressed: ["compressed", "in memory"],
    huge: ["huge", "does not compress: stored uncompressed in memory"],
    spilled: ["spilled", "on the backing device"],
    unloaded: ["not loaded yet", "still in the save file (keep=yes)"],
    same: ["one pattern", "repeats one pattern: takes at most 8 bytes"],
    zero: ["zeroes", "written as zeroes, or zeroes that hide data of the base"],
    below: ["from base", "unchanged: read from the base"],
    hole: ["hole", "not allocated: reads as zeroes"],
  },
  extents: {
    data: ["data", ""],
    zero: ["zeroes", "allocated, reads as zeroes"],
    hole: ["hole", "reads as zeroes"],
  },
  zones: {
    FULL: ["full", ""],
    IMP_OPEN: ["open", "by a write"],
    EXP_OPEN: ["explicitly open", ""],
    CLOSED: ["closed", "partly written"],
    READONLY: ["read-only", ""],
    OFFLINE: ["offline", "cannot be read or written"],
    NOT_WP: ["conventional", "without a write pointer"],
    EMPTY: ["empty", ""],
  },
};
/** Kinds without data of the device. All other kinds are drawn even if they cover less than a pixel. */
const FAINT = new Set(["hole", "below", "EMPTY"]);
const CELL_MIN = 11;
const CELL_MAX = 34;
const ROWS = 24;
const CELLS_MAX = 4096;

const canvas = document.getElementById("cells");
const tip = document.getElementById("tip");
const readout = document.getElementById("cell");
const legend = document.getElementById("legend");
const note = document.getElementById("map-note");
let shown = null;
let grid = null;
let cursor = -1;

/** Returns the number of cells that fit. */
export function cellsWanted() {
  const columns = Math.max(8, Math.floor(canvas.parentElement.clientWidth / CELL_MIN));
  return Math.min(columns * ROWS, CELLS_MAX);
}

export function clear(why = "") {
  shown = null;
  cursor = -1;
  show(canvas, false);
  show(tip, false);
  legend.replaceChildren();
  say(note, "");
  say(readout, why);
}

/** Shows a new map. */
export function take(map) {
  if (map.map === "none") return clear(map.why);
  shown = map;
  show(canvas, true);
  const all = map.looked < map.units ? `only the first ${percent(map.looked, map.units)} examined before the deadline` : "";
  const square = `a square is ${cellSize(map)}`;
  say(note, [square, all, map.note].filter(Boolean).join("; "));
  drawLegend(map);
  draw();
  if (cursor < 0) say(readout, "");
}

function cellSize(map) {
  const units = map.units / map.cells;
  if (map.map === "zones") {
    return units === 1 ? `a zone of ${bytes(map.unit)}` : `${count(units)} zones of ${bytes(map.unit)}`;
  }
  return units === 1 && map.unit === 4096 ? "a page" : bytes(units * map.unit);
}

function kindsOf(map) {
  const words = WORDS[map.map];
  return Object.keys(words).filter((kind) => map.kinds[kind]).map((kind) => [kind, ...words[kind]]);
}

function sum(numbers) {
  let all = 0;
  for (const number of numbers) all += number;
  return all;
}

function drawLegend(map) {
  const items = kindsOf(map).map(([kind, word, what]) => {
    const many = sum(map.kinds[kind]);
    const figure = map.map === "zones" ? `${many} zones` : bytes(many * map.unit);
    const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = `var(--${kind})`;
    const text = el("span", {}, `${word}: ${figure}, ${percent(many, map.looked)}`);
    return el("li", what ? { title: what } : {}, swatch, text);
  });
  if (map.map === "zones") {
    const swatch = el("span", { "aria-hidden": "true" }, "━");
    const figure = `${bytes(sum(map.written))} of ${bytes(sum(map.capacity))} written`;
    items.push(el("li", {}, swatch, el("span", {}, `write pointer: ${figure}`)));
  }
  // Replaced only if it changes, because a screen reader may be reading it.
  const texts = items.map((item) => item.textContent).join();
  if (legend.dataset.of !== texts || legend.children.length !== items.length) {
    legend.dataset.of = texts;
    legend.replaceChildren(...items);
  }
  canvas.setAttribute("aria-label", `Map of ${map.name}, ${bytes(map.size)}: ${items.map((i) => i.textContent).join("; ")}`);
}

/** Returns the layout with the largest squares that fit. */
function layOut(map) {
  const width = canvas.parentElement.clientWidth;
  let side = Math.floor(Math.sqrt((width * CELL_MIN * ROWS) / map.cells));
  side = Math.max(CELL_MIN, Math.min(side, CELL_MAX));
  const columns = Math.max(1, Math.floor(width / side));
  return { side, columns, rows: Math.ceil(map.cells / columns), width };
}

export function draw() {
  if (!shown) return;
  const map = shown;
  grid = layOut(map);
  const { side, columns, rows, width } = grid;
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = `${rows * side}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(rows * side * scale);
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const kinds = kindsOf(map).map(([kind]) => [kind, colour(kind), map.kinds[kind]]);
  const [empty, ink, line] = [colour("unseen"), colour("ink"), colour("line")];
  const size = side - 1.5;
  for (let cell = 0; cell < map.cells; cell += 1) {
    const x = (cell % columns) * side;
    const y = Math.floor(cell / columns) * side;
    paint.fillStyle = empty;
    paint.fillRect(x, y, size, size);
    paintCell(paint, map, kinds, cell, [x, y, size], colour);
    if (kinds.every(([, , counts]) => counts[cell] === 0)) {
      paint.strokeStyle = line;
      paint.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    }
  }
  if (cursor >= 0 && cursor < map.cells) {
    paint.strokeStyle = ink;
    paint.lineWidth = 2;
    const [x, y] = [(cursor % columns) * side, Math.floor(cursor / columns) * side];
    paint.strokeRect(x, y, size, size);
  }
}

function paintCell(paint, map, kinds, cell, [x, y, size], colour) {
  const here = kinds.filter(([, , counts]) => counts[cell] > 0);
  const all = here.reduce((units, [, , counts]) => units + counts[cell], 0);
  if (all === 0) return;
  if (map.map === "zones" && here.length === 1) {
    // Zones of one condition are filled up to the write pointer.
    const [kind, fill] = here[0];
    const share = map.capacity[cell] > 0 ? map.written[cell] / map.capacity[cell] : 1;
    const height = kind === "EMPTY" ? 0 : Math.max(share * size, 2);
    paint.fillStyle = colour("EMPTY");
    paint.fillRect(x, y, size, size);
    paint.fillStyle = fill;
    paint.fillRect(x, y + size - height, size, height);
    if (share > 0 && share < 1) {
      paint.fillStyle = colour("ink");
      paint.fillRect(x, y + size - height - 1, size, 1.5);
    }
    if (kind === "OFFLINE" || kind === "READONLY") {
      paint.strokeStyle = colour("ink");
      paint.beginPath();
      paint.moveTo(x, y);
      paint.lineTo(x + size, y + size);
      paint.stroke();
    }
    return;
  }
  // A rare kind gets at least 1.5 pixels, at the expense of the most frequent kind.
  const least = 1.5;
  const heights = here.map(([kind, , counts]) => Math.max((counts[cell] / all) * size, FAINT.has(kind) ? 0 : least));
  const over = heights.reduce((a, b) => a + b, 0) - size;
  heights[heights.indexOf(Math.max(...heights))] -= over;
  let bottom = y + size;
  here.forEach(([, fill], index) => {
    bottom -= heights[index];
    paint.fillStyle = fill;
    paint.fillRect(x, bottom, size, heights[index] + 0.3);
  });
}

/** Returns the content of a cell as text. */
export function describe(map, cell) {
  const start = (unit) => Math.floor((unit * map.units) / map.cells);
  const [from, to] = [start(cell), start(cell + 1)];
  const kinds = kindsOf(map).filter(([kind]) => map.kinds[kind][cell] > 0);
  const units = kinds.reduce((all, [kind]) => all + map.kinds[kind][cell], 0);
  const range = `${bytes(from * map.unit)} to ${bytes(Math.min(to * map.unit, map.size))}`;
  if (units === 0) return `${range}\nnot examined`;
  if (map.map === "zones") {
    const zones = to - from === 1 ? `zone ${from}` : `zones ${from} to ${to - 1}`;
    const conditions = kinds.map(([kind, word]) => (to - from === 1 ? word : `${map.kinds[kind][cell]} ${word}`));
    const written = map.capacity[cell] > 0 ? `\n${bytes(map.written[cell])} of ${bytes(map.capacity[cell])} written` : "";
    return `${zones}, ${range}\n${conditions.join("\n")}${written}`;
  }
  const parts = kinds.map(([kind, word]) => `${word}: ${percent(map.kinds[kind][cell], units)}`);
  return `${range}\n${parts.join("\n")}`;
}

function point(cell) {
  if (!shown || !grid || cell < 0 || cell >= shown.cells) {
    cursor = -1;
    show(tip, false);
    draw();
    return;
  }
  cursor = cell;
  draw();
  say(tip, describe(shown, cell));
  show(tip, true);
  const { side, columns, width } = grid;
  const x = (cell % columns) * side;
  tip.style.top = `${(Math.floor(cell / columns) + 1) * side + 4}px`;
  tip.style.left = `${Math.max(0, Math.min(x, width - tip.offsetWidth))}px`;
}

canvas.addEventListener("pointermove", (event) => {
  if (!grid) return;
  const column = Math.floor(event.offsetX / grid.side);
  const cell = Math.floor(event.offsetY / grid.side) * grid.columns + column;
  point(column < grid.columns ? cell : -1);
});
canvas.addEventListener("pointerleave", () => point(-1));
canvas.addEventListener("blur", () => point(-1));
canvas.addEventListener("keydown", (event) => {
  if (!shown || !grid) return;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns };
  const at = Math.max(cursor, 0);
  let cell = at + (steps[event.key] ?? 0);
  if (event.key === "Home") cell = 0;
  else if (event.key === "End") cell = shown.cells - 1;
  else if (event.key === "Escape") return point(-1);
  else if (!(event.key in steps)) return;
  event.preventDefault();
  point(cell >= 0 && cell < shown.cells ? cell : at);
  // For screen readers.
  say(readout, describe(shown, cursor).replaceAll("\n", "; "));
});
new ResizeObserver(draw).observe(canvas.parentElement);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
