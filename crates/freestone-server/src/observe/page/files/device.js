// The selected device: facts, latencies, exports, attributes.

import { bytes, count, duration, el, percent, ratio, say, show, svg, usage } from "./draw.js";

const byId = (id) => document.getElementById(id);
/** Period of the filled latency histograms. */
const LIVE_MS = 30_000;
/** Latency histograms of the last refreshes, the oldest first. */
let samples = [];

export function clear() {
  samples = [];
  for (const id of ["facts", "latency", "exports", "attributes"]) byId(id).replaceChildren();
  say(byId("statistics"), "");
  say(byId("device-kind"), "");
}

export function take(data, now) {
  const { stat, rates } = data;
  const words = [stat.kind, stat.zones ? "zoned" : "", stat.base ? `of ${stat.base}` : "", bytes(stat.disksize), stat.comp_algorithm ?? ""];
  say(byId("device-kind"), words.filter(Boolean).join(", "));
  facts(stat, rates);
  samples.push({ at: now, latency: data.latency });
  while (samples.length > 2 && samples[1].at <= now - LIVE_MS) samples.shift();
  latencies(data.latency);
  exports(stat.exports ?? []);
  attributes(data.attributes);
  // Large and rarely used, so written only while the section is open.
  if (byId("statistics-all").open) say(byId("statistics"), JSON.stringify(stat, null, 2));
}

// ---- facts --------------------------------------------------------------------------------------

/** Returns the child of `parent` with this key, and creates it if it does not exist. */
function keyed(parent, key, make) {
  let node = [...parent.children].find((child) => child.dataset.key === key);
  if (!node) {
    node = make();
    node.dataset.key = key;
    parent.append(node);
  }
  return node;
}

function fact(name, text, isBad = false) {
  const node = keyed(byId("facts"), name, () => el("div", {}, el("span", {}, name), el("div", { class: "figures" })));
  say(node.lastChild, text);
  node.lastChild.classList.toggle("flag", isBad);
}

function facts(stat, rates) {
  const mm = stat.mm_stat;
  if (mm) {
    const node = keyed(byId("facts"), "Memory", () => el("div", {}, el("span", {}, "Memory"), el("div")));
    usage(node.lastChild, `Memory of ${stat.name}`, mm.mem_used_total, mm.mem_limit);
    fact("Stored", `${bytes(mm.orig_data_size)}, ${percent(mm.orig_data_size, stat.disksize)} of the disk`);
    fact("Compression", ratio(mm.orig_data_size, mm.compr_data_size) || "no data");
  }
  const family = stat.family;
  if (family && (family.mem_used_total !== mm?.mem_used_total || family.mem_limit !== mm?.mem_limit)) {
    const node = keyed(byId("facts"), "Family", () => el("div", {}, el("span", {}, "Memory of the family"), el("div")));
    usage(node.lastChild, "Memory of the family", family.mem_used_total, family.mem_limit);
  }
  if (stat.backing) fact("Backing device", `${bytes(stat.backing.used_bytes)} used`);
  if (rates) {
    fact("Reads", `${count(rates.reads_per_second)}/s, ${bytes(rates.read_bytes_per_second)}/s`);
    fact("Writes", `${count(rates.writes_per_second)}/s, ${bytes(rates.written_bytes_per_second)}/s`);
    fact("Discards, flushes, others", `${count(rates.others_per_second)}/s`);
    fact("Waiting", `${rates.in_flight} requests`);
    const failed = stat.io?.errors ?? 0;
    fact("Failed", `${failed} requests, ${count(rates.errors_per_second)}/s`, failed > 0);
  }
  if (stat.progress) fact(`${stat.progress.verb} in progress`, percent(stat.progress.done_bytes, stat.progress.total_bytes));
  if (stat.withheld) fact("Withheld", "its exports are withheld; see freestone publish", true);
  if (stat.changed) fact("File", `${stat.changed.how}: ${stat.changed.file}`, true);
  for (const [error, many] of Object.entries(stat.failed ?? {})) fact(`Failed: ${error.replaceAll("_", " ")}`, `${many} requests`, true);
}

// ---- latencies ----------------------------------------------------------------------------------

// Buckets as in the server: PARTS buckets for each power of two of nanoseconds, and one on each side.
const FIRST_LOG2 = 8;
const LAST_LOG2 = 36;
const PARTS = 4;
const OPS = ["read", "write", "append", "discard", "write_zeroes", "flush"];
const BUCKETS = (LAST_LOG2 - FIRST_LOG2) * PARTS + 2;

/** Returns the index of the bucket with this upper bound; the last bucket has none. */
function bucketIndex(end) {
  if (end === null) return BUCKETS - 1;
  const log2 = Math.floor(Math.log2(end));
  return (log2 - FIRST_LOG2) * PARTS + Math.round((end / 2 ** log2 - 1) * PARTS);
}

function end(bucket) {
  const log2 = FIRST_LOG2 + Math.floor(bucket / PARTS);
  return 2 ** log2 * (1 + (bucket % PARTS) / PARTS);
}

function spread(buckets) {
  const counts = new Array(BUCKETS).fill(0);
  for (const [to, many] of buckets ?? []) counts[bucketIndex(to)] += many;
  return counts;
}

function within(counts, share) {
  const all = counts.reduce((a, b) => a + b, 0);
  let seen = 0;
  return counts.findIndex((many) => (seen += many) >= Math.max(all * share, 1));
}

