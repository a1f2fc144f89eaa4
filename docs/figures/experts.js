// Expert parallelism: rows that each rank sends to each rank with experts, in the steps of a layer's forward.
"use strict";
figures.add("experts", (ui, data) => {
  const { svg, text, mark, COLORS } = figures;
  const STEPS = ["route", "dispatch", "compute", "return"];
  const router = ui.choice("router", Object.keys(data.routers));
  const degree = ui.choice("parallel.ep", [2, 4, 8], 4);
  const step = ui.slider("step", [0, 1, 2, 3], 1, (at) => STEPS[at]);
  ui.player(step, () => [0, 1, 2, 3]);
  return () => {
    const n = degree();
    const { ranks, owners } = data.routers[router()][n];
    const at = step.value();
    const isAway = at === 1 || at === 2;
    const wide = ui.width;
    const per = ranks[0].rows.reduce((sum, rows) => sum + rows, 0);
    const received = owners.map(() => 0).slice(0, n);
    ranks.forEach(({ rows }) => rows.forEach((count, expert) => { received[owners[expert]] += count; }));
    const most = Math.max(per, ...received);
    const high = n > 4 ? 34 : 44;
    const cell = Math.min(13, (wide / 2 - 150) / most);
    const [leftX, rightX] = [52, wide - 152 - most * cell];
    const parts = [text(leftX, 12, "rows it sends", { class: "faint" }), text(rightX, 12, "rows it gets", { class: "faint" })];
    const filled = received.map(() => 0);
    ranks.forEach(({ rows }, from) => {
      const y = 22 + from * high;
      parts.push(text(0, y + 16, `rank ${from}`));
      let place = 0;
      rows.forEach((count, expert) => {
        const to = owners[expert];
        for (let row = 0; row < count; row += 1) {
          const x = leftX + place * cell;
          const there = rightX + filled[to] * cell;
          const thereY = 22 + to * high;
          place += 1;
          filled[to] += 1;
          const words = `a row of rank ${from} for expert ${expert}, which rank ${to} has: ${from === to ? "it stays" : "it travels"}`;
          if (at === 1 || at === 3) parts.push(svg("path", { d: `M${x + cell / 2} ${y + 20} C ${wide / 2} ${y + 20}, ${wide / 2} ${thereY + 10}, ${there} ${thereY + 10}`, fill: "none", stroke: COLORS[from], opacity: from === to ? 0.12 : 0.4, "pointer-events": "none" }));
          const side = Math.max(3, cell - 2);
          parts.push(mark(ui, `${from}-${expert}-${row}`, words, svg("rect", {
            x: isAway ? there : x, y: isAway ? thereY + 4 : y + 4, width: side, height: 18, rx: 2, fill: COLORS[from], "data-from": from, "data-to": to,
          })));
          if (at === 1) parts.push(svg("rect", { x, y: y + 4, width: side, height: 18, rx: 2, fill: "none", stroke: COLORS[from] }));
        }
      });
    });
    received.forEach((count, rank) => {
      const own = owners.map((owner, expert) => [owner, expert]).filter(([owner]) => owner === rank).map(([, expert]) => expert);
      const y = 22 + rank * high;
      const numbers = own.length > 1 ? `${own[0]}-${own.at(-1)}` : own[0];
      parts.push(svg("line", { x1: rightX, x2: wide - 152, y1: y + 27, y2: y + 27, class: "line" }));
      parts.push(text(wide - 4, y + 18, `expert${own.length > 1 ? "s" : ""} ${numbers}: ${count} rows`, { "text-anchor": "end", class: count > 1.5 * per ? "over" : "" }));
    });
    const legend = ui.legend(COLORS.slice(0, n).map((color, rank) => [color, `rows of rank ${rank}`]), 40 + n * high);
    ui.show(legend.bottom + 8, ...parts, ...legend.parts);
    const says = [
      `Route: each rank's router has chosen 2 of ${data.experts} experts for each of its 6 tokens; the pairs are sorted by the rank that has the expert.`,
      "Dispatch: numbers of rows go ahead, then the rows, in an all-to-all of uneven parts.",
      "Compute: a rank multiplies all rows of its experts in one grouped matmul.",
      "Return: results go back the way they came; the sender weighs and sums them. Backward goes the same ways with gradients.",
    ];
    const fullest = Math.max(...received);
    ui.say(`${says[at]} The fullest rank receives ${fullest} rows, ${(fullest / per).toFixed(2)} times the mean: the others wait for it, and it needs the memory.`);
  };
});
