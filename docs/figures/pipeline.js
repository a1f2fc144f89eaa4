// Schedules: a lane for each rank, an action as long as it takes with F = I = W = 1, grey where a rank waits.
"use strict";
figures.add("pipeline", (ui, data) => {
  const { svg, text, mark } = figures;
  const WORDS = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights" };
  const names = Object.keys(data.schedules);
  const name = ui.choice("schedule", names, "1f1b");
  const ranks = ui.choice("ranks", [2, 4, 8], 4);
  const times = ui.choice("microbatches a rank", [1, 2, 3], 2);
  const costs = { F: 1, B: 2, I: 1, W: 1 };
  return () => {
    const microbatches = ranks() * times();
    const found = data.schedules[name()][`${ranks()} ${microbatches}`];
    if (found.refused) {
      ui.show(40, text(0, 24, `${name()} refuses ${microbatches} microbatches on ${ranks()} ranks`, { class: "over" }));
      ui.say(`${found.refused}.`);
      return;
    }
    const [left, right, high] = [54, 96, 24];
    const scale = (ui.width - left - right) / found.length;
    const parts = [text(ui.width - right + 8, 12, "live at most", { class: "faint" })];
    const kinds = new Set();
    found.ranks.forEach((actions, rank) => {
      const y = 18 + rank * (high + 5);
      parts.push(text(0, y + 16, `rank ${rank}`), svg("rect", { x: left, y, width: found.length * scale, height: high, fill: "var(--line)", opacity: 0.6 }));
      let clock = 0;
      for (const each of actions.split(" ")) {
        const kind = each[0];
        if (!(kind in costs)) {
          clock += Number(each);
          continue;
        }
        const [stage, microbatch] = each.slice(1).split(".").map(Number);
        const length = costs[kind];
        kinds.add(kind);
        const x = left + clock * scale;
        // A rank's second stage is paler.
        const chunk = Math.floor(stage / ranks());
        const words = `rank ${rank}, ${WORDS[kind]} of microbatch ${microbatch} in stage ${stage}, time ${clock} to ${clock + length}`;
        parts.push(mark(ui, `${rank}-${each}`, words, svg("rect", { x, y, width: Math.max(length * scale - 0.8, 0.6), height: high, fill: data.colors[kind], opacity: chunk ? 0.55 : 1, "data-kind": kind, "data-rank": rank, rx: 2 })));
        if (length * scale > 15) parts.push(text(x + length * scale / 2, y + 16, microbatch, { "text-anchor": "middle", class: "on" }));
        clock += length;
      }
      parts.push(svg("rect", { x: ui.width - right + 8, y: y + 5, width: Math.max(1, found.live[rank] / microbatches * 52), height: high - 10, fill: "#CC79A7", rx: 2 }), text(ui.width - 4, y + 16, found.live[rank], { "text-anchor": "end" }));
    });
    const items = [...kinds].map((kind) => [data.colors[kind], WORDS[kind]]);
    if (found.virtual > 1) items.push(["#3b6fb68c", "paler: the rank's second stage"]);
    const legend = ui.legend([...items, ["var(--line)", "idle"], ["#CC79A7", "microbatches held"]], 40 + found.ranks.length * (high + 5));
    ui.show(legend.bottom + 8, ...parts, ...legend.parts);
    ui.say(`${name()}, ${ranks()} ranks, ${microbatches} microbatches: ${(found.bubble * 100).toFixed(1)}% of the ranks' time is idle; `
      + `a step takes ${found.length / (found.virtual)} forwards of a rank's layers; the fullest rank holds ${Math.max(...found.live)} microbatches' activations.`);
  };
});
