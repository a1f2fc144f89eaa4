// Offload: what is on the device, in the host's memory and on a disk, and what a step then takes.
"use strict";
figures.add("offload", (ui, data) => {
  const { svg, text, mark, bytes } = figures;
  const MIB = 2 ** 20;
  const kinds = Object.keys(data.kinds);
  const chosen = ui.choice("offloaded", Object.keys(data.rows));
  return () => {
    const row = data.rows[chosen()];
    const before = data.rows.nothing;
    const host = Object.values(row.host).reduce((sum, each) => sum + each, 0);
    const device = row.device.reduce((sum, each) => sum + each, 0);
    const [left, right] = [62, 130];
    const scale = (ui.width - left - right) / Math.max(data.limit, before.device.reduce((sum, each) => sum + each, 0), host, row.disk);
    const parts = [];
    const bar = (line, title, sizes, total) => {
      const y = 22 + line * 42;
      let x = left;
      parts.push(text(0, y + 18, title));
      for (const [kind, size] of sizes) {
        const width = size * scale;
        if (width < 0.3) continue;
        parts.push(mark(ui, `${title}-${kind}`, `${title}: ${kind}, ${bytes(size * MIB)} of ${bytes(total * MIB)} of a rank`, svg("rect", { x, y, width, height: 28, fill: data.kinds[kind] ?? "#5f6670", "data-place": title, "data-mib": size })));
        x += width;
      }
      parts.push(text(x + 6, y + 18, bytes(total * MIB)));
    };
    bar(0, "device", kinds.map((kind, at) => [kind, row.device[at]]), device);
    bar(1, "host", Object.entries(row.host), host);
    bar(2, "disk", row.disk ? [["optimizer", row.disk]] : [], row.disk);
    const x = left + data.limit * scale;
    parts.push(svg("line", { x1: x, x2: x, y1: 14, y2: 56, class: "limit" }), text(x, 10, `${bytes(data.limit * MIB)} usable`, { "text-anchor": "middle", class: "faint" }));
    const shown = kinds.filter((kind, at) => row.device[at] * scale >= 0.3 || (row.host[kind] ?? 0) * scale >= 0.3);
    const others = Object.keys(row.host).filter((kind) => !(kind in data.kinds) && row.host[kind] * scale >= 0.3);
    const legend = ui.legend([...shown.map((kind) => [data.kinds[kind], kind]), ...others.map((kind) => ["#5f6670", kind])], 166);
    ui.show(legend.bottom + 8, ...parts, ...legend.parts);
    const time = (each) => `${(each / 1000).toPrecision(3)} s`;
    ui.say(`Llama 3.1 8B, ZeRO-3 on 8 H100, one sequence of 4,096 tokens each. A step takes ${time(row.step_ms)}`
      + (row === before ? ", and everything is on the device." : `, ${time(row.offload_ms)} of it in copies and updates that nothing hides; without offload ${time(before.step_ms)}. `),
    ...row.keys.flatMap((key) => [figures.html("code", {}, key), " "]));
  };
});
