// Throughput by the number of GPUs, all of them dp: a line for each of ZeRO's stages. Hollow points do not fit.
"use strict";
figures.add("scaling", (ui, data) => {
  const { svg, text, mark, count, bytes, seconds, COLORS } = figures;
  const keys = Object.keys(data.series).map((each) => each.split("|"));
  const values = (at) => [...new Set(keys.map((each) => each[at]))];
  const cluster = ui.choice("machine", values(0));
  const model = ui.choice("model", values(1));
  const mode = ui.choice("tokens of a step", values(2));
  return () => {
    const lines = [0, 1, 2, 3].map((stage) => data.series[[cluster(), model(), mode(), stage].join("|")]);
    const [left, right, top, high] = [58, 20, 16, 220];
    const most = Math.max(...lines.flat().map(([rate]) => rate));
    const step = 10 ** Math.floor(Math.log10(most));
    const tick = most / step > 5 ? step * 2 : most / step > 2 ? step : step / 2;
    const x = (at) => left + at * (ui.width - left - right) / (data.degrees.length - 1);
    const y = (rate) => top + high * (1 - rate / (most * 1.05));
    const parts = [];
    for (let rate = 0; rate <= most; rate += tick) parts.push(svg("line", { x1: left, x2: ui.width - right, y1: y(rate), y2: y(rate), class: "line" }), text(left - 6, y(rate) + 4, count(rate), { "text-anchor": "end", class: "faint" }));
    const every = ui.width < 500 ? 2 : 1;
    data.degrees.forEach((degree, at) => at % every || parts.push(text(x(at), top + high + 18, count(degree), { "text-anchor": "middle", class: "faint" })));
    parts.push(text(left, 10, "tokens/s of a GPU", { class: "faint" }), text(left - 14, top + high + 18, "GPUs", { "text-anchor": "end", class: "faint" }));
    lines.forEach((line, stage) => {
      parts.push(svg("polyline", { points: line.map(([rate], at) => `${x(at)},${y(rate)}`).join(" "), fill: "none", stroke: COLORS[stage], "stroke-width": 2 }));
      line.forEach(([rate, mfu, step_s, exposed, mib], at) => {
        const fits = mib <= data.limit;
        const words = `ZeRO ${stage} on ${count(data.degrees[at])} GPU${at ? "s" : ""}: ${count(rate)} tokens/s of a GPU, ${count(rate * data.degrees[at])} of all, MFU ${(mfu * 100).toFixed(1)}%, a step of ${seconds(step_s)}, `
          + `${(exposed * 100).toFixed(1)}% of it for messages of ZeRO; ${bytes(mib * 2 ** 20)}${fits ? "" : ", does not fit"}`;
        parts.push(mark(ui, `${stage}-${at}`, words, svg("circle", { cx: x(at), cy: y(rate), r: 5, fill: fits ? COLORS[stage] : "var(--paper)", stroke: COLORS[stage], "stroke-width": 1.5, "data-rate": rate })));
      });
    });
    const legend = ui.legend([0, 1, 2, 3].map((stage) => [COLORS[stage], `ZeRO ${stage}`]), top + high + 36, left);
    ui.show(legend.bottom + 8, ...parts, ...legend.parts);
    const [first, last] = [lines[3][0][0], lines[3].at(-1)[0]];
    ui.say(mode() === values(2)[0]
      ? `Each GPU has one sequence of 4,096 tokens a step, so a step grows with the GPUs. ZeRO-3 keeps ${(last / first * 100).toFixed(0)}% of one GPU's rate at ${count(data.degrees.at(-1))}. Hollow points do not fit. Point at one for its numbers.`
      : `A step has ${count(data.batch)} sequences of 4,096 tokens, whoever computes them: more GPUs have fewer microbatches each, and what is sent once a step weighs more. Hollow points do not fit.`);
  };
});
