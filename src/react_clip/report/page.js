"use strict";
// All texts become text nodes, never markup: class names are not trusted.
const element = (tag, properties = {}, ...children) => {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
};
const svgElement = (tag, attributes, ...children) => {
  const created = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, value);
  created.append(...children);
  return created;
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
  // Groups of columns may stand above the titles.
  const heads = [...[...table.tHead.rows].at(-1).cells].filter((cell) => cell.tagName === "TH");
  heads.forEach((head, column) => {
    const button = element("button", { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      // The first click sorts numbers from the largest, texts from A.
      const first = head.classList.contains("number") ? "descending" : "ascending";
      const other = first === "descending" ? "ascending" : "descending";
      const chosen = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", chosen);
      // A table has one body with a row per entry, or a body per entry whose first row counts.
      const entries = table.tBodies.length > 1 ? [...table.tBodies] : [...table.tBodies[0].rows];
      const value = (entry) => {
        const cell = (entry.rows?.[0] ?? entry).cells[column];
        return cell.dataset.value ?? cell.textContent;
      };
      const sorted = entries.sort((a, b) => {
        const [left, right] = [value(a), value(b)];
        if ((left === "") !== (right === "")) return left === "" ? 1 : -1;
        const numbers = isNumber(left) && isNumber(right);
        const order = numbers ? left - right : collator.compare(left, right);
        return chosen === "ascending" ? order : -order;
      });
      sorted[0].parentElement.append(...sorted);
    });
  });
}
for (const input of document.querySelectorAll("input[data-filters]")) {
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
    for (const body of document.getElementById(input.dataset.filters).tBodies) {
      body.hidden = !body.rows[0].cells[0].dataset.value.toLowerCase().includes(wanted);
    }
  });
  input.hidden = false;
}
function isNumber(text) { return text !== "" && Number.isFinite(Number(text)); }

