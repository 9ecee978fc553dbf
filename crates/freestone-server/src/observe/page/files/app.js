// Main script of the page: polls the JSON API while the page is visible, and shows the responses.

import { History, bytes, count, duration, el, percent, ratio, say, show, uptime, usage } from "./draw.js";
import * as device from "./device.js";
import * as map from "./map.js";

/** Pause between two refreshes. */
const EVERY_MS = 2000;
/** Timeout of requests, except for maps. */
const RESPONSE_MAX_MS = 8000;
const MAP_MAX_MS = 15_000;
/** Shortest interval of maps. A map also pauses for ten times as long as drawing took. */
const MAP_EVERY_MS = 2000;
/** Devices shown at a time. */
const DEVICES = 50;
/** How long the page shows that the server responds again. */
const BACK_SHOWN_MS = 15_000;

const byId = (id) => document.getElementById(id);
const history = new History();
const state = { chosen: "", by: "requests", prefix: "", from: 0 };
const server = { goneSince: 0, heard: 0, pid: 0, refreshing: false, drawing: false, mapDue: 0 };
let timer = 0;

// ---- selection, kept in the URL -----------------------------------------------------------------

function readAddress() {
  const params = new URLSearchParams(location.hash.slice(1));
  const chosen = params.get("device") ?? "";
  state.prefix = params.get("prefix") ?? "";
  const orders = [...byId("by").options].map((option) => option.value);
  state.by = orders.includes(params.get("by")) ? params.get("by") : "requests";
  state.from = Math.max(0, Number.parseInt(params.get("from"), 10) || 0);
  if (document.activeElement !== byId("prefix")) byId("prefix").value = state.prefix;
  byId("by").value = state.by;
  if (chosen !== state.chosen) choose(chosen);
}

function address(changes) {
  const wanted = { device: state.chosen, by: state.by, prefix: state.prefix, from: state.from, ...changes };
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(wanted)) {
    if (value && !(key === "by" && value === "requests")) params.set(key, value);
  }
  return `#${params}`;
}

function go(changes) {
  window.history.replaceState(null, "", address(changes));
  readAddress();
  refresh();
}

function choose(name) {
  state.chosen = name;
  device.clear();
  map.clear("");
  server.mapDue = 0;
  show(byId("device"), name !== "");
  show(byId("device-notice"), false);
  show(byId("device-body"), true);
  say(byId("device-title"), name);
  document.querySelector("main").classList.toggle("split", name !== "");
  document.title = name ? `${name} - Freestone` : "Freestone";
}

// ---- requests -----------------------------------------------------------------------------------

/** Returns a JSON response of the server. An error reported by the server has its text in `sentence`. */
async function request(path, most = RESPONSE_MAX_MS) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(most) });
  const data = await response.json();
  if (!response.ok) throw Object.assign(new Error(data.error), { sentence: data.error, status: response.status });
  return data;
}

/** Refreshes everything but the map. Runs once at a time; the next run starts after this one. */
async function refresh() {
  clearTimeout(timer);
  if (document.hidden) return;
  if (server.refreshing) {
    server.again = true;
    return;
  }
  server.refreshing = true;
  server.again = false;
  try {
    const query = new URLSearchParams({ by: state.by, count: DEVICES, from: state.from, prefix: state.prefix });
    const data = await request(`api/overview?${query}`);
    showOnline(data);
    takeOverview(data, Date.now());
    if (state.chosen) await refreshDevice(state.chosen);
  } catch (error) {
    showOffline(error);
  }
  server.refreshing = false;
  timer = setTimeout(refresh, server.again ? 0 : EVERY_MS);
  refreshMap();
}

async function refreshDevice(name) {
  try {
    const data = await request(`api/device/${encodeURIComponent(name)}`);
    if (state.chosen !== name) return;
    show(byId("device-notice"), false);
    show(byId("device-body"), true);
    device.take(data, Date.now());
  } catch (error) {
    if (!error.sentence) throw error;
    if (state.chosen !== name) return;
    say(byId("device-notice"), error.sentence);
    show(byId("device-notice"), true);
    show(byId("device-body"), error.status !== 404);
    if (error.status === 404) device.clear();
  }
}

