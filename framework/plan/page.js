// Draws the page's charts in its theme, and has sliders pick among the layouts that the search has computed. All numbers come
// from Python: nothing is computed here but which of them is shown.
const { charts, rows, layouts, refresh_s: refreshS } = JSON.parse(document.getElementById("data").textContent);
if (layouts) layouts.rows = layouts.values.map((row) => Object.fromEntries(row.map((value, at) => [layouts.fields[at], value])));
const root = document.documentElement;
const views = {};

const config = () => {
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const [ink, faint, line] = ["--ink", "--faint", "--line"].map(color);
  return {
    background: "transparent",
    font: getComputedStyle(document.body).fontFamily,
    view: { stroke: "transparent" },
    axis: {
      labelColor: ink, titleColor: faint, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 12,
      titleFontWeight: "normal",
    },
    legend: { labelColor: ink, titleColor: faint, labelFontSize: 12, symbolType: "square" },
    text: { fill: ink },
    style: { over: { color: color("--red"), fill: color("--red"), fontWeight: "bold" } },
  };
};

async function draw(id) {
  const spec = { ...charts[id], width: "container", autosize: { type: "fit-x", contains: "padding" } };
  spec.datasets = Object.fromEntries(Object.keys(rows).map((name) => [name, rows[name]]));
  const place = document.getElementById(id);
  const legendColumns = Math.max(2, Math.floor(place.clientWidth / 165));
  const theme = config();
  theme.legend.columns = legendColumns;
  const renderer = id === "scatter" ? "canvas" : "svg";
  const { view } = await window.vegaEmbed(place, spec, { actions: false, renderer, config: theme, tooltip: { theme: root.dataset.theme } });
  views[id] = view;
  return view;
}

async function drawAll() {
  if (layouts) choose();
  for (const id of Object.keys(charts)) await draw(id);
  if (layouts) {
    views.scatter.addEventListener("click", (_, item) => item?.datum?.number !== undefined && pick(item.datum.number));
    write();
  }
  root.dataset.ready = "yes";
}

// --- light and dark: the system's choice until the reader makes another

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");

async function setTheme(theme) {
  delete root.dataset.ready;
  root.dataset.theme = theme;
  button.textContent = theme === "dark" ? "light" : "dark";
  await drawAll();
}

button.addEventListener("click", () => {
  sessionStorage.setItem("theme", root.dataset.theme === "dark" ? "light" : "dark");
  setTheme(sessionStorage.getItem("theme"));
});
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));

// --- layouts

const chosen = {};
let picked;
let matching = [];

function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function makeSliders() {
  const place = document.getElementById("sliders");
  for (const { key, name, values } of layouts.choices) {
    const label = element("label", name);
    const output = element("output", "any");
    const slider = element("input", "", { type: "range", min: 0, max: values.length, step: 1, value: 0, "data-key": key });
    const choose = () => {
      const at = Number(slider.value);
      output.textContent = at ? values[at - 1] : "any";
      slider.setAttribute("aria-valuetext", output.textContent);
      if (at) chosen[key] = values[at - 1];
      else delete chosen[key];
    };
    slider.addEventListener("input", () => {
      choose();
      picked = undefined;
      show();
    });
    if (key === "gpus") slider.value = values.indexOf(layouts.wanted) + 1;
    choose();
    label.append(output, slider);
    place.append(label);
  }
}

function isChosen(layout) {
  return Object.entries(chosen).every(([key, value]) => layout[key] === value);
}

// The best of those that match is picked, until the reader clicks on another. Charts keep the last one where none matches.
function choose() {
  matching = layouts.rows.filter(isChosen);
  if (picked === undefined && matching.length) picked = matching[0].number;
  const isMatching = new Set(matching.map((each) => each.number));
  const points = layouts.rows.map((each) => ({ ...each, on: isMatching.has(each.number), picked: each.number === picked }));
  rows.layouts = points.sort((one, other) => one.on - other.on || one.picked - other.picked);  // the last is drawn on top
  const layout = layouts.rows.find((each) => each.number === picked);
  if (!layout) return;
  const place = `layout ${layout.number}`;
  rows.memory = layouts.kinds.map((kind, order) => ({ kind, order, gb: layout.memory[order], place }));
  rows.totals = [{ place, limit: layout.limit, total: layout.gb, over: layout.over, words: layout.over_words }];
  rows.parts = layouts.parts.map((part, order) => ({ part, order, seconds: layout.parts[order] })).filter((each) => each.seconds > 0);
}

