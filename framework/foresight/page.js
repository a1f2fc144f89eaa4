// Draws the page's charts in its theme, and has sliders pick among the layouts that the search has computed. All numbers come
// from Python: nothing is computed here but which of them is shown.
const { charts, rows, layouts } = JSON.parse(document.getElementById("data").textContent);
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
    text: { color: ink },
  };
};

async function draw(id) {
  const spec = { ...charts[id], width: "container", autosize: { type: "fit-x", contains: "padding" } };
  spec.datasets = Object.fromEntries(Object.keys(rows).map((name) => [name, rows[name]]));
  const place = document.getElementById(id);
  const legendColumns = Math.max(2, Math.floor(place.clientWidth / 120));
  const theme = config();
  theme.legend.columns = legendColumns;
  const renderer = id === "scatter" ? "canvas" : "svg";
  const { view } = await window.vegaEmbed(place, spec, { actions: false, renderer, config: theme, tooltip: { theme: root.dataset.theme } });
  views[id] = view;
  return view;
}

async function drawAll() {
  for (const id of Object.keys(charts)) await draw(id);
  if (layouts) {
    views.scatter.addEventListener("click", (_, item) => item?.datum?.number !== undefined && pick(item.datum.number));
    await show();
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

button.addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));

// --- layouts

const chosen = {};
let picked = 0;
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
    slider.setAttribute("aria-valuetext", "any");
    slider.addEventListener("input", () => {
      const at = Number(slider.value);
      output.textContent = at ? values[at - 1] : "any";
      slider.setAttribute("aria-valuetext", output.textContent);
      if (at) chosen[key] = values[at - 1];
      else delete chosen[key];
      picked = undefined;
      show();
    });
    label.append(output, slider);
    place.append(label);
  }
}

function isChosen(layout) {
  return Object.entries(chosen).every(([key, value]) => layout[key] === value);
}

// The best of those that match is picked, until the reader clicks on another.
async function show() {
  matching = layouts.rows.filter(isChosen);
  if (picked === undefined) picked = matching.length ? matching[0].number : undefined;
  const words = Object.entries(chosen).map(([key, value]) => `${layouts.choices.find((each) => each.key === key).name} ${value}`);
  const found = document.getElementById("matching");
  found.textContent = matching.length
    ? `${matching.length.toLocaleString("en")} of ${layouts.rows.length.toLocaleString("en")} layouts${words.length ? " with " + words.join(", ") : ""}`
    : `No layout was computed with ${words.join(", ")}: it is not legal, or was rejected for the reasons below.`;
  found.className = matching.length ? "" : "over";
  fillTable();
  await fillCharts();
}

function pick(number) {
  picked = number;
  return show();
}

async function fillCharts() {
  const layout = layouts.rows.find((each) => each.number === picked);
  const set = (id, name, values) => views[id].data(name, values).runAsync();
  const isMatching = new Set(matching.map((each) => each.number));
  const points = layouts.rows.map((each) => ({ ...each, on: isMatching.has(each.number) }));
  const place = document.getElementById("picked");
  place.replaceChildren();
  if (layout) {
    place.append(element("strong", `${layout.number}. ${layout.words}`, { "data-picked": layout.number }), document.createElement("br"));
    for (const { key, name } of layouts.columns.filter((each) => each.isFact)) {
      const isOver = key === "verdict" && layout.over > 0;
      place.append(`${name} `, element("b", layout[key], { "data-value": key, ...(isOver ? { class: "over" } : {}) }), "  ");
    }
  }
  const kinds = layout ? layouts.kinds.map((kind, order) => ({ kind, order, gb: layout.memory[order], place: "fullest rank" })) : [];
  const total = layout ? [{ place: "fullest rank", limit: layout.limit, total: layout.gb, over: layout.over, words: layout.over_words }] : [];
  const parts = layout ? layouts.parts.map((part, order) => ({ part, order, seconds: layout.parts[order] })).filter((each) => each.seconds > 0) : [];
  await set("scatter", "layouts", points);
  await set("scatter", "picked", layout ? [layout] : []);
  await views.picked_memory.data("memory", kinds).data("totals", total).runAsync();
  await set("picked_parts", "parts", parts);
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

if (layouts) makeSliders();
await setTheme(dark.matches ? "dark" : "light");