/** Refreshes the map in parallel to `refresh`, because the map of a large device takes long. */
async function refreshMap() {
  const name = state.chosen;
  if (!name || server.drawing || server.goneSince || document.hidden || Date.now() < server.mapDue) return;
  server.drawing = true;
  const began = Date.now();
  try {
    const data = await request(`api/map/${encodeURIComponent(name)}?cells=${map.cellsWanted()}`, MAP_MAX_MS);
    if (state.chosen === name) map.take(data);
  } catch (error) {
    // Status 503: another map is being drawn, so try again later. `refresh` shows other failures.
    if (state.chosen === name && error.sentence && error.status !== 503) map.clear(error.sentence);
  }
  server.drawing = false;
  if (state.chosen === name) server.mapDue = Date.now() + Math.max(MAP_EVERY_MS, 10 * (Date.now() - began)) - 100;
}

function clock(at) {
  return new Date(at).toLocaleTimeString([], { hour12: false });
}

function showOffline(error) {
  server.goneSince ||= Date.now();
  const why = error.sentence ?? (error.name === "TimeoutError" ? "the request timed out" : "connection failed");
  const heard = server.heard ? ` The data shown is from ${clock(server.heard)}.` : "";
  say(byId("gone"), `The server has not responded since ${clock(server.goneSince)}: ${why}.${heard}`);
  show(byId("gone"), true);
  show(byId("back"), false);
  document.body.classList.add("is-gone");
  document.title = "Offline - Freestone";
}

function showOnline(data) {
  const isRestarted = server.pid !== 0 && server.pid !== data.server.pid;
  if (isRestarted) {
    history.clear();
    device.clear();
  }
  if (server.goneSince || isRestarted) {
    const since = server.goneSince ? ` It had not responded since ${clock(server.goneSince)}.` : "";
    say(byId("back"), `${isRestarted ? "The server was restarted." : "The server responds again."}${since}`);
    show(byId("back"), true);
    setTimeout(() => show(byId("back"), false), BACK_SHOWN_MS);
    show(byId("gone"), false);
    document.body.classList.remove("is-gone");
    document.title = state.chosen ? `${state.chosen} - Freestone` : "Freestone";
    server.goneSince = 0;
    server.mapDue = 0;
  }
  server.pid = data.server.pid;
  server.heard = Date.now();
  say(byId("age"), `As of ${clock(server.heard)}, rates over ${data.seconds.toFixed(1)} s. ` +
    "Refreshed every 2 s while this page is visible. A read of a fork from its base counts for both. This page is read-only.");
}

// ---- overview -----------------------------------------------------------------------------------

function takeOverview(data, now) {
  header(data, now);
  families(data, now);
  devices(data, now);
  const left = data.missing_left_out ? ` And ${data.missing_left_out} more.` : "";
  const lines = data.missing.map(({ name, why }) => `${name} is missing: ${why}.`);
  say(byId("missing"), lines.join(" ") + left);
  show(byId("missing"), lines.length > 0);
}

function header(data, now) {
  const { version, uptime_seconds, process_rss_bytes, devices, forks, connections } = data.server;
  say(byId("version"), version);
  const { total } = data;
  const rows = [
    ["uptime", uptime(uptime_seconds)],
    ["memory", bytes(process_rss_bytes)],
    ["devices", `${devices}${forks ? `, ${forks} of them forks` : ""}`],
    ["connections", `${connections}`],
    ["reads", `${count(total.reads_per_second)}/s, ${bytes(total.read_bytes_per_second)}/s`],
    ["writes", `${count(total.writes_per_second)}/s, ${bytes(total.written_bytes_per_second)}/s`],
  ];
  const list = byId("server");
  if (!list.firstChild) {
    for (const [name] of rows) list.append(el("div", {}, el("dt", { class: name }, name), el("dd")));
    list.append(el("div", { id: "trend" }));
  }
  rows.forEach(([, text], index) => say(list.children[index].lastChild, text));
  history.add("", now, total);
  history.draw(byId("trend"), "", now, [150, 24]);
}