// ---------------------------------------------------------------- figures
if (document.getElementById("enlarged")) {
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
if (document.getElementById("data")) startBrowser(JSON.parse(document.getElementById("data").textContent));

function startBrowser(data) {
  const browser = document.getElementById("browser");
  const form = browser.querySelector("form");
  const scroller = browser.querySelector(".window");
  const table = browser.querySelector("table");
  const { columns, photos, names, outcomes } = data;
  const count = columns.index.length;
  const numbers = {};  // by column; NaN where nothing was measured
  for (const [name, scale] of Object.entries(data.scales)) {
    numbers[name] = Float64Array.from(columns[name], (value) => value === null ? NaN : value / scale);
  }
  const hasPhotos = Uint8Array.from({ length: count }, (_, row) => `${columns.set[row]}:${columns.index[row]}` in photos);
  const attackTitles = data.attacks.map((attack) => attack.title);
  const labels = data.defenses.map((defense) => defense.label);
  const textColumn = (name, texts) => {
    // Rank of each text in alphabetical order, so that rows are sorted by numbers alone.
    const order = texts.map((_, position) => position).sort((a, b) => collator.compare(texts[a], texts[b]));
    const rank = new Int32Array(texts.length);
    order.forEach((text, position) => { rank[text] = position; });
    return { key: (row) => rank[columns[name][row]], text: (row) => texts[columns[name][row]] };
  };
  const integerColumn = (name) => ({ key: (row) => columns[name][row], text: (row) => String(columns[name][row]), number: true });
  const decimalColumn = (name, digits) => ({
    key: (row) => numbers[name][row],
    text: (row) => Number.isNaN(numbers[name][row]) ? "\u2013" : numbers[name][row].toFixed(digits),
    number: true,
  });
  const right = (row) => columns.outcome[row] === 0 || columns.outcome[row] === 3;
  const rightOrWrong = (name) => (row) => columns[name][row] === columns.label[row] ? "yes" : "no";
  const COLUMNS = [
    { id: "photo", title: "\u25a3", about: "has pictures", width: "tiny", key: (row) => hasPhotos[row],
      text: (row) => hasPhotos[row] ? "\u25a3" : "" },
    { id: "set", title: "data set", width: "middle", ...textColumn("set", data.sets) },
    { id: "index", title: "image", width: "narrow", ...integerColumn("index") },
    { id: "label", title: "true class", width: "wide", ...textColumn("label", names) },
    { id: "attack", title: "attack", width: "middle", text: (row) => attackTitles[columns.attack[row]].replace(/ [^ ]*\/255$/, ""),
      key: textColumn("attack", attackTitles.map((title) => title.replace(/ [^ ]*\/255$/, ""))).key },
    { id: "eps", title: "eps", width: "narrow", number: true, key: (row) => data.attacks[columns.attack[row]].eps,
      text: (row) => { const { eps } = data.attacks[columns.attack[row]]; return eps ? `${+(eps * 255).toPrecision(4)}/255` : "0"; } },
    { id: "defence", title: "defence", width: "wide", ...textColumn("defense", labels) },
    { id: "draw", title: "draw", width: "narrow", ...integerColumn("draw") },
    { id: "clean", title: "clean answer", width: "wide", ...textColumn("clean", names), tone: rightOrWrong("clean") },
    { id: "plain", title: "attacked answer", width: "wide", ...textColumn("plain", names), tone: rightOrWrong("plain") },
    { id: "answer", title: "defended answer", width: "wide", ...textColumn("answer", names), tone: rightOrWrong("answer") },
    { id: "right", title: "right?", width: "narrow", key: right, text: (row) => right(row) ? "\u2713" : "\u2717",
      tone: (row) => right(row) ? "yes" : "no" },
    { id: "outcome", title: "outcome", width: "wide", ...textColumn("outcome", outcomes) },
    { id: "r", title: "r", width: "narrow", ...decimalColumn("r", 3) },
    { id: "J", title: "J", width: "narrow", ...decimalColumn("J", 3) },
    { id: "score", title: "score", width: "narrow", ...decimalColumn("score", 3) },
    { id: "sigma", title: "\u03c3", width: "narrow", ...decimalColumn("sigma", 4) },
    { id: "gate", title: "gate", width: "narrow", key: (row) => columns.gate[row], text: (row) => columns.gate[row] ? "open" : "closed" },
    { id: "passes", title: "passes", width: "narrow", ...integerColumn("passes") },
  ];

  // ------------------------------------------------ filters and sorting, which the address stores
  const fill = (name, texts) => form.elements[name].append(...texts.map((text, position) => element("option", { value: position, textContent: text })));
  fill("set", data.sets);
  fill("attack", attackTitles);
  fill("defence", labels);
  fill("outcome", outcomes);
  const FILTERS = { set: "set", attack: "attack", defence: "defense", outcome: "outcome" };
  const optionText = { set: data.sets, attack: attackTitles, defence: labels, outcome: outcomes };
  let sort = { id: "", down: false };
  let visible = [];  // numbers of the rows that match the filters, in their order
  let active = 0;  // position in `visible` of the row that has the focus or is open

  function fromAddress() {
    const state = new URLSearchParams(location.hash.slice(1));
    if (![...state.values()].some(Boolean)) return false;
    for (const name of Object.keys(FILTERS)) {
      const position = optionText[name].indexOf(state.get(name));
      form.elements[name].value = position < 0 ? "" : position;
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
    const chosen = Object.entries(FILTERS).filter(([name]) => form.elements[name].value !== "")
      .map(([name, column]) => [columns[column], Number(form.elements[name].value)]);
    const text = form.elements.text.value.trim().toLowerCase();
    const matches = names.map((name) => name.toLowerCase().includes(text));
    const onlyPhotos = form.elements.photos.checked;
    const matching = [];
    for (let row = 0; row < count; row += 1) {
      if (onlyPhotos && !hasPhotos[row]) continue;
      if (text && !(matches[columns.label[row]] || matches[columns.clean[row]] || matches[columns.plain[row]] || matches[columns.answer[row]])) continue;
      if (chosen.every(([values, value]) => values[row] === value)) matching.push(row);
    }
    const column = COLUMNS.find((each) => each.id === sort.id);
    if (column) {
      const keys = Float64Array.from({ length: count }, (_, row) => Number(column.key(row)));
      const sign = sort.down ? -1 : 1;
      // Rows without a value come last in both directions; equal rows keep their order.
      matching.sort((a, b) => {
        const [left, right] = [keys[a], keys[b]];
        if (Number.isNaN(left) || Number.isNaN(right)) return Number.isNaN(left) - Number.isNaN(right) || a - b;
        return sign * (left - right) || a - b;
      });
    }
    visible = matching;
    active = 0;
    for (const head of table.tHead.rows[0].cells) {
      if (head.dataset.id === sort.id) head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    const saved = matching.filter(right).length;
    browser.querySelector(".count").textContent = matching.length
      ? `${matching.length.toLocaleString("en")} rows, ${saved.toLocaleString("en")} of them right (${(100 * saved / matching.length).toFixed(1)} %)`
      : "No row matches; clear a filter.";
    table.setAttribute("aria-rowcount", matching.length + 1);
    scroller.scrollTop = 0;
    render(true);
    toAddress();
  }

  // ------------------------------------------------ only visible rows are elements
  const body = table.tBodies[0];
  const height = 2 * parseFloat(getComputedStyle(document.documentElement).fontSize);
  let first = -1;
  let last = -1;
  function render(force = false) {
    const from = Math.max(0, Math.floor(scroller.scrollTop / height) - 12);
    const to = Math.min(visible.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / height) + 12);
    if (!force && from === first && to === last) return;
    const focused = body.contains(document.activeElement);
    [first, last] = [from, to];
    const rows = [];
    for (let position = from; position < to; position += 1) rows.push(rowElement(position));
    body.replaceChildren(spacer(from * height), ...rows, spacer((visible.length - to) * height));
    if (focused) focus(false);
  }
  function spacer(pixels) {
    const cell = element("td", { colSpan: COLUMNS.length });
    const row = element("tr", { className: "spacer" }, cell);
    row.setAttribute("aria-hidden", "true");
    cell.style.height = `${pixels}px`;
    return row;
  }
  function rowElement(position) {
    const row = element("tr", { tabIndex: position === active ? 0 : -1 });
    row.dataset.place = position;
    row.setAttribute("aria-rowindex", position + 2);
    for (const column of COLUMNS) {
      const text = column.text(visible[position]);
      const cell = element("td", { className: `${column.number ? "" : "word"} ${column.tone?.(visible[position]) ?? ""}`, textContent: text, title: text });
      row.append(cell);
    }
    return row;
  }
  function focus(scroll = true) {
    if (scroll) {
      const top = active * height;
      const room = scroller.clientHeight - height * 2;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top > scroller.scrollTop + room) scroller.scrollTop = top - room;
      render(true);
    }
    body.querySelector(`[data-place="${active}"]`)?.focus({ preventScroll: true });
  }
  scroller.addEventListener("scroll", () => render(), { passive: true });
  new ResizeObserver(() => render()).observe(scroller);

  for (const column of COLUMNS) {
    const button = element("button", { type: "button", textContent: column.title, title: column.about ?? `sort by ${column.title}` });
    if (column.about) button.setAttribute("aria-label", column.about);
    const head = element("th", { scope: "col", className: `${column.width} ${column.number ? "number" : "word"}` }, button);
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

  // ------------------------------------------------ dialog of one image: pictures, answers, scales
  const dialog = document.getElementById("image");
  const draws = columns.draw.some(Boolean);
  // Each scale goes from 0 to the 98th percentile; values beyond are drawn at its end.
  const ranges = {};
  for (const [name, values] of Object.entries(numbers)) {
    const sorted = values.filter((value) => !Number.isNaN(value)).sort();
    const taus = name === "score" ? data.defenses.map((defense) => 1.25 * (defense.tau ?? 0)) : [];
    const at = (share) => sorted.length ? sorted[Math.round(share * (sorted.length - 1))] : 0;
    ranges[name] = { low: Math.min(0, at(0.01)), high: Math.max(1e-9, at(0.98), ...taus) };
  }

  function scale(name, row) {
    const value = numbers[name][row];
    if (Number.isNaN(value)) return "\u2013";
    const { low, high } = ranges[name];
    const tau = name === "score" ? data.defenses[columns.defense[row]].tau : null;
    const at = (number) => 4 + 104 * Math.min(1, Math.max(0, (number - low) / (high - low)));
    const words = `${value.toFixed(3)} on a scale from ${low.toFixed(3)} to ${high.toFixed(3)}${tau ? `, threshold ${tau}` : ""}`;
    const parts = [svgElement("line", { x1: 4, x2: 108, y1: 17, y2: 17, stroke: "currentColor" })];
    if (tau) {
      parts.push(svgElement("line", { x1: at(tau), x2: at(tau), y1: 10, y2: 24, class: "tau", "stroke-width": 2 }));
      parts.push(svgElement("text", { x: Math.min(at(tau), 80), y: 8, class: "tau-label" }, `\u03c4 ${tau}`));
    }
    parts.push(svgElement("circle", { cx: at(value), cy: 17, r: 4, class: "dot" }));
    return element("span", {}, value.toFixed(name === "sigma" ? 4 : 3),
      svgElement("svg", { viewBox: "0 0 112 24", class: "scale", role: "img", "aria-label": words }, ...parts));
  }

  function picture(source, caption) {
    return element("figure", {}, element("img", { src: source, alt: caption }), element("figcaption", { textContent: caption }));
  }

  function pictures(row) {
    const images = photos[`${columns.set[row]}:${columns.index[row]}`];
    if (!images) {
      const words = Object.keys(photos).length
        ? "No pictures of this image are in the page; rows marked \u25a3 have them." : "Photos were not kept in this folder.";
      return element("p", { textContent: words });
    }
    const strip = element("div", { className: "pictures" }, picture(images.clean, "the photo"));
    const attack = columns.attack[row];
    const attacked = images.attacked[attack] || images.attacked[`${attack}:${columns.defense[row]}`];
    if (attacked) {
      strip.append(picture(attacked[0], `attacked, ${attackTitles[columns.attack[row]]}`));
      strip.append(picture(attacked[1], `the perturbation, magnified ${attacked[2]} times; mid-grey is 0`));
    } else if (data.attacks[columns.attack[row]].eps) {
      strip.append(element("p", { textContent: columns.attacked[row] ? "The attacked photo was not kept." :
        "This photo was not attacked: plain CLIP gets it wrong already." }));
    }
    return strip;
  }

  function open() {
    const row = visible[active];
    const title = `${data.sets[columns.set[row]]} ${columns.index[row]}, ${attackTitles[columns.attack[row]]}`;
    dialog.querySelector("h3").textContent = `${title}: ${names[columns.label[row]]}`;
    const fact = (name, value, good) => element("div", {}, element("dt", { textContent: name }),
      element("dd", { className: good === undefined ? "" : good ? "yes" : "no", textContent: `${good === undefined ? "" : good ? "\u2713 " : "\u2717 "}${value}` }));
    const same = (column) => columns[column][row] === columns.label[row];
    const facts = element("dl", { className: "answers" }, fact("true class", names[columns.label[row]]),
      fact("plain CLIP, clean photo", names[columns.clean[row]], same("clean")),
      fact("plain CLIP, this photo", names[columns.plain[row]], same("plain")));
    const titles = ["defence", ...(draws ? ["draw"] : []), "defended answer", "outcome", "r", "J", "score", "\u03c3", "gate", "passes"];
    const head = element("tr", {}, ...titles.map((text, position) => element("th", { scope: "col", className: position < titles.indexOf("r") ? "word" : "", textContent: text })));
    const lines = [];
    for (let other = 0; other < count; other += 1) {
      if (columns.set[other] !== columns.set[row] || columns.index[other] !== columns.index[row] || columns.attack[other] !== columns.attack[row]) continue;
      const line = element("tr", { className: other === row ? "current" : "" },
        element("th", { scope: "row", textContent: labels[columns.defense[other]] }),
        ...(draws ? [element("td", { className: "word", textContent: columns.draw[other] })] : []),
        element("td", { className: `word ${right(other) ? "yes" : "no"}`, textContent: `${right(other) ? "\u2713" : "\u2717"} ${names[columns.answer[other]]}` }),
        element("td", { className: "word", textContent: outcomes[columns.outcome[other]] }),
        ...["r", "J", "score", "sigma"].map((name) => element("td", {}, scale(name, other))),
        element("td", { textContent: columns.gate[other] ? "open" : "closed" }), element("td", { textContent: columns.passes[other] }));
      lines.push(line);
    }
    const sheet = element("div", { className: "scroll", tabIndex: 0 }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines)));
    dialog.querySelector(".body").replaceChildren(pictures(row), facts, sheet);
    if (!dialog.open) dialog.showModal();
  }

  function step(by) {
    active = Math.min(visible.length - 1, Math.max(0, active + by));
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
    const page = Math.floor(scroller.clientHeight / height) - 2;
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter") { event.preventDefault(); open(); }
    if (event.key in moves) {
      event.preventDefault();
      active = Math.min(visible.length - 1, Math.max(0, active + moves[event.key]));
      focus();
    }
  });

  browser.hidden = false;
  fromAddress();
  update();
}
