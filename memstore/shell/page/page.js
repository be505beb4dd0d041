"use strict";
// Draws what the page's server sends. Every text of the store is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const SERIES = ["stall", "sealed", "committed", "durable"];
const LEVELS = ["routine", "notable", "problem"];
const EVENTS_KEPT = 300;
const OPEN_UP_TO = 24; // hosts: the racks of a small store are open
const AGAIN_MS = 2000;

const $ = (id) => document.getElementById(id);
const state = { lines: [], told: {}, jobs: [], level: "" };

function make(tag, attributes = {}, ...inside) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...inside);
  return node;
}

/** Shows rows in a box: what was there stays the same node, so that focus and open parts stay. */
function keyed(box, rows, keyOf, begin, fill) {
  const have = new Map([...box.children].map((node) => [node.dataset.key, node]));
  let at = box.firstElementChild;
  for (const row of rows) {
    const key = String(keyOf(row));
    const node = have.get(key) ?? begin(row);
    have.delete(key);
    node.dataset.key = key;
    if (node === at) at = at.nextElementSibling;
    else box.insertBefore(node, at);
    fill(node, row);
  }
  for (const node of have.values()) node.remove();
}

const seconds = (s) => (s < 0.001 ? `${(s * 1e6).toFixed(0)} µs` : s < 1 ? `${+(s * 1e3).toPrecision(3)} ms` : `${+s.toPrecision(3)} s`);
const clock = (wall_s) => new Date(wall_s * 1000).toLocaleTimeString();
const hosts = (count) => `${count.toLocaleString()} host${count === 1 ? "" : "s"}`;