function families(data, now) {
  show(byId("families-section"), data.families.length > 0);
  say(byId("families-more"), data.families_left_out ? `the busiest, ${data.families_left_out} omitted` : "");
  const parent = byId("families");
  const make = (name) => {
    const title = el("h3", {}, el("a", { href: address({ device: name }) }, name), " ", el("small"));
    return el("div", { class: "family" }, title, el("div"), el("p", {}, el("span"), el("span")), el("p", {}, el("span"), el("span")));
  };
  // Sorted by name, so that families do not change places.
  data.families.sort((a, b) => (a.name < b.name ? -1 : 1));
  arrange(parent, data.families, (family) => family.name, make, (node, family) => {
    const [title, memory, stored, rates] = node.children;
    title.firstChild.href = address({ device: family.name });
    const others = [
      many(family.forks, "fork", "forks"),
      // Excludes the device that gives the family its name.
      many(family.devices - family.forks - 1, "other disk or snapshot", "other disks and snapshots"),
      many(family.templates, "template", "templates"),
    ].filter(Boolean);
    say(title.lastChild, [family.kind, ...others].join(", "));
    show(memory, family.memory !== undefined);
    if (family.memory) usage(memory, `Memory of the family of ${family.name}`, family.memory.mem_used_total, family.memory.mem_limit);
    const times = ratio(family.orig_data_size, family.compr_data_size);
    say(stored.firstChild, family.orig_data_size ? `${bytes(family.orig_data_size)} stored` : "no data stored");
    say(stored.lastChild, times ? `compressed ${times}` : "");
    const { reads_per_second: reads, writes_per_second: writes } = family.rates;
    say(rates.firstChild, `${count(reads)} reads/s, ${count(writes)} writes/s`);
    history.add(`family ${family.name}`, now, family.rates);
    history.draw(rates.lastChild, `family ${family.name}`, now, [90, 20]);
  });
}

function devices(data, now) {
  const { found, from } = data;
  const last = from + data.devices.length;
  const range = data.devices.length < found ? `${from + 1} to ${last} of ${found}` : `${found}`;
  say(byId("found"), data.devices.length ? range : "");
  byId("earlier").disabled = from === 0;
  byId("later").disabled = last >= found;
  show(byId("earlier").parentElement, found > DEVICES || from > 0);
  const why = state.prefix ? `No device has a name that begins with ${state.prefix}.` : "No devices.";
  say(byId("none"), from > 0 ? "No more devices." : why);
  show(byId("none"), data.devices.length === 0);
  const body = byId("devices").tBodies[0];
  const make = (name) => {
    const link = el("a", { href: address({ device: name }), title: name }, name);
    const kind = el("td", { class: "kind" }, el("span"), " ", el("span", { class: "quiet" }));
    const number = (more = "") => el("td", { class: `number ${more}` });
    return el("tr", {}, el("td", {}, link), kind, number("wide"), number("wide"), el("td", { class: "memory" }, el("div")),
      number(), number(), number("wide"), number("wide"), number("wide"), el("td", { class: "trend" }));
  };
  arrange(body, data.devices, (row) => row.state.name, make, (node, row) => fillRow(node, row, now));
}

function many(number, one, more) {
  return number > 0 ? `${number} ${number === 1 ? one : more}` : "";
}

/** Returns the kind of a device with its most important states. */
function flags(row) {
  const words = [];
  if (row.zoned) words.push("zoned");
  if (row.withheld) words.push(row.content_of || row.changed || row.withheld_because ? "withheld" : "lost, withheld");
  if (row.changed) words.push("changed");
  if (row.status === "Invalid" || row.status === "Overflow") words.push(row.status.toLowerCase());
  if (row.merge && row.merge !== "finished") words.push(`merge ${row.merge}`);
  if (row.progress) words.push(`${row.progress.verb} ${percent(row.progress.done_bytes, row.progress.total_bytes)}`);
  return words.length ? `${row.kind} (${words.join(", ")})` : row.kind;
}

