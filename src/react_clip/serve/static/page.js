"use strict";
// Texts only ever become text nodes here, never markup: a label may be anything. Nothing is stored: closing forgets.
const by = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const drawn = (tag, attributes, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const percent = (share) => share > 0 && share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
const short = (number) => String(Number(number.toPrecision(3)));
const strength = (eps) => eps ? `${eps}/255` : "none";
const [SWEEP, SAMPLE, MOST_TRIES, PAUSE] = [[0, 1, 2, 4, 8, 16], 4, 6, 350];

let info = null;          // what the server says it is
let key = "";             // an API key, in memory only
let photos = [];          // { name, blob, url, item }
let chosen = null;        // the photo that is asked about
let labels = [];          // the visitor's own; none: the server's
let eps = 0;              // where the slider stands, in 255ths
let shown = null;         // the answer on the screen
let follow = false;       // bring the next answer into view
let wanted = [0];         // what the last job was to ask, for "try again"
let [job, timer] = [new AbortController(), 0];
const memory = new Map(); // photo -> labels -> eps -> answer

// ---------------------------------------------------------------- light and dark
{
  const [root, system] = [document.documentElement, matchMedia("(prefers-color-scheme: dark)")];
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const name = () => { by("theme").textContent = dark() ? "Light" : "Dark"; };
  by("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  system.addEventListener("change", name);
  by("theme").hidden = false;
  name();
}

// ---------------------------------------------------------------- the server
class Refusal extends Error { constructor(message, status) { super(message); this.status = status; } }

function say(text, kind = "busy") {
  by("status").replaceChildren(...(text ? [make("p", { className: `notice ${kind}`, textContent: text })] : []));
  by("retry").hidden = true;
}

/** The server's JSON; waits and asks again while it is busy. */
async function call(path, signal, body) {
  for (let attempt = 1; ; attempt += 1) {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const response = await fetch(path, { method: body ? "POST" : "GET", body, signal, headers }).catch((error) => {
      throw signal.aborted ? error : new Refusal("The server cannot be reached. Is it running, and are you online?", 0);
    });
    const told = await response.json().catch(() => null);
    if (told && response.ok) return told;
    const line = told?.error?.message ?? `The server's answer (${response.status}) was cut short or is no JSON.`;
    // What was too slow once is tried once more; what found no room may find it soon.
    const tries = told?.error?.type === "deadline" ? 2 : MOST_TRIES;
    if (![429, 503].includes(response.status) || attempt >= tries) throw new Refusal(line, response.status);
    const seconds = Math.min(30, Math.max(1, Number(response.headers.get("Retry-After")) || 1));
    say(`The server is busy (${line}). Asking again in ${seconds} s, try ${attempt + 1} of ${tries}.`);
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    signal.throwIfAborted();
  }
}

function report(error) {
  if (!(error instanceof Refusal)) throw error;
  say(error.message.replace("images[0]", () => chosen.name), "error");
  by("retry").hidden = error.status >= 400 && error.status < 500;
  if (error.status !== 401) return;
  by("key").hidden = false;
  by("key-field").focus();
}

async function start() {
  begin();
  say("Asking the server what it can do\u2026");
  info = await call("v1/info", job.signal).catch(report);
  if (!info) return;
  say("");
  [by("key").hidden, by("page").hidden] = [true, false];
  const { name } = info.defence;
  const how = name === "undefended" ? "without a defence" : `defended by ${name}`;
  by("about").append(` Here: ${info.model}, ${how}.`);
  by("comparison").hidden = Boolean(info.demo);
  by("switch").hidden = !info.demo;
  describeLabels();
}

by("retry").addEventListener("click", () => (info ? run(wanted) : start()));
addEventListener("online", () => { if (!by("retry").hidden) by("retry").click(); });
by("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = by("key-field").value;
  by("key-field").value = "";
  if (info) { by("key").hidden = true; run(wanted); } else start();
});

// ---------------------------------------------------------------- photos
async function add(files) {
  const count = photos.length;
  for (const file of info ? files : []) {
    // Read now: the file may be gone when the slider moves. What is too large, or a folder, is refused when asked about.
    const small = file.size <= info.limits.max_body;
    const blob = small ? await file.arrayBuffer().then((bytes) => new Blob([bytes], { type: file.type }), () => file) : file;
    const photo = { name: file.name || "photo", blob, url: URL.createObjectURL(blob) };
    const button = make("button", { type: "button", title: photo.name }, make("img", { src: photo.url, alt: photo.name }), make("span"));
    button.addEventListener("click", () => choose(photo));
    photo.item = make("li", {}, button);
    by("strip").append(photo.item);
    photos.push(photo);
    memory.set(photo, new Map());
  }
  if (photos.length > count) choose(photos[count]);
}

function choose(photo) {
  chosen = photo;
  follow = true;
  document.body.classList.toggle("some", Boolean(photo));
  for (const each of photos) each.item.firstElementChild.setAttribute("aria-pressed", each === photo);
  by("strip").hidden = by("remove").hidden = !photo;
  changed();
}

for (const field of [by("file"), by("camera")]) {
  field.addEventListener("change", () => { add([...field.files]).then(() => { field.value = ""; }); });
}
for (const button of by("samples").children) {
  button.addEventListener("click", async () => {
    const { src, alt } = button.firstElementChild;
    const blob = await fetch(src).then((response) => response.blob());
    await add([new File([blob], `${alt}.jpg`, { type: "image/jpeg" })]);
    if (info.demo && by("at-once").checked) run([SAMPLE]);
  });
}
addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dragging"); });
addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dragging"); });
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dragging");
  add([...event.dataTransfer.files]);
});
addEventListener("paste", (event) => {
  if (!event.clipboardData?.files.length) return;
  event.preventDefault();
  add([...event.clipboardData.files]);
});
by("remove").addEventListener("click", () => {
  URL.revokeObjectURL(chosen.url);
  memory.delete(chosen);
  chosen.item.remove();
  photos = photos.filter((photo) => photo !== chosen);
  choose(photos.at(-1) ?? null);
  (chosen?.item.firstElementChild ?? by("file")).focus();
});

