// Helpers to draw the page. Text from the server is only ever inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an element with attributes and children. Strings become text nodes. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Creates an SVG element, like `el`. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Sets a text if it changed, so that nothing flickers and screen readers do not repeat it. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function show(node, is) {
  if (node.hidden === is) node.hidden = !is;
}

/** Formats bytes as the program does. */
export function bytes(count) {
  if (count < 1024) return `${Math.round(count)}B`;
  let unit = -1;
  do {
    count /= 1024;
    unit += 1;
  } while (count >= 999.95 && unit < 5);
  return `${count.toFixed(1).replace(/\.0$/, "")}${"KMGTPE"[unit]}`;
}

/** Formats a number of requests. */
export function count(number) {
  if (number > 0 && number < 10) return number.toFixed(1).replace(/\.0$/, "");
  if (number < 10_000) return Math.round(number).toString();
  return number < 999_500 ? `${(number / 1e3).toFixed(1)}k` : `${(number / 1e6).toFixed(1)}M`;
}

/** Formats a duration in nanoseconds. */
export function duration(nanoseconds) {
  for (const [unit, word] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) {
    if (nanoseconds >= unit) {
      const value = nanoseconds / unit;
      return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${word}`;
    }
  }
  return `${nanoseconds} ns`;
}

export function uptime(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([unit]) => seconds >= unit);
  if (first < 0) return "0 s";
  let left = seconds;
  return parts.slice(first, first + 2).map(([unit, word]) => {
    const many = Math.floor(left / unit);
    left -= many * unit;
    return `${many} ${word}`;
  }).join(" ");
}

export function percent(part, whole) {
  const share = whole > 0 ? (100 * part) / whole : 0;
  if (share > 0 && share < 0.1) return "< 0.1 %";
  return `${share < 10 ? share.toFixed(1).replace(/\.0$/, "") : Math.floor(share)} %`;
}

/** Shows the use of a limit as figures, and as a bar if there is a limit. `what` is the label for screen readers. */
export function usage(node, what, used, limit) {
  if (!node.firstChild) {
    const bar = el("span", { class: "bar", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }, el("span"));
    node.append(el("span", { class: "figures" }), bar);
  }
  const [text, bar] = node.children;
  const share = limit > 0 ? Math.min(used / limit, 1) : 0;
  const state = share >= 0.999 ? ", full" : share >= 0.95 ? ", nearly full" : "";
  say(text, limit > 0 ? `${bytes(used)} of ${bytes(limit)}${state}` : `${bytes(used)}, no limit`);
  show(bar, limit > 0);
  bar.setAttribute("aria-label", what);
  bar.setAttribute("aria-valuenow", Math.round(share * 100));
  bar.setAttribute("aria-valuetext", text.textContent);
  bar.classList.toggle("high", share >= 0.95);
  bar.firstChild.style.width = `${Math.max(share * 100, used > 0 ? 1 : 0)}%`;
}

/** Formats a compression ratio. */
export function ratio(original, compressed) {
  if (!(original > 0)) return "";
  if (!(compressed > 0)) return "patterns only";
  const times = original / compressed;
  return `${times < 10 ? times.toFixed(1) : times < 1000 ? Math.round(times) : "over 1000"} : 1`;
}

// ---- charts of the last minutes -----------------------------------------------------------------

const KEPT_MS = 300_000;
const NAMES_MAX = 1000;

/** Rates of the last minutes, for everything that was shown. */
export class History {
  #of = new Map();

  add(name, now, rates) {
    const points = this.#of.get(name) ?? [];
    // Moves the name to the end of the map, so that the least recently updated name is removed first.
    this.#of.delete(name);
    this.#of.set(name, points);
    points.push({ at: now, read: rates.reads_per_second, write: rates.writes_per_second + rates.others_per_second });
    while (points[0].at < now - KEPT_MS) points.shift();
    if (this.#of.size > NAMES_MAX) this.#of.delete(this.#of.keys().next().value);
  }

  clear() {
    this.#of.clear();
  }

  /** Draws the rates into a node: reads as a solid line, writes and other requests as a dashed line. */
  draw(node, name, now, [width, height] = [110, 22]) {
    const points = this.#of.get(name) ?? [];
    const most = Math.max(1, ...points.map((point) => Math.max(point.read, point.write)));
    if (!node.firstChild) {
      const drawing = svg("svg", { width, height, role: "img" });
      drawing.append(
        svg("line", { class: "spark-base", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 }),
        svg("path", { class: "spark-write" }),
        svg("path", { class: "spark-read" }),
      );
      node.append(drawing);
    }
    const path = (key) => {
      let line = "";
      let before = -Infinity;
      for (const point of points) {
        const x = width - (width * (now - point.at)) / KEPT_MS;
        const y = height - 1 - ((height - 3) * point[key]) / most;
        // The line has a gap where the page was not refreshed.
        line += `${point.at - before > 15_000 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
        before = point.at;
      }
      return line;
    };
    const drawing = node.firstChild;
    drawing.children[1].setAttribute("d", path("write"));
    drawing.children[2].setAttribute("d", path("read"));
    drawing.setAttribute("aria-label", `last 5 minutes, at most ${count(most)} requests per second`);
  }
}
