// Column and row parallel matmuls of a region: which part of each weight is whose, what that part makes of the tokens, what is summed.
"use strict";
figures.add("tensor", (ui, data) => {
  const { svg, text, mark, bytes, count, COLORS } = figures;
  const degree = ui.choice("parallel.tp", Object.keys(data.degrees), "4");
  const region = ui.choice("region", ["mlp", "attention"]);
  let rank = 0;
  return () => {
    const n = Number(degree());
    const { weights, sent_mib, step_ms, tp_ms } = data.degrees[n];
    const named = weights[region()];
    const names = Object.keys(named);
    const row = names.at(-1);
    const hidden = named[row].shape[0];
    rank = Math.min(rank, n - 1);
    const wide = ui.width;
    const unit = Math.min(1, (wide - 60) / 640);
    const parts = [];
    const bands = (name, x, y, width, height, isColumn) => {
      // A weight is [out, in]: a column layer's outputs are columns of x W^T.
      const dim = isColumn ? 0 : 1;
      const whole = named[name].shape[dim];
      named[name].ranks.forEach((runs, each) => runs[dim].forEach(([start, stop]) => {
        const from = start / whole;
        const to = stop / whole;
        const shape = isColumn ? `[${count(stop - start)}, ${count(named[name].shape[1])}]` : `[${count(named[name].shape[0])}, ${count(stop - start)}]`;
        const words = `rank ${each} holds ${isColumn ? "rows" : "columns"} ${count(start)} to ${count(stop - 1)} of ${name}: ${shape}`;
        const place = isColumn ? { x: x + from * width, y, width: (to - from) * width, height } : { x, y: y + from * height, width, height: (to - from) * height };
        const drawn = mark(ui, `${name}-${each}`, words, svg("rect", { ...place, fill: COLORS[each], opacity: each === rank ? 1 : 0.35, stroke: "var(--paper)", "data-rank": each, "data-name": name }));
        drawn.addEventListener("mouseenter", () => light(each));
        drawn.addEventListener("focus", () => light(each));
        parts.push(drawn);
      }));
    };
    const light = (each) => {
      rank = each;
      ui.place.querySelectorAll("[data-rank]").forEach((found) => found.setAttribute("opacity", Number(found.dataset.rank) === rank ? 1 : 0.35));
    };
    const box = (x, y, width, height, words) => parts.push(svg("rect", { x, y, width, height, class: "panel" }), text(x + width / 2, y + height / 2 + 4, words, { "text-anchor": "middle" }));
    const strip = (x, y, width, height, words) => {
      for (let each = 0; each < n; each += 1) {
        parts.push(svg("rect", { x: x + each * width / n, y, width: width / n, height, fill: COLORS[each], opacity: each === rank ? 1 : 0.35, stroke: "var(--paper)", "data-rank": each, "pointer-events": "none" }));
      }
      parts.push(text(x + width / 2, y + height + 15, words, { "text-anchor": "middle", class: "faint" }));
    };
    const [tall, h, i] = [54 * unit + 20, 84 * unit + 16, 200 * unit];
    // First line: tokens times column layers.
    const columns = names.slice(0, -1);
    const top = 20;
    box(0, top + h - tall / 2 - 20, h, tall, "x");
    parts.push(text(h / 2, top + h + tall / 2 - 5, h > 90 ? "[T, H], all ranks" : "[T, H]", { "text-anchor": "middle", class: "faint" }), text(h + 8, top + h + 4, "×"));
    const total = columns.reduce((sum, name) => sum + named[name].shape[0], 0);
    const gap = 10;
    let x = h + 24;
    const room = wide - h - 40 - (columns.length - 1) * gap;
    columns.forEach((name) => {
      const width = room * named[name].shape[0] / total;
      bands(name, x, top, width, h, true);
      parts.push(text(x + width / 2, top - 6, named[name].shape[0] * 6 > total || width > 60 ? name : name.slice(0, 1), { "text-anchor": "middle", class: "faint" }));
      strip(x, top + h + 14, width, tall * 0.6, name === columns[0] || columns.length < 3 ? "each rank's outputs" : "");
      x += width + gap;
    });
    parts.push(text(Math.min(h + 24, wide - 330), top + h + 10 + tall * 0.6 + 40, region() === "mlp" ? "silu(gate) × up, element by element: nothing is sent" : "attention, head by head: nothing is sent", { class: "faint" }));
    // Second line: outputs times the row layer.
    const down = top + h + tall + 76;
    const into = Math.min(i, wide * 0.34);
    strip(0, down + 30, into, tall * 0.6, region() === "mlp" ? "[T, F]" : "[T, heads × d]");
    parts.push(text(into + 8, down + 30 + tall * 0.3 + 4, "×"));
    bands(row, into + 24, down, h, Math.min(i, 130), false);
    parts.push(text(into + 24 + h / 2, down - 6, row, { "text-anchor": "middle", class: "faint" }), text(into + h + 32, down + 60, "="));
    const sums = into + h + 48;
    const each = Math.max(16, Math.min(64, (wide - sums - 12) / 2));
    for (let at = n - 1; at >= 0; at -= 1) parts.push(svg("rect", { x: sums + at * 4, y: down + 20 + at * 4, width: each, height: tall * 0.7, fill: COLORS[at], opacity: at === rank ? 1 : 0.35, stroke: "var(--paper)", "data-rank": at, "pointer-events": "none" }));
    parts.push(text(sums, down + 14, n > 1 ? `${n} partial sums` : "the output", { class: "faint" }));
    if (n > 1) parts.push(text(sums, down + tall * 0.7 + n * 4 + 36, "all-reduce → y [T, H]"));
    ui.show(down + 150, ...parts);
    const part = names.reduce((sum, name) => sum + named[name].ranks[rank].reduce((size, runs) => size * runs.reduce((all, [a, b]) => all + b - a, 0), 1), 0);
    ui.say(`Llama 3.1 8B, tp=${n}: rank ${rank} holds ${count(part)} of this region's parameters. `
      + (n > 1 ? `A layer sends ${bytes(sent_mib * 2 ** 20)} a microbatch of ${count(data.tokens)} tokens; with dp ${8 / n} x tp ${n} on 8 H100 a step of 8 sequences takes ${Math.round(step_ms)} ms, ${Math.round(tp_ms)} of them in these messages.`
        : `Nothing is sent; on 8 H100 (dp 8, ZeRO-3) a step of 8 sequences takes ${Math.round(step_ms)} ms.`));
  };
});