// ---------------------------------------------------------------- labels
function describeLabels() {
  const { preset, free, source } = info.labels;
  by("labels").hidden = !free;
  by("preset").hidden = !preset.length;
  by("preset").firstElementChild.textContent = preset.length === 1 ? "The server's label" : `The server's ${preset.length} labels`;
  by("preset").querySelector(".names").textContent = preset.join(", ");
  by("known").replaceChildren(...preset.slice(0, 500).map((value) => make("option", { value })));
  const bank = free && source === "bank" ? " The model has no text tower: only names of its label table can be used." : "";
  by("label-note").textContent = !free ? "This server answers for its own labels only."
    : (labels.length || !preset.length ? "" : "Without labels of your own, the server's are used.") + bank;
  by("clear").hidden = by("chips").hidden = !labels.length;
  by("chips").replaceChildren(...labels.map((label) => {
    const button = make("button", { type: "button", textContent: "\u00d7", ariaLabel: `Remove ${label}` });
    button.addEventListener("click", () => { relabel(labels.filter((other) => other !== label)); by("label-field").focus(); });
    return make("li", {}, make("span", { textContent: label }), button);
  }));
}

function relabel(names) {
  labels = [...new Set(names.map((name) => name.trim()).filter(Boolean))];
  describeLabels();
  changed();
}

by("labels").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = by("label-field").value;
  by("label-field").value = "";
  if (text.trim()) relabel([...labels, ...text.split(",")]);
});
by("label-field").addEventListener("input", () => {
  const texts = by("label-field").value.split(",");
  by("label-field").value = texts.pop().trimStart();
  if (texts.length) relabel([...labels, ...texts]);
});
by("label-field").addEventListener("change", () => by("labels").requestSubmit());
by("clear").addEventListener("click", () => { relabel([]); by("label-field").focus(); });

// ---------------------------------------------------------------- asking: one job at a time, the last one wins
function found() {
  const [answers, name] = [memory.get(chosen), labels.join()];
  if (!answers.has(name)) answers.set(name, new Map());
  return answers.get(name);
}

