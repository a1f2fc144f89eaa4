// A ring's all-reduce: a row for each rank, a column for each chunk of the gradient, arrows for what is sent next.
"use strict";
figures.add("ring", (ui, data) => {
  const { svg, text, mark, bytes, seconds, COLORS } = figures;
  const numbers = Object.keys(data.ranks).map(Number);
  const ranks = ui.slider("ranks", numbers, 2);
  const steps = () => data.ranks[ranks.value()].steps;
  const step = ui.slider("step", [...steps().keys()], 0);
  ui.player(step, () => [...steps().keys()]);
  let shown = ranks.value();
  return () => {
    const n = ranks.value();
    if (n !== shown) {
      shown = n;
      step.replace([...steps().keys()]);
      step.set(0);
    }
    const at = step.value();
    const { holds, sends } = steps()[at];
    const cell = Math.min(120, (ui.width - 130) / n);
    const high = 30;
    const parts = [];
    const sending = new Set(sends.map(([rank, chunk]) => `${rank}-${chunk}`));
    holds.forEach((chunks, rank) => {
      const y = 22 + rank * (high + 12);
      parts.push(text(0, y + 19, `rank ${rank}`));
      chunks.forEach((mask, chunk) => {
        const x = 56 + chunk * cell;
        const from = [...Array(n).keys()].filter((each) => mask >> each & 1);
        const each = (cell - 8) / n;
        const words = `rank ${rank}, chunk ${chunk}: ${from.length === n ? "the sum of all ranks" : `summed from rank${from.length > 1 ? "s" : ""} ${from.join(", ")}`}${sending.has(`${rank}-${chunk}`) ? `; sent to rank ${(rank + 1) % n} next` : ""}`;
        const box = mark(ui, `${rank}-${chunk}`, words, svg("rect", { x, y, width: cell - 8, height: high, class: "panel", rx: 3, "data-parts": from.length }));
        parts.push(box);
        from.forEach((source) => parts.push(svg("rect", { x: x + source * each + 1, y: y + 3, width: Math.max(each - 2, 1), height: high - 6, fill: COLORS[source], "pointer-events": "none", rx: 2 })));
        if (sending.has(`${rank}-${chunk}`)) {
          parts.push(svg("rect", { x: x - 2, y: y - 2, width: cell - 4, height: high + 4, rx: 4, fill: "none", stroke: "var(--ink)", "stroke-width": 2, "pointer-events": "none" }));
          const middle = x + (cell - 8) / 2;
          if (rank < n - 1) parts.push(svg("path", { d: `M${middle} ${y + high + 2} v6 m-4 -4 l4 5 l4 -5`, stroke: "var(--ink)", fill: "none", "stroke-width": 2 }));
          else parts.push(text(x + cell - 4, y + high + 13, "to rank 0", { "text-anchor": "end", class: "faint" }));
        }
      });
    });
    [...Array(n).keys()].forEach((chunk) => parts.push(text(56 + chunk * cell + (cell - 8) / 2, 14, cell > 60 ? `chunk ${chunk}` : chunk, { "text-anchor": "middle", class: "faint" })));
    const legend = ui.legend(COLORS.slice(0, n).map((color, rank) => [color, `of rank ${rank}`]), 42 + n * (high + 12), 56);
    ui.show(legend.bottom + 8, ...parts, ...legend.parts);
    const last = 2 * (n - 1);
    const phase = at < n - 1 ? "reduce-scatter: each rank passes on the chunk that it has summed last"
      : at < last ? "all-gather: whole sums are passed on" : "done: every rank has every sum";
    const share = at / n;
    ui.say(`Step ${at} of ${last}, ${phase}. Each rank has sent ${at} of ${n} chunks, ${share.toFixed(2)} P; in all 2(n-1)/n = ${(last / n).toFixed(2)} P, `
      + `${bytes(last / n * data.gradient)} of Llama 3.1 8B's fp32 gradient: ${seconds(data.ranks[n].milliseconds / 1000)} on NVLink by cluster=h100_ib.`);
  };
});