async function show() {
  choose();
  write();
  await views.scatter.data("layouts", rows.layouts).runAsync();
  await views.picked_memory.data("memory", rows.memory).data("totals", rows.totals).runAsync();
  await views.picked_parts.data("parts", rows.parts).runAsync();
}

function pick(number) {
  picked = number;
  return show();
}

function write() {
  const words = Object.entries(chosen).map(([key, value]) => `${layouts.choices.find((each) => each.key === key).name} ${value}`);
  const found = document.getElementById("matching");
  const [some, all] = [matching, layouts.rows].map((each) => each.length.toLocaleString("en"));
  found.textContent = matching.length
    ? `${some} of ${all} layouts${words.length ? " with " + words.join(", ") : ""}`
    : `No layout with ${words.join(", ")} was computed: it is not legal, does not fit or is slower than the others; reasons are below.`;
  found.className = matching.length ? "" : "over";
  document.getElementById("details").hidden = !matching.length;
  fillTable();
  fillPicked(layouts.rows.find((each) => each.number === picked));
}

function fillPicked(layout) {
  const place = document.getElementById("picked");
  place.replaceChildren();
  if (!layout) return;
  place.append(element("strong", `${layout.number}. ${layout.layout}`, { "data-picked": layout.number }), element("br"));
  for (const { key, name } of layouts.columns.filter((each) => each.isFact)) {
    const isOver = key === "verdict" && layout.over > 0;
    const line = element("span", name ? `${name} ` : "");
    line.append(element("b", layout[key], { "data-value": key, ...(isOver ? { class: "over" } : {}) }));
    place.append(line, " ");
  }
}

const SHOWN = 100;

function fillTable() {
  const [head, body] = ["thead", "tbody"].map((tag) => document.querySelector(`#layouts ${tag}`));
  const titles = element("tr");
  for (const { name, isText } of layouts.columns) titles.append(element("th", name, isText ? { class: "words" } : {}));
  head.replaceChildren(titles);
  body.replaceChildren();
  for (const layout of matching.slice(0, SHOWN)) {
    const line = element("tr", "", { "data-number": layout.number, tabindex: 0, "aria-selected": layout.number === picked });
    for (const { key, isText } of layouts.columns) {
      const kinds = [isText ? "words" : "", key === "verdict" && layout.over > 0 ? "over" : ""].join(" ").trim();
      line.append(element("td", layout[key], kinds ? { class: kinds } : {}));
    }
    line.addEventListener("click", () => pick(layout.number));
    line.addEventListener("keydown", (event) => event.key === "Enter" && pick(layout.number));
    body.append(line);
  }
  if (matching.length > SHOWN) {
    const line = element("tr");
    line.append(element("td", `and ${(matching.length - SHOWN).toLocaleString("en")} more: move the sliders`, { class: "words", colspan: layouts.columns.length }));
    body.append(line);
  }
}

// --- a page that is written again and again is read again where the reader is, unless nobody looks

function readAgain() {
  if (document.hidden) return document.addEventListener("visibilitychange", readAgain, { once: true });
  sessionStorage.setItem("scroll", scrollY);
  return location.reload();
}

if (layouts) makeSliders();
await setTheme(sessionStorage.getItem("theme") ?? (dark.matches ? "dark" : "light"));
scrollTo(0, sessionStorage.getItem("scroll") ?? scrollY);
sessionStorage.removeItem("scroll");
if (refreshS) setTimeout(readAgain, 1000 * refreshS);