function move(value) {
  eps = value;
  Object.assign(by("eps"), { value, ariaValueText: value ? `${value} of 255` : "no attack" });
  by("eps-text").textContent = strength(value);
}

function begin() {
  clearTimeout(timer);
  job.abort();
  job = new AbortController();
  by("progress").hidden = true;
  by("sweep").textContent = `Run the whole sweep (${SWEEP.join(", ")})`;
  by("results").removeAttribute("aria-busy");
}

/** Another photo or other labels: what is on the screen no longer holds. */
function changed() {
  begin();
  say("");
  shown = null;
  if (chosen && !found().has(eps)) move(0);
  draw();
  if (chosen) soon();
}

function soon() {
  if (labels.length === 1) say("Add another label: with one there is nothing to choose from.", "");
  else timer = setTimeout(() => run([eps]), found().has(eps) ? 0 : PAUSE);
}

async function run(strengths) {
  begin();
  wanted = strengths;
  const [{ signal }, sweeping] = [job, strengths.length > 1];
  by("results").setAttribute("aria-busy", "true");
  if (sweeping) { by("sweep").textContent = "Cancel the sweep"; by("progress").hidden = false; }
  try {
    for (const [place, value] of strengths.entries()) {
      by("progress").value = place;
      move(value);
      if (!found().has(value)) {
        say(value ? `Attacking with ${strength(value)}${sweeping ? `, ${place + 1} of ${strengths.length}` : ""}\u2026` : "Asking the server\u2026");
        await ask(value, signal);
      }
      signal.throwIfAborted();
      shown = found().get(value);
      draw();
    }
    begin();
    say("");
  } catch (error) {
    if (signal.aborted) return;
    begin();
    if (shown) move(shown.eps);
    report(error);
  }
}

async function ask(value, signal) {
  const answers = found();
  const [size, most] = [chosen.blob.size, info.limits.max_body];
  if (size > most) throw new Refusal(`images[0] has ${size.toLocaleString("en")} bytes; this server takes ${most.toLocaleString("en")}`, 413);
  const body = new FormData();
  body.append("images", chosen.blob, "photo");
  if (labels.length) body.append("labels", labels.join(","));
  // All names: the clean answer's share is wanted even where it is far behind.
  body.append("top_k", Math.max(5, labels.length || info.labels.preset.length));
  if (!info.demo) {
    const [{ answers: defended, diagnostics }] = (await call("v1/classify", signal, body)).results;
    answers.set(value, { eps: value, defended, diagnostics });
    return;
  }
  body.append("eps", value);
  const { clean, attacked, attacked_label: target, perturbation, amplification } = await call("v1/demo/attack", signal, body);
  const base = { target, photo: clean.image };
  if (!answers.has(0)) answers.set(0, { eps: 0, ...base, ...clean });
  answers.set(value, { eps: value, ...base, ...attacked, perturbation, amplification });
}

by("eps").addEventListener("input", () => { begin(); move(Number(by("eps").value)); soon(); });
by("sweep").addEventListener("click", () => {
  if (by("progress").hidden) { run(SWEEP); return; }
  begin();
  say("");
  move(shown.eps);
});

// ---------------------------------------------------------------- what the answers look like
function draw() {
  by("empty").hidden = Boolean(chosen);
  by("attack").hidden = !chosen || !info.demo;
  by("results").hidden = !shown;
  by("course").hidden = !shown || !info.demo;
  by("why").hidden = !shown?.diagnostics;
  by("no-why").hidden = !shown || info.diagnostics;
  by("verdict").hidden = !shown;
  by("verdict").textContent = shown ? verdict(shown) : "";
  if (!shown) return;
  chosen.item.querySelector("span").textContent = found().get(0).defended[0].label;
  by("pictures").replaceChildren(...pictures(shown));
  by("answers").replaceChildren(...(shown.plain ? [panel("Plain CLIP", "plain", shown.plain)] : []), panel("Defended CLIP", "defended", shown.defended));
  if (shown.diagnostics) explain(shown.diagnostics);
  if (info.demo) drawCourse();
  if (follow) by("verdict").scrollIntoView({ block: "nearest" });
  follow = false;
}

