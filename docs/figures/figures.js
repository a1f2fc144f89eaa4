// Puts a live figure in the place of each picture of docs/figures. Where scripts do not run, the picture stays.
//
// A figure NAME is figures/NAME.js over data.js, the numbers that scripts/docs_figures.py takes from the code. It calls
// figures.add(NAME, make): make(ui, data) adds controls to `ui` and returns what draws; that is called again after each change.
"use strict";
(() => {
  const folder = document.currentScript.src.replace(/[^/]*$/, "");
  // Colours of ranks, or of lines, which the colour-blind tell apart.
  const COLORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#999933", "#7a5195", "#44AA99"];
  const makers = {};
  let data;

  function fill(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== undefined && value !== false) made.setAttribute(name, value);
    }
    made.append(...children.flat());
    return made;
  }
  const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const text = (x, y, words, attributes = {}) => svg("text", { x, y, ...attributes }, String(words));
  const count = (number) => number.toLocaleString("en");
  function bytes(number) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    const power = number < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log(number) / Math.log(1024)));
    const scaled = number / 1024 ** power;
    return `${scaled.toLocaleString("en", { maximumFractionDigits: scaled < 10 ? 2 : scaled < 100 ? 1 : 0 })} ${units[power]}`;
  }
  const seconds = (number) => (number < 0.9995 ? `${(number * 1000).toPrecision(3)} ms` : `${number.toPrecision(3)} s`);

  // One figure on the page: controls, a picture as wide as its column, and a sentence that says what is shown.
  class Figure {
    constructor(picture, name) {
      this.controls = html("div", { class: "controls" });
      this.place = html("div", { class: "picture" });
      this.words = html("p", { class: "words", role: "status" });
      const caption = html("figcaption", {}, picture.alt);
      this.element = html("figure", { class: "live", "data-figure": name, "aria-label": picture.alt }, this.controls, this.place, this.words, caption);
      (picture.closest("p:not(:has(> :nth-child(2)))") ?? picture).replaceWith(this.element);
      this.name = name;
      this.draw = makers[name](this, data[name]);
      this.redraw();
      let width = this.width;
      new ResizeObserver(() => {
        if (this.width === width) return;
        width = this.width;
        this.redraw();
      }).observe(this.place);
    }

    get width() {
      return Math.max(300, Math.min(900, Math.floor(this.place.clientWidth)));
    }

    redraw() {
      const focused = this.place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
      this.draw();
      if (focused) this.place.querySelector(`[data-key="${focused}"]`)?.focus();
    }

    // Show an SVG of this height, of these parts; `say` has the same in words.
    show(height, ...parts) {
      const { width } = this;
      this.place.replaceChildren(svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group" }, ...parts));
    }

    say(...words) {
      this.words.replaceChildren(...words);
    }

    // One of several values, as radio buttons. Returns a function that gives the value. values: words, or [value, words].
    choice(title, values, first, changed = () => {}) {
      const name = `${this.name}-${Math.random().toString(36).slice(2)}`;
      let chosen = first ?? values[0];
      const group = html("fieldset", { "data-choice": title }, html("legend", {}, title));
      for (const each of values) {
        const [value, words] = Array.isArray(each) ? each : [each, each];
        if (each === chosen) chosen = value;
        const radio = html("input", { type: "radio", name, value: String(value), onchange: () => { chosen = value; changed(); this.redraw(); } });
        radio.checked = value === chosen;
        group.append(html("label", {}, radio, html("span", {}, String(words))));
      }
      this.controls.append(group);
      return () => chosen;
    }

    // A value of a list, as a slider. Returns { value(), replace(list), set(index) }.
    slider(title, values, first = 0, show = String) {
      const output = html("output");
      const input = html("input", { type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": title });
      const tell = () => {
        output.textContent = show(values[input.value]);
        input.setAttribute("aria-valuetext", output.textContent);
      };
      const set = (index) => {
        input.value = index;
        tell();
      };
      input.addEventListener("input", () => { tell(); this.redraw(); });
      set(first);
      this.controls.append(html("label", { class: "slider", "data-slider": title }, html("span", {}, title), input, output));
      return {
        value: () => values[input.value],
        set,
        replace: (list) => {
          values = list;
          input.max = list.length - 1;
          set(Math.min(input.value, list.length - 1));
        },
      };
    }

    // A button that moves a slider through all of its values, from the first.
    player(slider, values, title = "play") {
      let timer;
      const stop = () => {
        clearInterval(timer);
        timer = undefined;
        button.textContent = title;
      };
      const button = html("button", { type: "button", onclick: () => {
        if (timer) return stop();
        const list = values();
        let at = list.indexOf(slider.value());
        at = at === list.length - 1 ? -1 : at;
        button.textContent = "stop";
        const next = () => {
          at += 1;
          slider.set(at);
          this.redraw();
          if (at >= list.length - 1) stop();
        };
        timer = setInterval(next, 900);
        next();
      } }, title);
      this.controls.append(button);
    }

    // Colours and their names: [[class or colour, words]].
    legend(items, y, x = 0) {
      const parts = [];
      let left = x;
      let line = y;
      for (const [color, words] of items) {
        const wide = 24 + words.length * 7.2;
        if (left + wide > this.width && left > x) {
          left = x;
          line += 18;
        }
        parts.push(svg("rect", { x: left, y: line - 9, width: 11, height: 11, rx: 2, fill: color }), text(left + 16, line, words, { class: "faint" }));
        left += wide;
      }
      return { parts, bottom: line };
    }
  }

  // A mark that can be pointed at and focused: it says `words` while it is.
  function mark(ui, key, words, shape) {
    const tell = () => ui.say(words);
    return fill(shape, { tabindex: 0, "data-key": key, role: "img", "aria-label": words, onmouseenter: tell, onfocus: tell }, [svg("title", {}, words)]);
  }

  const load = (file) => new Promise((done, failed) => {
    document.head.append(Object.assign(html("script"), { src: folder + file, onload: done, onerror: failed }));
  });

  window.figures = {
    html, svg, text, count, bytes, seconds, mark, COLORS,
    add: (name, make) => { makers[name] = make; },
    setData: (all) => { data = all; },
  };

  async function start() {
    const found = [...document.querySelectorAll("img")].map((each) => [each, /figures\/(\w+)\.png$/.exec(each.getAttribute("src"))?.[1]]);
    const pictures = found.filter(([, name]) => name);
    if (pictures.length) await load("data.js");
    for (const name of new Set(pictures.map(([, name]) => name))) await load(`${name}.js`);
    for (const [picture, name] of pictures) new Figure(picture, name);
    document.documentElement.dataset.ready = "yes";
  }
  start();
})();
