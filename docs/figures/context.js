// Ring attention: who has which tokens, and which pairs of query and key are computed in each step of the ring.
"use strict";
figures.add("context", (ui, data) => {
  const { svg, text, mark, COLORS } = figures;
  const degree = ui.choice("parallel.cp", Object.keys(data.degrees), "4");
  const cut = ui.choice("tokens are cut", ["zig-zag", "in order"]);
  const step = ui.slider("step of the ring", [...Array(8).keys()], 0);
  ui.player(step, () => [...Array(Number(degree())).keys()]);
  let shown;
  return () => {
    const n = Number(degree());
    if (shown !== n) {
      shown = n;
      step.replace([...Array(n).keys()]);
    }
    const { intervals, pairs } = data.degrees[n][cut()];
    const at = step.value();
    const side = Math.min(300, ui.width * 0.45);
    const unit = side / data.tokens;
    const [left, top] = [20, 20];
    const parts = [text(left, 12, "keys →", { class: "faint" }), svg("rect", { x: left, y: top, width: side, height: side, class: "panel" })];
    intervals.forEach((own, rank) => {
      // In step s a rank holds the keys of the rank s places behind it.
      const holder = (rank - at + n) % n;
      own.forEach(([q0, q1]) => intervals.forEach((keys, of) => keys.forEach(([k0, k1]) => {
        if (k0 >= q1) return;
        const isNow = of === holder;
        const isDone = (rank - of + n) % n < at;
        const x = left + k0 * unit;
        const y = top + q0 * unit;
        const [width, height] = [(k1 - k0) * unit, (q1 - q0) * unit];
        const isDiagonal = k0 === q0;
        const points = isDiagonal ? [[x, y], [x + width, y + height], [x, y + height]] : [[x, y], [x + width, y], [x + width, y + height], [x, y + height]];
        const words = `rank ${rank}, queries ${q0} to ${q1 - 1}, keys ${k0} to ${k1 - 1} of rank ${of}: step ${(rank - of + n) % n}`;
        parts.push(mark(ui, `${rank}-${q0}-${k0}`, words, svg("polygon", { points: points.map((point) => point.join(",")).join(" "), fill: COLORS[rank], opacity: isNow ? 1 : isDone ? 0.38 : 0.1, stroke: "var(--paper)", "stroke-width": 0.6, "data-step": (rank - of + n) % n })));
      })));
    });
    // Work of each rank in this step and in the steps before.
    const barLeft = left + side + 58;
    const room = ui.width - barLeft - 40;
    const totals = intervals.map((_, rank) => pairs.reduce((sum, row) => sum + row[rank], 0));
    const most = Math.max(...totals);
    const high = Math.min(30, side / n);
    parts.push(text(barLeft, 12, "pairs by step", { class: "faint" }));
    intervals.forEach((_, rank) => {
      const y = top + rank * high;
      let x = barLeft;
      parts.push(text(barLeft - 8, y + high / 2 + 4, `rank ${rank}`, { "text-anchor": "end" }));
      pairs.forEach((row, each) => {
        const width = row[rank] / most * room;
        parts.push(mark(ui, `work-${rank}-${each}`, `rank ${rank} computes ${row[rank]} pairs in step ${each}`, svg("rect", { x, y: y + 3, width: Math.max(0, width - 1), height: high - 8, fill: COLORS[rank], opacity: each === at ? 1 : each < at ? 0.38 : 0.1, "data-pairs": row[rank] })));
        x += width;
      });
      parts.push(text(x + 4, y + high / 2 + 4, totals[rank], { class: "faint" }));
    });
    ui.show(top + side + 14, ...parts);
    const now = pairs[at];
    const waste = pairs.reduce((sum, row) => sum + Math.max(...row), 0) / (totals.reduce((sum, each) => sum + each, 0) / n);
    ui.say(`Step ${at} of ${n - 1}: ${at ? `each rank has the keys and values of the rank ${at} behind it, and sends them on meanwhile` : "each rank begins with its own keys and values, and sends them on meanwhile"}. `
      + `The busiest rank computes ${Math.max(...now)} pairs, the idlest ${Math.min(...now)}. Over the ring ${cut() === "zig-zag" ? "all compute alike" : "ranks wait for the busiest in each step"}: the steps take ${waste.toFixed(2)} times an even share.`);
  };
});