function verdict({ eps: at, plain, defended, target }) {
  const named = ([best]) => `${best.label} (${percent(best.probability)})`;
  if (!plain) return `Defended CLIP says ${named(defended)}.`;
  if (!at) return `Not attacked, plain CLIP says ${named(plain)} and defended CLIP ${named(defended)}.`;
  const says = (answers) => answers[0].label === target ? `still says ${named(answers)}` : `says ${named(answers)} instead of ${target}`;
  return `Attacked with ${strength(at)}, plain CLIP ${says(plain)}; defended CLIP ${says(defended)}.`;
}

function pictures({ eps: at, photo, image, perturbation, amplification }) {
  const figure = (src, text) => make("figure", {}, make("img", { src, alt: text }), make("figcaption", { textContent: text }));
  if (!photo) return [figure(chosen.url, chosen.name)];
  const all = [figure(photo, "the photo as the model sees it")];
  if (at) all.push(figure(image, `attacked with ${strength(at)}`), figure(perturbation, `the change, ${Math.round(amplification)} times enlarged`));
  return all;
}

function panel(title, kind, answers) {
  const { target, eps: at } = shown;
  const row = ({ label, probability }, later = false) => {
    const item = make("li", { className: `${label === target ? "clean" : ""} ${later ? "later" : ""}` },
      make("span", { textContent: label }), make("span", { textContent: percent(probability) }));
    item.style.setProperty("--share", `${100 * probability}%`);
    return item;
  };
  const list = make("ol", { className: "bars" }, ...answers.slice(0, 5).map((answer) => row(answer)));
  const behind = answers.findIndex((answer) => answer.label === target);
  if (behind >= 5) list.append(row(answers[behind], true));
  const badge = answers[0].label === target ? { className: "badge", textContent: "\u2713 unchanged" }
    : { className: "badge changed", textContent: "\u2717 changed" };
  const head = make("h2", { textContent: title }, ...(at ? [make("span", badge)] : []));
  return make("section", { className: `card ${kind}`, ariaLabel: title }, head, list);
}

const number = (value) => value === null ? "\u2013" : value.toFixed(3);

/** What the gate did, in two parts: the first is emphasised. */
function gateWords({ score, gated }) {
  const { tau } = info.defence;
  if (tau === null) return [gated ? "The photo was corrected" : "The photo was not corrected", "."];
  const [above, below] = [`\u2265 \u03c4 ${short(tau)}`, `< \u03c4 ${short(tau)}`];
  const sum = `score = ${number(score)}`;
  return gated ? ["The gate opened", `: ${sum} ${above}. The answer is corrected.`]
    : ["The gate stayed closed", `: ${sum} ${below}. The answer is plain CLIP's.`];
}

function explain(diagnostics) {
  const { drift, instability, score, sigma, gated, passes } = diagnostics;
  const { tau } = info.defence;
  const words = gateWords(diagnostics);
  const spent = ` ${short(passes)} encoder passes were spent.`;
  by("gate").replaceChildren(make("b", { className: gated ? "open" : "", textContent: words[0] }), words[1] + spent);
  const reach = Math.max(2, 1.25 * (tau ?? 0));
  const line = (title, about, value, text, low, high, mark) => make("div", {},
    make("dt", { textContent: title }, make("small", { textContent: about })),
    make("dd", { textContent: text }), make("dd", { className: "drawn" }, scale(title, value, text, low, high, mark)));
  const measured = [
    drift !== undefined && line("drift", "how far the feature moves", drift, number(drift), 0, reach, null),
    instability !== undefined && line("instability", "how far the answer moves", instability, number(instability), 0, Math.LN2, null),
    score !== undefined && line("score", "what the gate looks at", score, number(score), 0, reach + Math.LN2, tau),
    sigma !== undefined && line("\u03c3", "noise of the correction", sigma, number(sigma), 0, Math.max(0.15, sigma), null),
  ].filter(Boolean);
  by("scales").replaceChildren(...measured, line("passes", "runs of the encoder", passes, short(passes), 0, Math.max(4, passes), null));
}

