"use strict";
// Builds one card a route from openapi.json. Texts only ever become text nodes.
const by = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
by("key").addEventListener("submit", (event) => event.preventDefault());

async function start() {
  const response = await fetch("openapi.json").catch(() => null);
  if (!response?.ok) { by("status").textContent = "The server's openapi.json cannot be read. Load the page again."; return; }
  const { paths } = await response.json();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, route] of Object.entries(methods)) by("routes").append(card(path, method.toUpperCase(), route));
  }
}

function card(path, method, route) {
  const name = `${method} ${path}`;
  const content = route.requestBody?.content["application/json"];
  const parts = [make("h2", { textContent: name }), make("p", { textContent: route.description ?? route.summary })];
  let body = null;
  if (content) {
    body = make("textarea", { value: JSON.stringify(content.example, null, 2), rows: 8, spellcheck: false, ariaLabel: `Body of ${name}` });
    parts.push(make("details", {}, make("summary", { textContent: "Fields" }), fields(content.schema)), body);
  }
  const run = make("button", { type: "button", textContent: "Run", ariaLabel: `Run ${name}` });
  const answer = make("pre", { hidden: true, tabIndex: 0, ariaLabel: `Answer of ${name}` });
  run.addEventListener("click", async () => {
    run.disabled = true;
    answer.hidden = false;
    answer.textContent = "\u2026";
    answer.textContent = await ask(path, method, body?.value);
    run.disabled = false;
  });
  const statuses = Object.entries(route.responses).map(([status, { description }]) => `${status}: ${description}`);
  parts.push(make("pre", { className: "soft", textContent: command(path, method, route) }), make("div", { className: "row" }, run), answer,
    make("details", {}, make("summary", { textContent: "Statuses" }), make("ul", {}, ...statuses.map((textContent) => make("li", { textContent })))));
  return make("section", { className: "card", ariaLabel: name }, ...parts);
}

function fields({ properties, required = [] }) {
  const kind = ({ type, items, anyOf, enum: values, default: value }) => {
    const one = values?.map((each) => JSON.stringify(each)).join(" or ") ?? (type === "array" ? `list of ${items.type ?? "values"}` : type)
      ?? (anyOf ?? []).map(kind).filter((each) => each !== "null").join(" or ");
    return value === undefined || value === null ? one : `${one}, ${JSON.stringify(value)} if left out`;
  };
  return make("dl", {}, ...Object.entries(properties).flatMap(([name, field]) => [
    make("dt", {}, make("code", { textContent: name }), ` ${kind(field)}${required.includes(name) ? ", required" : ""}`),
    make("dd", { textContent: field.description ?? field.items?.description ?? "" }),
  ]));
}

/** The same for a shell: a photo's file instead of its base64. */
function command(path, method, { requestBody, security }) {
  const url = new URL(path.slice(1), document.baseURI).href;
  const file = requestBody?.content["application/json"].example.input ? "input" : "images";
  return `curl${requestBody ? ` -F ${file}=@photo.jpg` : ""}${security ? ' -H "Authorization: Bearer $API_KEY"' : ""} ${url}`;
}

async function ask(path, method, body) {
  const key = by("key-field").value;
  const headers = { ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  try {
    const response = await fetch(path.slice(1), { method, headers, body });
    const text = await response.text();
    let shown = text;
    try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON, such as metrics */ }
    return `${response.status} ${response.statusText}\n${shown}`;
  } catch {
    return "The server cannot be reached. Is it running, and are you online?";
  }
}

start();
