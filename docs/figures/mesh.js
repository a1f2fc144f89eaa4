// The mesh: ranks as cells of planes (pp), rows (dp, cp) and columns (tp). The groups of the rank that is pointed at light up.
"use strict";
figures.add("mesh", (ui, data) => {
  const { svg, text, mark } = figures;
  const COLORS = { pp: "#E69F00", dp: "#0072B2", cp: "#CC79A7", tp: "#009E73", shard: "#56B4E9", replica: "#7a5195", ep: "#999933", expert_batch: "#44AA99" };
  const ALL = "all";
  const layout = ui.choice("layout", Object.keys(data), "pp 2, dp 2, cp 2, tp 4");
  const axis = ui.choice("axis", [ALL, ...Object.keys(COLORS)], ALL);
  let rank = 0;
  let cells = [];
  const group = (name, of) => {
    const groups = data[layout()].groups[name];
    return groups.map((first, each) => [first, each]).filter(([first]) => first === groups[of]).map(([, each]) => each);
  };
  const list = (ranks) => (ranks.length > 3 && ranks.every((each, at) => !at || each - ranks[at - 1] === ranks[1] - ranks[0])
    ? `${ranks[0]}, ${ranks[1]} ... ${ranks.at(-1)}` : ranks.join(", "));
  const light = (of) => {
    rank = of;
    const { groups, coordinates } = data[layout()];
    const names = axis() === ALL ? Object.keys(groups).filter((name) => name in coordinates || name === "ep") : [axis()].filter((name) => name in groups);
    const color = {};
    // The narrowest group of a rank is what it is painted in.
    for (const name of [...names].sort((a, b) => group(b, rank).length - group(a, rank).length)) for (const each of group(name, rank)) color[each] = COLORS[name];
    cells.forEach((cell, each) => {
      const own = each === rank;
      cell.setAttribute("fill", own ? "var(--ink)" : color[each] ?? (Math.floor(each / 8) % 2 ? "var(--panel)" : "var(--paper)"));
      cell.dataset.lit = own ? "own" : String(each in color);
      cell.nextSibling.setAttribute("class", own || each in color ? "on" : "");
      cell.nextSibling.style.fill = own ? "var(--paper)" : "";
      cell.setAttribute("tabindex", own ? 0 : -1);
    });
    const place = Object.entries(coordinates).map(([name, values]) => `${name} ${values[rank]}`).join(", ");
    const said = names.map((name) => {
      const ranks = group(name, rank);
      const nodes = new Set(ranks.map((each) => Math.floor(each / 8))).size;
      return `${name}: ranks ${list(ranks)} (${nodes > 1 ? `over ${nodes} nodes` : "in a node"})`;
    });
    ui.say(`Rank ${rank} is ${place}, on node ${Math.floor(rank / 8)}. `
      + (said.length ? `It talks over ${said.join("; ")}.` : `Along ${axis()} this layout has one rank: it sends nothing there.`));
  };
  return () => {
    const { coordinates, sizes } = data[layout()];
    const count = coordinates.pp.length;
    rank = Math.min(rank, count - 1);
    const [rows, columns] = [sizes.dp * sizes.cp, sizes.tp];
    const shear = 18;
    const perLine = Math.max(1, Math.min(sizes.pp, Math.floor(ui.width / (columns * 44 + rows * shear + 40))));
    const wide = Math.min(64, (ui.width / perLine - rows * shear - 30) / columns);
    const high = 27;
    const plane = rows * high + 48;
    const parts = [];
    cells = [];
    const order = [...Array(count).keys()];
    for (let stage = 0; stage < sizes.pp; stage += 1) {
      const x = (stage % perLine) * (ui.width / perLine) + 8;
      const y = Math.floor(stage / perLine) * plane;
      parts.push(text(Math.max(x, Math.min(x + rows * shear, x + ui.width / perLine - 180)), y + 14, sizes.pp > 1 ? `pp ${stage}: stage ${stage} of the model` : "one stage: the whole model", { class: "faint" }));
    }
    for (const each of order) {
      const stage = coordinates.pp[each];
      const row = coordinates.dp[each] * sizes.cp + coordinates.cp[each];
      const x = (stage % perLine) * (ui.width / perLine) + 8 + (rows - 1 - row) * shear + coordinates.tp[each] * wide;
      const y = Math.floor(stage / perLine) * plane + 22 + row * high;
      const points = [[x + shear, y], [x + shear + wide - 3, y], [x + wide - 3, y + high - 3], [x, y + high - 3]].map((point) => point.join(",")).join(" ");
      const place = Object.entries(coordinates).map(([name, values]) => `${name} ${values[each]}`).join(", ");
      const cell = mark(ui, `rank-${each}`, `rank ${each}: ${place}`, svg("polygon", { points, stroke: "var(--line)", "data-rank": each }));
      for (const event of ["mouseenter", "focus"]) cell.addEventListener(event, () => light(each));
      cell.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
        if (move === undefined) return;
        event.preventDefault();
        cells[Math.max(0, Math.min(count - 1, each + move))].focus();
      });
      cells.push(cell);
      parts.push(cell, text(x + (wide + shear) / 2 - 1, y + high / 2 + 3, each, { "text-anchor": "middle", "pointer-events": "none" }));
    }
    const lines = Math.ceil(sizes.pp / perLine);
    const names = Object.keys(data[layout()].groups).filter((name) => axis() === ALL ? name in coordinates || name === "ep" : name === axis());
    const nodes = count > 8 ? [["var(--panel)", "a node of 8 ranks, a shade each"]] : [];
    const legend = ui.legend([["var(--ink)", "this rank"], ...names.map((name) => [COLORS[name], `its ${name} group`]), ...nodes], lines * plane + 12);
    ui.show(legend.bottom + 8, ...parts, ...legend.parts);
    light(rank);
  };
});
