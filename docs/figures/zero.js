// Memory of one GPU by ZeRO's stage: four bars beside the device's limit.
"use strict";
figures.add("zero", (ui, data) => {
  const { svg, text, mark, bytes } = figures;
  const MIB = 2 ** 20;
  const kinds = Object.keys(data.kinds);
  const model = ui.choice("model", Object.keys(data.models), "Llama 3.1 8B");
  const policy = ui.choice("activation checkpointing", data.policies);
  const degree = ui.slider("GPUs, all data parallel", data.degrees, 3);
  return () => {
    const { limit, rows } = data.models[model()];
    const bars = rows[policy()][data.degrees.indexOf(degree.value())];
    const wide = ui.width;
    const [left, right] = [62, 150];
    const totals = bars.map((row) => row.slice(0, -1).reduce((sum, each) => sum + each, 0));
    const scale = (wide - left - right) / Math.max(limit * 1.15, ...totals);
    const parts = [];
    bars.forEach((row, stage) => {
      const y = 22 + stage * 42;
      let x = left;
      parts.push(text(0, y + 18, `ZeRO ${stage}`));
      kinds.forEach((kind, at) => {
        const size = row[at] * scale;
        if (size < 0.3) return;
        const words = `ZeRO ${stage}, ${kind}: ${bytes(row[at] * MIB)} of ${bytes(totals[stage] * MIB)} on each of ${degree.value()} GPUs`;
        parts.push(mark(ui, `${stage}-${kind}`, words, svg("rect", { x, y, width: size, height: 28, fill: data.kinds[kind], "data-mib": row[at], "data-kind": kind, "data-stage": stage })));
        x += size;
      });
      // Words stand beside the limit's line, not under it.
      if (x < left + limit * scale && x + 150 > left + limit * scale) x = left + limit * scale;
      const spare = limit - totals[stage];
      const verdict = spare >= 0 ? `${bytes(totals[stage] * MIB)}, fits` : `${bytes(-spare * MIB)} over`;
      parts.push(text(x + 6, y + 12, verdict, { class: spare >= 0 ? "good" : "over" }), text(x + 6, y + 27, `${(row.at(-1) / 1000).toPrecision(3)} s a step`, { class: "faint" }));
    });
    const x = left + limit * scale;
    parts.push(svg("line", { x1: x, x2: x, y1: 14, y2: 190, class: "limit" }), text(x, 10, `${bytes(limit * MIB)} usable`, { "text-anchor": "middle", class: "faint" }));
    const shown = kinds.filter((_, at) => bars.some((row) => row[at] * scale >= 0.3));
    const legend = ui.legend(shown.map((kind) => [data.kinds[kind], kind]), 212);
    ui.show(legend.bottom + 8, ...parts, ...legend.parts);
    const fits = totals.map((total, stage) => [total <= limit, stage]).filter(([good]) => good).map(([, stage]) => stage);
    ui.say(fits.length
      ? `${model()} in bf16 on ${degree.value()} GPUs, one sequence of 4,096 tokens each: stage ${fits[0]} is the first that fits.`
      : `${model()} fits at no stage on ${degree.value()} GPUs: more GPUs, checkpointing, offload, or tensor parallelism.`);
  };
});