function scale(name, value, text, low, high, tau) {
  const place = (number) => 6 + 228 * Math.min(1, Math.max(0, high > low ? (number - low) / (high - low) : 0.5));
  const ends = name === "instability" ? ["0", "ln 2"] : [short(low), short(high)];
  const words = `${name} is ${text} on a scale from ${ends[0]} to ${ends[1]}${tau === null ? "" : `, threshold tau ${short(tau)}`}`;
  const parts = [drawn("line", { x1: 6, x2: 234, y1: 18, y2: 18, class: "axis" }),
    drawn("text", { x: 2, y: 36 }, ends[0]), drawn("text", { x: 238, y: 36, "text-anchor": "end" }, ends[1])];
  if (tau !== null) parts.push(drawn("line", { x1: place(tau), x2: place(tau), y1: 9, y2: 27, class: "tau" }),
    drawn("text", { x: place(tau), y: 38, class: "tau", "text-anchor": "middle" }, `\u03c4 ${short(tau)}`));
  return drawn("svg", { viewBox: "0 0 240 42", role: "img", "aria-label": words }, ...parts,
    drawn("circle", { cx: place(value), cy: 18, r: 6, class: "dot" }));
}

function drawCourse() {
  const share = (answers, target) => answers.find((answer) => answer.label === target)?.probability ?? 0;
  const points = [...found().values()].sort((a, b) => a.eps - b.eps)
    .map((each) => ({ eps: each.eps, plain: share(each.plain, each.target), defended: share(each.defended, each.target) }));
  by("course-note").textContent = `Probability of the clean answer, ${shown.target}, for every strength visited so far.`;
  by("points").tBodies[0].replaceChildren(...points.map((point) => make("tr", {}, make("th", { scope: "row", textContent: `${point.eps}/255` }),
    make("td", { textContent: percent(point.plain) }), make("td", { textContent: percent(point.defended) }))));
  const [wide, high, left, top, bottom] = [Math.min(900, by("chart").clientWidth || 300), 240, 52, 26, 40];
  // Small strengths matter most; their root gives them room.
  const x = (value) => left + (wide - left - 14) * Math.sqrt(value / SWEEP.at(-1));
  const y = (value) => top + (high - top - bottom) * (1 - value);
  const parts = [];
  for (const value of [0, 0.5, 1]) parts.push(drawn("text", { x: left - 10, y: y(value) + 4, "text-anchor": "end" }, `${100 * value} %`),
    drawn("line", { x1: left, x2: wide - 14, y1: y(value), y2: y(value), class: value ? "grid" : "axis" }));
  for (const value of SWEEP) parts.push(drawn("text", { x: x(value), y: high - bottom + 17, "text-anchor": "middle" }, String(value)));
  parts.push(drawn("text", { x: wide - 14, y: high - 4, "text-anchor": "end" }, "largest change of a pixel, in 255ths"));
  ["plain", "defended"].forEach((kind, row) => {
    const mark = (cx, cy, now) => kind === "plain"
      ? drawn("rect", { x: cx - 4.5, y: cy - 4.5, width: 9, height: 9, class: `mark plain ${now ? "now" : ""}` })
      : drawn("circle", { cx, cy, r: 5, class: `mark ${now ? "now" : ""}` });
    parts.push(drawn("polyline", { points: points.map((point) => `${x(point.eps)},${y(point[kind])}`).join(" "), class: `course ${kind}` }),
      ...points.map((point) => mark(x(point.eps), y(point[kind]), point.eps === shown.eps)),
      mark(left + 8 + 110 * row, 9), drawn("text", { x: left + 18 + 110 * row, y: 13 }, `${kind} CLIP`));
  });
  const last = points.at(-1);
  const words = `Line chart of ${points.length} strengths; at ${last.eps}/255 plain CLIP gives ${percent(last.plain)} and ` +
    `defended CLIP ${percent(last.defended)}. The table below holds all points.`;
  by("chart").replaceChildren(drawn("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": words }, ...parts));
}
new ResizeObserver(() => { if (shown && info.demo) drawCourse(); }).observe(by("course"));

start();
