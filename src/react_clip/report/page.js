"use strict";
// Texts only ever become text nodes here, never markup: a class may be called anything.
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
const collator = new Intl.Collator("en", { numeric: true });

// ---------------------------------------------------------------- light and dark
{
  const button = document.getElementById("theme");
  const dark = () => getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const show = () => { button.textContent = dark() ? "Light" : "Dark"; };
  // A page opened from disk may have no storage; the choice then lasts as long as the page.
  const stored = (act) => { try { return act(); } catch { return null; } };
  const theme = stored(() => localStorage.getItem("react-clip-theme"));
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    stored(() => localStorage.setItem("react-clip-theme", document.documentElement.dataset.theme));
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  button.hidden = false;
  show();
}

// ---------------------------------------------------------------- tables of the result
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = make("button", { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      // Numbers are asked for from the top, names from A.
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const other = first === "descending" ? "ascending" : "descending";
      const wanted = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", wanted);
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [left, right] = [value(a), value(b)];
        if ((left === "") !== (right === "")) return left === "" ? 1 : -1;
        const numbers = isNumber(left) && isNumber(right);
        const order = numbers ? left - right : collator.compare(left, right);
        return wanted === "ascending" ? order : -order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}
function isNumber(text) { return text !== "" && Number.isFinite(Number(text)); }

// ---------------------------------------------------------------- figures
{
  const dialog = document.getElementById("enlarged");
  for (const button of document.querySelectorAll("button.drawing")) {
    button.addEventListener("click", () => {
      const caption = button.parentElement.querySelector("figcaption").cloneNode(true);
      dialog.querySelector(".body").replaceChildren(button.firstElementChild.cloneNode(true), caption);
      dialog.showModal();
    });
  }
  dialog.addEventListener("close", () => dialog.querySelector(".body").replaceChildren());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}

// ---------------------------------------------------------------- image by image
if (document.getElementById("data")) browse(JSON.parse(document.getElementById("data").textContent));

function browse(data) {
  const holder = document.getElementById("browser");
  const form = holder.querySelector("form");
  const view = holder.querySelector(".window");
  const table = holder.querySelector("table");
  const { columns, photos, names, outcomes } = data;
  const count = columns.index.length;
  const measured = {};
  for (const [name, scale] of Object.entries(data.scales)) {
    measured[name] = Float64Array.from(columns[name], (value) => value === null ? NaN : value / scale);
  }
  const hasPhotos = Uint8Array.from({ length: count }, (_, row) => `${columns.set[row]}:${columns.index[row]}` in photos);
  const attackTitles = data.attacks.map((attack) => attack.title);
  const labels = data.defenses.map((defense) => defense.label);
  const named = (name, texts) => {
    // Where a text stands among all texts: rows are then sorted by numbers alone.
    const order = texts.map((_, place) => place).sort((a, b) => collator.compare(texts[a], texts[b]));
    const rank = new Int32Array(texts.length);
    order.forEach((place, position) => { rank[place] = position; });
    return { key: (row) => rank[columns[name][row]], text: (row) => texts[columns[name][row]] };
  };
  const whole = (name) => ({ key: (row) => columns[name][row], text: (row) => String(columns[name][row]), number: true });
  const decimals = (name, digits) => ({
    key: (row) => measured[name][row],
    text: (row) => Number.isNaN(measured[name][row]) ? "\u2013" : measured[name][row].toFixed(digits),
    number: true,
  });
  const right = (row) => columns.outcome[row] === 0 || columns.outcome[row] === 3;
  const truth = (name) => (row) => columns[name][row] === columns.label[row] ? "yes" : "no";
  const COLUMNS = [
    { id: "photo", title: "\u25a3", about: "has pictures", width: "tiny", key: (row) => hasPhotos[row],
      text: (row) => hasPhotos[row] ? "\u25a3" : "" },
    { id: "set", title: "data set", width: "middle", ...named("set", data.sets) },
    { id: "index", title: "image", width: "narrow", ...whole("index") },
    { id: "label", title: "true class", width: "wide", ...named("label", names) },
    { id: "attack", title: "attack", width: "middle", text: (row) => attackTitles[columns.attack[row]].replace(/ [^ ]*\/255$/, ""),
      key: named("attack", attackTitles.map((title) => title.replace(/ [^ ]*\/255$/, ""))).key },
    { id: "eps", title: "eps", width: "narrow", number: true, key: (row) => data.attacks[columns.attack[row]].eps,
      text: (row) => { const { eps } = data.attacks[columns.attack[row]]; return eps ? `${+(eps * 255).toPrecision(4)}/255` : "0"; } },
    { id: "defence", title: "defence", width: "wide", ...named("defense", labels) },
    { id: "draw", title: "draw", width: "narrow", ...whole("draw") },
    { id: "clean", title: "clean answer", width: "wide", ...named("clean", names), tone: truth("clean") },
    { id: "plain", title: "attacked answer", width: "wide", ...named("plain", names), tone: truth("plain") },
    { id: "answer", title: "defended answer", width: "wide", ...named("answer", names), tone: truth("answer") },
    { id: "right", title: "right?", width: "narrow", key: right, text: (row) => right(row) ? "\u2713" : "\u2717",
      tone: (row) => right(row) ? "yes" : "no" },
    { id: "outcome", title: "outcome", width: "wide", ...named("outcome", outcomes) },
    { id: "r", title: "r", width: "narrow", ...decimals("r", 3) },
    { id: "J", title: "J", width: "narrow", ...decimals("J", 3) },
    { id: "score", title: "score", width: "narrow", ...decimals("score", 3) },
    { id: "sigma", title: "\u03c3", width: "narrow", ...decimals("sigma", 4) },
    { id: "gate", title: "gate", width: "narrow", key: (row) => columns.gate[row], text: (row) => columns.gate[row] ? "open" : "closed" },
    { id: "passes", title: "passes", width: "narrow", ...whole("passes") },
  ];

  // ------------------------------------------------ filters and order, kept in the address
  const fill = (name, texts) => form.elements[name].append(...texts.map((text, place) => make("option", { value: place, textContent: text })));
  fill("set", data.sets);
  fill("attack", attackTitles);
  fill("defence", labels);
  fill("outcome", outcomes);
  const FILTERS = { set: "set", attack: "attack", defence: "defense", outcome: "outcome" };
  const optionText = { set: data.sets, attack: attackTitles, defence: labels, outcome: outcomes };
  let sort = { id: "", down: false };
  let shown = [];
  let active = 0;

  function fromAddress() {
    const state = new URLSearchParams(location.hash.slice(1));
    if (![...state.values()].some(Boolean)) return false;
    for (const name of Object.keys(FILTERS)) {
      const place = optionText[name].indexOf(state.get(name));
      form.elements[name].value = place < 0 ? "" : place;
    }
    form.elements.text.value = state.get("text") ?? "";
    form.elements.photos.checked = state.has("photos");
    sort = { id: state.get("sort") ?? "", down: state.has("down") };
    return true;
  }

  function toAddress() {
    const state = new URLSearchParams();
    for (const name of Object.keys(FILTERS)) {
      if (form.elements[name].value) state.set(name, optionText[name][form.elements[name].value]);
    }
    if (form.elements.text.value) state.set("text", form.elements.text.value);
    if (form.elements.photos.checked) state.set("photos", "1");
    if (sort.id) state.set("sort", sort.id);
    if (sort.down) state.set("down", "1");
    const text = state.toString();
    if (text || location.hash.includes("=")) history.replaceState(null, "", text ? `#${text}` : "#rows");
  }

  function update() {
    const wanted = Object.entries(FILTERS).filter(([name]) => form.elements[name].value !== "")
      .map(([name, column]) => [columns[column], Number(form.elements[name].value)]);
    const text = form.elements.text.value.trim().toLowerCase();
    const matches = names.map((name) => name.toLowerCase().includes(text));
    const onlyPhotos = form.elements.photos.checked;
    const found = [];
    for (let row = 0; row < count; row += 1) {
      if (onlyPhotos && !hasPhotos[row]) continue;
      if (text && !(matches[columns.label[row]] || matches[columns.clean[row]] || matches[columns.plain[row]] || matches[columns.answer[row]])) continue;
      if (wanted.every(([values, value]) => values[row] === value)) found.push(row);
    }
    const column = COLUMNS.find((each) => each.id === sort.id);
    if (column) {
      const keys = Float64Array.from({ length: count }, (_, row) => Number(column.key(row)));
      const sign = sort.down ? -1 : 1;
      // What was not measured comes last in both directions; equal rows keep their order.
      found.sort((a, b) => {
        const [left, right] = [keys[a], keys[b]];
        if (Number.isNaN(left) || Number.isNaN(right)) return Number.isNaN(left) - Number.isNaN(right) || a - b;
        return sign * (left - right) || a - b;
      });
    }
    shown = found;
    active = 0;
    for (const head of table.tHead.rows[0].cells) {
      if (head.dataset.id === sort.id) head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    const saved = found.filter(right).length;
    holder.querySelector(".count").textContent = found.length
      ? `${found.length.toLocaleString("en")} rows, ${saved.toLocaleString("en")} of them right (${(100 * saved / found.length).toFixed(1)} %)`
      : "No row matches; clear a filter.";
    table.setAttribute("aria-rowcount", found.length + 1);
    view.scrollTop = 0;
    render(true);
    toAddress();
  }

  // ------------------------------------------------ only the rows in sight are elements
  const body = table.tBodies[0];
  const height = 2 * parseFloat(getComputedStyle(document.documentElement).fontSize);
  let first = -1;
  let last = -1;
  function render(anew = false) {
    const from = Math.max(0, Math.floor(view.scrollTop / height) - 12);
    const to = Math.min(shown.length, Math.ceil((view.scrollTop + view.clientHeight) / height) + 12);
    if (!anew && from === first && to === last) return;
    const focused = body.contains(document.activeElement);
    [first, last] = [from, to];
    const rows = [];
    for (let place = from; place < to; place += 1) rows.push(element(place));
    body.replaceChildren(spacer(from * height), ...rows, spacer((shown.length - to) * height));
    if (focused) focus(false);
  }
  function spacer(pixels) {
    const cell = make("td", { colSpan: COLUMNS.length });
    const row = make("tr", { className: "spacer" }, cell);
    row.setAttribute("aria-hidden", "true");
    cell.style.height = `${pixels}px`;
    return row;
  }
  function element(place) {
    const row = make("tr", { tabIndex: place === active ? 0 : -1 });
    row.dataset.place = place;
    row.setAttribute("aria-rowindex", place + 2);
    for (const column of COLUMNS) {
      const text = column.text(shown[place]);
      const cell = make("td", { className: `${column.number ? "" : "word"} ${column.tone?.(shown[place]) ?? ""}`, textContent: text, title: text });
      row.append(cell);
    }
    return row;
  }
  function focus(scroll = true) {
    if (scroll) {
      const top = active * height;
      const room = view.clientHeight - height * 2;
      if (top < view.scrollTop) view.scrollTop = top;
      else if (top > view.scrollTop + room) view.scrollTop = top - room;
      render(true);
    }
    body.querySelector(`[data-place="${active}"]`)?.focus({ preventScroll: true });
  }
  view.addEventListener("scroll", () => render(), { passive: true });
  new ResizeObserver(() => render()).observe(view);

  for (const column of COLUMNS) {
    const button = make("button", { type: "button", textContent: column.title, title: column.about ?? `sort by ${column.title}` });
    if (column.about) button.setAttribute("aria-label", column.about);
    const head = make("th", { scope: "col", className: `${column.width} ${column.number ? "number" : "word"}` }, button);
    head.dataset.id = column.id;
    button.addEventListener("click", () => {
      sort = sort.id === column.id ? { id: column.id, down: !sort.down } : { id: column.id, down: false };
      update();
    });
    table.tHead.rows[0].append(head);
  }
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => { sort = { id: "", down: false }; update(); }));
  addEventListener("hashchange", () => { if (fromAddress()) update(); });

  // ------------------------------------------------ one image: pictures, answers, scales
  const dialog = document.getElementById("image");
  const draws = columns.draw.some(Boolean);
  // From 0 to where all but the outliers lie; what is beyond is drawn at the end.
  const reach = {};
  for (const [name, values] of Object.entries(measured)) {
    const sorted = values.filter((value) => !Number.isNaN(value)).sort();
    const taus = name === "score" ? data.defenses.map((defense) => 1.25 * (defense.tau ?? 0)) : [];
    const at = (share) => sorted.length ? sorted[Math.round(share * (sorted.length - 1))] : 0;
    reach[name] = { low: Math.min(0, at(0.01)), high: Math.max(1e-9, at(0.98), ...taus) };
  }

  function scale(name, row) {
    const value = measured[name][row];
    if (Number.isNaN(value)) return "\u2013";
    const { low, high } = reach[name];
    const tau = name === "score" ? data.defenses[columns.defense[row]].tau : null;
    const at = (number) => 4 + 104 * Math.min(1, Math.max(0, (number - low) / (high - low)));
    const words = `${value.toFixed(3)} on a scale from ${low.toFixed(3)} to ${high.toFixed(3)}${tau ? `, threshold ${tau}` : ""}`;
    const parts = [drawn("line", { x1: 4, x2: 108, y1: 17, y2: 17, stroke: "currentColor" })];
    if (tau) {
      parts.push(drawn("line", { x1: at(tau), x2: at(tau), y1: 10, y2: 24, class: "tau", "stroke-width": 2 }));
      parts.push(drawn("text", { x: Math.min(at(tau), 80), y: 8, class: "tau-label" }, `\u03c4 ${tau}`));
    }
    parts.push(drawn("circle", { cx: at(value), cy: 17, r: 4, class: "dot" }));
    return make("span", {}, value.toFixed(name === "sigma" ? 4 : 3),
      drawn("svg", { viewBox: "0 0 112 24", class: "scale", role: "img", "aria-label": words }, ...parts));
  }

  function picture(source, caption) {
    return make("figure", {}, make("img", { src: source, alt: caption }), make("figcaption", { textContent: caption }));
  }

  function pictures(row) {
    const kept = photos[`${columns.set[row]}:${columns.index[row]}`];
    if (!kept) {
      const words = Object.keys(photos).length
        ? "No pictures of this image are in the page; rows marked \u25a3 have them." : "Photos were not kept in this folder.";
      return make("p", { textContent: words });
    }
    const strip = make("div", { className: "pictures" }, picture(kept.clean, "the photo"));
    const attack = columns.attack[row];
    const attacked = kept.attacked[attack] || kept.attacked[`${attack}:${columns.defense[row]}`];
    if (attacked) {
      strip.append(picture(attacked[0], `attacked, ${attackTitles[columns.attack[row]]}`));
      strip.append(picture(attacked[1], `the perturbation, magnified ${attacked[2]} times; mid-grey is 0`));
    } else if (data.attacks[columns.attack[row]].eps) {
      strip.append(make("p", { textContent: columns.attacked[row] ? "The attacked photo was not kept." :
        "This photo was not attacked: plain CLIP gets it wrong already." }));
    }
    return strip;
  }

  function open() {
    const row = shown[active];
    const title = `${data.sets[columns.set[row]]} ${columns.index[row]}, ${attackTitles[columns.attack[row]]}`;
    dialog.querySelector("h3").textContent = `${title}: ${names[columns.label[row]]}`;
    const fact = (name, value, good) => make("div", {}, make("dt", { textContent: name }),
      make("dd", { className: good === undefined ? "" : good ? "yes" : "no", textContent: `${good === undefined ? "" : good ? "\u2713 " : "\u2717 "}${value}` }));
    const same = (column) => columns[column][row] === columns.label[row];
    const facts = make("dl", { className: "answers" }, fact("true class", names[columns.label[row]]),
      fact("plain CLIP, clean photo", names[columns.clean[row]], same("clean")),
      fact("plain CLIP, this photo", names[columns.plain[row]], same("plain")));
    const titles = ["defence", ...(draws ? ["draw"] : []), "defended answer", "outcome", "r", "J", "score", "\u03c3", "gate", "passes"];
    const head = make("tr", {}, ...titles.map((text, place) => make("th", { scope: "col", className: place < titles.indexOf("r") ? "word" : "", textContent: text })));
    const lines = [];
    for (let other = 0; other < count; other += 1) {
      if (columns.set[other] !== columns.set[row] || columns.index[other] !== columns.index[row] || columns.attack[other] !== columns.attack[row]) continue;
      const line = make("tr", { className: other === row ? "current" : "" },
        make("th", { scope: "row", textContent: labels[columns.defense[other]] }),
        ...(draws ? [make("td", { className: "word", textContent: columns.draw[other] })] : []),
        make("td", { className: `word ${right(other) ? "yes" : "no"}`, textContent: `${right(other) ? "\u2713" : "\u2717"} ${names[columns.answer[other]]}` }),
        make("td", { className: "word", textContent: outcomes[columns.outcome[other]] }),
        ...["r", "J", "score", "sigma"].map((name) => make("td", {}, scale(name, other))),
        make("td", { textContent: columns.gate[other] ? "open" : "closed" }), make("td", { textContent: columns.passes[other] }));
      lines.push(line);
    }
    const sheet = make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines)));
    dialog.querySelector(".body").replaceChildren(pictures(row), facts, sheet);
    if (!dialog.open) dialog.showModal();
  }

  function step(by) {
    active = Math.min(shown.length - 1, Math.max(0, active + by));
    open();
  }
  for (const button of dialog.querySelectorAll("[data-step]")) button.addEventListener("click", () => step(Number(button.dataset.step)));
  dialog.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by) { event.preventDefault(); step(by); }
  });
  dialog.addEventListener("close", () => focus());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-place]");
    if (row) { active = Number(row.dataset.place); open(); }
  });
  body.addEventListener("keydown", (event) => {
    const page = Math.floor(view.clientHeight / height) - 2;
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter") { event.preventDefault(); open(); }
    if (event.key in moves) {
      event.preventDefault();
      active = Math.min(shown.length - 1, Math.max(0, active + moves[event.key]));
      focus();
    }
  });

  holder.hidden = false;
  fromAddress();
  update();
}