function latencies(latency) {
  const parent = byId("latency");
  const ops = OPS.filter((op) => latency[op]);
  const before = samples.length > 1 ? samples[0].latency : latency;
  const all = ops.map((op) => [op, spread(latency[op])]);
  const used = all.flatMap(([, counts]) => counts.flatMap((many, bucket) => (many > 0 ? [bucket] : [])));
  // The axis covers whole powers of two, and is the same for all operations.
  const first = Math.max(0, Math.floor((Math.min(...used) - 1) / PARTS) * PARTS - PARTS + 1);
  const last = Math.min(BUCKETS - 1, Math.ceil(Math.max(...used) / PARTS) * PARTS + PARTS);
  for (const child of [...parent.children]) if (!ops.includes(child.dataset.key)) child.remove();
  if (ops.length === 0) {
    keyed(parent, "", () => el("p", { class: "quiet" }, "No requests yet."));
    return;
  }
  for (const [op, counts] of all) {
    const earlier = spread(before[op]);
    const live = counts.map((many, bucket) => Math.max(0, many - earlier[bucket]));
    const make = () => el("div", { class: "latency" }, el("div", {}, el("p"), el("p", { class: "quiet" }), el("p", { class: "quiet" })), el("div"));
    const node = keyed(parent, op, make);
    const [name, half, most] = node.firstChild.children;
    const isLive = live.some((many) => many > 0);
    const shown = isLive ? live : counts;
    say(name, `${op.replace("_", " ")}${isLive ? "" : ", idle"}`);
    say(half, `p50 ${duration(end(within(shown, 0.5)))}`);
    say(most, `p99 ${duration(end(within(shown, 0.99)))}`);
    const width = Math.max(240, node.lastChild.clientWidth);
    node.lastChild.replaceChildren(histogram(op, counts, live, [first, last], width));
  }
}

function histogram(op, counts, live, [first, last], width) {
  const [height, foot] = [46, 15];
  const step = width / (last - first + 1);
  const bars = (of) => {
    const most = Math.max(1, ...of);
    return of.slice(first, last + 1).map((many) => (many > 0 ? Math.max((many / most) * height, 1.5) : 0));
  };
  const shown = live.some((many) => many > 0) ? live : counts;
  const words = `${op}: p50 ${duration(end(within(shown, 0.5)))}, p99 ${duration(end(within(shown, 0.99)))}`;
  const drawing = svg("svg", {
    viewBox: `0 0 ${width} ${height + foot}`, width: "100%", role: "img", "aria-label": words,
  });
  let outline = `M0 ${height}`;
  bars(counts).forEach((high, index) => {
    outline += `V${(height - high).toFixed(1)}H${((index + 1) * step).toFixed(1)}`;
  });
  drawing.append(svg("path", { class: "ever", d: `${outline}V${height}` }));
  bars(live).forEach((high, index) => {
    const at = { x: (index * step).toFixed(1), y: (height - high).toFixed(1) };
    const kind = op === "read" ? "live" : "live write";
    if (high > 0) drawing.append(svg("rect", { class: kind, ...at, width: Math.max(step - 1, 1).toFixed(1), height: high.toFixed(1) }));
  });
  drawing.append(svg("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }));
  for (const share of [0.5, 0.99]) {
    const x = ((within(shown, share) + 1 - first) * step).toFixed(1);
    drawing.append(svg("line", { class: "mark", x1: x, x2: x, y1: 0, y2: height }));
  }
  // A tick for each decade of time.
  for (let nanoseconds = 1000; nanoseconds <= 1e10; nanoseconds *= 10) {
    const bucket = 1 + (Math.log2(nanoseconds) - FIRST_LOG2) * PARTS;
    if (bucket < first || bucket > last) continue;
    const x = (bucket - first) * step;
    drawing.append(svg("line", { class: "axis", x1: x, x2: x, y1: height, y2: height + 4 }));
    const anchor = x < 20 ? "start" : x > width - 24 ? "end" : "middle";
    drawing.append(svg("text", { x, y: height + foot - 1, "text-anchor": anchor }, duration(nanoseconds).replace(".0", "")));
  }
  return drawing;
}

// ---- exports and attributes ---------------------------------------------------------------------

function exports(list) {
  const parent = byId("exports");
  const keys = list.map((one) => one.address);
  for (const child of [...parent.children]) if (!keys.includes(child.dataset.key)) child.remove();
  if (list.length === 0) keyed(parent, "", () => el("p", { class: "quiet" }, "Not published."));
  for (const one of list) {
    const make = () => el("div", { class: "export" }, el("p", {}, el("code")), el("p", { class: "quiet" }));
    const node = keyed(parent, one.address, make);
    say(node.firstChild.firstChild, one.uri ?? one.address);
    const many = one.connections === 1 ? "1 connection" : `${one.connections} connections`;
    const requests = one.io ? `${count(one.io.reads)} reads, ${count(one.io.writes)} writes, ${count(one.io.errors)} failed` : "";
    const words = [many, one.read_only ? "read-only" : "", one.template ? "template" : "", requests];
    say(node.lastChild, words.filter(Boolean).join("; "));
  }
}

function attributes(all) {
  const parent = byId("attributes");
  const names = Object.keys(all);
  for (const child of [...parent.children]) if (!names.includes(child.dataset.key.slice(1))) child.remove();
  for (const name of names) {
    keyed(parent, `?${name}`, () => el("dt", {}, name));
    const value = all[name];
    const text = Array.isArray(value) ? value.join("\n") : value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
    say(keyed(parent, `=${name}`, () => el("dd")), text === "" ? "-" : text);
  }
  show(byId("attributes-all"), names.length > 0);
}