function size(nbytes) {
  const power = nbytes < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(nbytes) / 10));
  return `${+(nbytes / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// -- jobs ------------------------------------------------------------------------------------------

function beginJob() {
  const keys = SERIES.map((name) => make("span", { class: `key ${name}` }, name));
  const table = make("table", {}, make("thead"), make("tbody"));
  const numbers = make("details", {}, make("summary", {}, "The last steps in numbers"), table);
  numbers.addEventListener("toggle", drawJobs);
  return make("article", {}, make("h3"), make("dl"), make("p", { class: "quiet" }, ...keys),
    make("svg:svg", { role: "img" }), numbers, make("div"));
}

function fillJob(node, cells) {
  const [title, list, keys, plot, numbers, past] = node.children;
  const { steps, recoveries } = state.told[cells.job] ?? { steps: [], recoveries: [] };
  title.textContent = cells.job;
  const shown = Object.entries(cells).filter(([head]) => head !== "job");
  keyed(list, shown, ([head]) => head, () => make("div", {}, make("dt"), make("dd")), (pair, [head, text]) => {
    pair.firstChild.textContent = head;
    pair.lastChild.textContent = text;
    pair.lastChild.className = text.includes("!") ? "lost" : "";
  });
  keys.hidden = numbers.hidden = !steps.length;
  plot.style.display = steps.length ? "" : "none";
  if (steps.length) drawPlot(plot, steps);
  if (numbers.open) fillNumbers(numbers.lastChild, steps);
  keyed(past, recoveries, (row) => row.generation, () => make("div", {}, make("p"), make("div", { class: "phases" }), make("small")), fillRecovery);
}

function fillNumbers(table, steps) {
  table.tHead.replaceChildren(make("tr", {}, ...["step", ...SERIES].map((head) => make("th", { scope: "col" }, head))));
  table.tBodies[0].replaceChildren(...steps.slice(-10).reverse().map((step) => make("tr", {},
    make("th", { scope: "row" }, step.step.toLocaleString()),
    ...(step.skip ? [make("td", { colspan: 4 }, `skipped: ${step.skip}`)]
      : SERIES.map((name) => make("td", {}, step[name] === undefined ? "-" : seconds(step[name])))))));
}

function fillRecovery(node, row) {
  const [who, bar, words] = node.children;
  who.textContent = `Recovery in place, generation ${row.generation}${row.is_over ? "" : ", under way"}: ${row.who}`;
  words.textContent = row.text || "no phase has ended yet";
  bar.replaceChildren(...Object.entries(row.seconds).map(([phase, took]) => {
    const part = make("i", { title: `${phase} ${seconds(took)}` });
    part.style.flexGrow = 1000 * took; // below 1 in all they would not fill the bar
    return part;
  }));
}

/** Draws seconds on a logarithmic scale, the steps from left to right. */
function drawPlot(plot, steps) {
  const width = plot.clientWidth || 300, height = plot.clientHeight || 160, left = 48, bottom = height - 18;
  const values = steps.flatMap((step) => SERIES.map((name) => step[name])).filter((value) => value > 0);
  const low = Math.floor(Math.log10(Math.min(...values, 0.1))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values, 0.1))));
  const x = (at) => left + ((width - left - 8) * (at + 0.5)) / steps.length;
  const y = (value) => bottom - ((bottom - 8) * (Math.log10(Math.max(value, 10 ** low)) - low)) / (high - low);
  const parts = [];
  for (let power = low; power <= high; power++) {
    parts.push(make("svg:line", { class: "grid", x1: left, x2: width, y1: y(10 ** power), y2: y(10 ** power) }));
    parts.push(make("svg:text", { x: left - 4, y: y(10 ** power) + 4, "text-anchor": "end" }, seconds(10 ** power)));
  }
  for (const name of SERIES) {
    const points = steps.map((step, at) => [x(at), step[name]]).filter(([, value]) => value !== undefined && value !== null).map(([px, value]) => [px.toFixed(1), y(value).toFixed(1)]);
    parts.push(make("svg:polyline", { class: name, points: points.map((point) => point.join()).join(" ") }));
    if (steps.length <= 40) parts.push(...points.map(([cx, cy]) => make("svg:circle", { class: name, cx, cy, r: 2.5 })));
  }
  steps.forEach((step, at) => {
    if (step.skip) parts.push(make("svg:text", { x: x(at), y: bottom - 2, "text-anchor": "middle" }, "×", make("svg:title", {}, `step ${step.step} skipped: ${step.skip}`)));
  });
  const first = steps[0].step, last = steps.at(-1);
  parts.push(make("svg:text", { x: left, y: height - 3 }, `step ${first.toLocaleString()}`));
  if (steps.length > 1) parts.push(make("svg:text", { x: width - 4, y: height - 3, "text-anchor": "end" }, last.step.toLocaleString()));
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const words = SERIES.filter((name) => last[name] !== undefined).map((name) => `${name} ${seconds(last[name])}`);
  plot.setAttribute("aria-label", `Seconds of steps ${first} to ${last.step}; the last: ${words.join(", ") || "skipped"}`);
  plot.replaceChildren(...parts);
}

function drawJobs() {
  keyed($("jobs"), state.jobs, (cells) => cells.job, beginJob, fillJob);
  if (!state.jobs.length) $("jobs").replaceChildren(make("p", {}, "no job has put anything yet"));
}

// -- hosts -----------------------------------------------------------------------------------------

function beginGroup(group) {
  const kill = make("button", { type: "button" });
  kill.addEventListener("click", () => askLoss(state.level, group.name));
  const head = ["host", "arena", "holds", "state"].map((text) => make("th", { scope: "col" }, text));
  const node = make("details", {}, make("summary", {}, make("span"), make("span", { class: "cells", "aria-hidden": "true" })),
    kill, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody")));
  node.open = state.openAll;
  node.addEventListener("toggle", () => fillHosts(node));
  node.querySelector(".cells").addEventListener("click", (event) => {
    if (!event.target.dataset.key) return;
    event.preventDefault(); // a square is no part of the switch that it lies on
    askLoss("host", event.target.dataset.key);
  });
  return node;
}

function fillGroup(node, group) {
  node.group = group;
  const away = ["dead", "odd"].map((look) => [look, group.hosts.filter((host) => host.look === look).length]);
  const words = away.filter(([, count]) => count).map(([look, count]) => `${count} ${look === "odd" ? "busy or troubled" : look}`);
  const name = group.name ? `${state.level} ${group.name}` : state.level ? `without a ${state.level}` : "all";
  const text = [name, group.within, hosts(group.hosts.length), ...words].filter(Boolean).join(" · ");
  const [head, cells] = node.firstChild.children;
  head.textContent = text;
  node.children[1].hidden = !group.name;
  node.children[1].textContent = `If ${name} died…`;
  keyed(cells, group.hosts, (host) => host.host, () => make("i"), (cell, host) => {
    cell.className = `cell ${host.look}`;
    cell.title = `${host.host}: ${host.state}`;
  });
  fillHosts(node);
}

function fillHosts(node) {
  if (!node.open) return;
  keyed(node.lastChild.tBodies[0], node.group.hosts, (host) => host.host, beginHost, (row, host) => {
    const [, arena, holds, condition] = row.children;
    const [gauge, used] = arena.children;
    gauge.hidden = host.used === null;
    if (host.used !== null) Object.assign(gauge, { max: host.limit || 1, value: host.used });
    used.textContent = host.used === null ? "-" : ` ${size(host.used)} of ${size(host.limit)}`;
    holds.textContent = host.holds;
    condition.textContent = host.state;
    condition.className = host.look;
  });
}

function beginHost(host) {
  const kill = make("button", { type: "button" }, host.host);
  kill.addEventListener("click", () => askLoss("host", host.host));
  return make("tr", {}, make("th", { scope: "row" }, kill),
    make("td", {}, make("meter", { "aria-label": `arena of ${host.host}` }), make("span")), make("td"), make("td"));
}

async function askLoss(level, name) {
  $("h-loss").textContent = `If ${level} ${name} died now`;
  $("losses").replaceChildren(make("p", {}, "asking the controller"));
  if (!$("loss").open) $("loss").showModal();
  const asked = (state.asked = {});
  const found = await fetch(`loss?${new URLSearchParams({ level, name })}`, { headers: bearer() }).then((answer) => answer.json()).catch((error) => ({ error: String(error) }));
  if (asked !== state.asked) return; // another one was chosen meanwhile
  const jobs = (found.jobs ?? []).flatMap((job) => [make("h3", {}, job.job),
    ...job.lines.map((line, at) => make("p", at ? { class: "quiet" } : { class: job.outcome }, line))]);
  const nothing = make("p", found.error ? { class: "lost" } : {}, found.error ?? "no job has anything to lose");
  $("losses").replaceChildren(...(jobs.length ? jobs : [nothing]));
}

// -- events, drills, problems ----------------------------------------------------------------------

function drawEvents() {
  const least = Number($("level").value);
  const lines = state.lines.filter((line) => LEVELS.indexOf(line.level) >= least).reverse();
  keyed($("events"), lines, (line) => line.seq, (line) => make("li", { class: line.level },
    make("small", {}, `${clock(line.wall_s)} `), make("strong", {}, line.about), ` ${line.text}`), () => {});
}

function drawDrills(drills) {
  $("drills").parentNode.hidden = !drills.length;
  keyed($("drills"), drills, (drill) => drill.job, () => make("article", {}, make("h3"), make("ol", { class: "plain" })), (node, drill) => {
    node.firstChild.textContent = drill.job;
    keyed(node.lastChild, drill.told, ([wall_s, phase]) => `${wall_s} ${phase}`, ([wall_s, phase, text]) => make("li", {},
      make("small", {}, `${clock(wall_s)} `), make("strong", {}, phase), ` ${text}`), () => {});
  });
}

function drawProblems(rows) {
  const shown = rows.length ? rows : [{ severity: "", text: "none" }];
  keyed($("problems"), shown, (row) => row.text, (row) => make("li"), (node, row) => {
    const [cause, remedy] = row.text.split("  Remedy: ");
    node.replaceChildren(make("span", { class: row.severity }, cause), make("small", {}, remedy ? ` ${remedy}` : ""));
  });
}

// -- the stream ------------------------------------------------------------------------------------

function show(message) {
  document.title = `memstore ${message.store}`;
  $("store").textContent = message.store;
  sayProblem(message.problem && `The store does not answer: ${message.problem}`);
  Object.assign(state.told, message.told);
  if (message.groups) {
    Object.assign(state, { jobs: message.jobs, level: message.level });
    const count = message.groups.reduce((sum, group) => sum + group.hosts.length, 0);
    state.openAll = count <= OPEN_UP_TO;
    $("h-hosts").textContent = `Hosts: ${count.toLocaleString()}`;
    $("as-of").textContent = `as of ${clock(message.as_of)}, asked every ${+message.every_s.toPrecision(2)} s; events every second`;
    keyed($("groups"), message.groups, (group) => group.name, beginGroup, fillGroup);
    drawProblems(message.problems);
  }
  if (message.groups || Object.keys(message.told ?? {}).length) drawJobs();
  if (message.drills) drawDrills(message.drills);
  if (message.events?.length) {
    state.lines = [...state.lines, ...message.events].slice(-EVENTS_KEPT);
    drawEvents();
  }
}

function sayProblem(text) {
  $("problem").hidden = !text;
  if ($("problem").textContent !== text) $("problem").textContent = text;
}

const bearer = () => (sessionStorage.token ? { Authorization: `Bearer ${sessionStorage.token}` } : {});

async function follow() {
  const answer = await fetch("stream", { headers: bearer() });
  if (answer.status === 401) $("token").hidden = false;
  if (!answer.ok) throw new Error((await answer.json()).error);
  $("token").hidden = true;
  state.lines = [];
  let rest = "";
  for (const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(); ;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the page's server has ended");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) show(JSON.parse(line));
  }
}

async function followForEver() {
  for (;;) {
    await follow().catch((error) => sayProblem(`No news: ${error.message}`));
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

if (location.hash.length > 1) { // the link that was printed; it stays with this tab
  sessionStorage.token = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
}
$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.token = $("token").querySelector("input").value.trim();
});
$("level").addEventListener("change", drawEvents);
$("close").addEventListener("click", () => $("loss").close());
addEventListener("resize", drawJobs);
followForEver();