function fillRow(node, { rates, state: row }, now) {
  const cells = node.children;
  cells[0].firstChild.href = address({ device: row.name });
  const isChosen = row.name === state.chosen;
  node.classList.toggle("chosen", isChosen);
  if (isChosen) cells[0].firstChild.setAttribute("aria-current", "true");
  else cells[0].firstChild.removeAttribute("aria-current");
  say(cells[1].firstChild, flags(row));
  cells[1].firstChild.classList.toggle("flag", Boolean(row.withheld || row.changed || row.status === "Invalid"));
  say(cells[1].lastChild, row.base ? `of ${row.base}` : "");
  say(cells[2], bytes(row.disksize));
  const times = ratio(row.orig_data_size, row.compr_data_size);
  say(cells[3], row.orig_data_size ? `${bytes(row.orig_data_size)}, ${times}` : "-");
  const memory = cells[4].firstChild;
  show(memory, row.mem_used_total !== undefined);
  if (row.mem_used_total !== undefined) usage(memory, `Memory of ${row.name}`, row.mem_used_total, row.mem_limit);
  say(cells[5], count(rates.reads_per_second));
  say(cells[6], count(rates.writes_per_second));
  say(cells[7], bytes(rates.read_bytes_per_second + rates.written_bytes_per_second));
  say(cells[8], rates.p99_ns === undefined ? "-" : duration(rates.p99_ns));
  const waiting = rates.in_flight > 0 ? `${rates.in_flight} waiting` : "";
  const failed = rates.errors_per_second > 0 ? `${count(rates.errors_per_second)}/s failed` : "";
  say(cells[9], [waiting, failed].filter(Boolean).join(", ") || "-");
  cells[9].classList.toggle("flag", failed !== "");
  history.add(row.name, now, rates);
  history.draw(cells[10], row.name, now);
}

/** Shows the items of `wanted` in `parent`, in this order. Reuses the nodes of items that it already shows. */
function arrange(parent, wanted, nameOf, make, fill) {
  const known = new Map([...parent.children].map((node) => [node.dataset.name, node]));
  const nodes = wanted.map((one) => {
    const name = nameOf(one);
    const node = known.get(name) ?? make(name);
    node.dataset.name = name;
    fill(node, one);
    return node;
  });
  const names = new Set(nodes.map((node) => node.dataset.name));
  for (const [name, node] of known) if (!names.has(name)) node.remove();
  // Keep the order while the pointer is over the list.
  if (parent.matches(":hover")) {
    for (const node of nodes) if (!node.parentElement) parent.append(node);
    return;
  }
  const focused = document.activeElement;
  nodes.forEach((node, index) => {
    if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
  });
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}

// ---- user input ---------------------------------------------------------------------------------

byId("choose").addEventListener("submit", (event) => event.preventDefault());
byId("prefix").addEventListener("input", (event) => go({ prefix: event.target.value, from: 0 }));
byId("by").addEventListener("change", (event) => go({ by: event.target.value, from: 0 }));
byId("earlier").addEventListener("click", () => go({ from: Math.max(0, state.from - DEVICES) }));
byId("later").addEventListener("click", () => go({ from: state.from + DEVICES }));
byId("close").addEventListener("click", (event) => {
  event.preventDefault();
  go({ device: "" });
});
byId("statistics-all").addEventListener("toggle", refresh);
window.addEventListener("hashchange", () => {
  const before = state.chosen;
  readAddress();
  if (state.chosen && state.chosen !== before) byId("device").scrollIntoView({ block: "nearest" });
  refresh();
});
document.addEventListener("visibilitychange", refresh);
readAddress();
refresh();
