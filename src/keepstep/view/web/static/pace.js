// The job's pace: iteration time and the share of it that is lost, with the onsets of incidents.
"use strict";
(() => {
  const K = window.keepstep, { el } = K;
  const box = document.getElementById("pace");
  const caption = el("p", { class: "caption" });
  const holder = el("div", { class: "chart", role: "img", tabindex: 0, "aria-describedby": "pace-tells" });
  const tells = K.tellsBelow("pace-tells", "");
  box.append(caption, holder, tells);
  let chart = null, made = "", at = null;

  function marks(u) {
    const g = u.ctx, dpr = devicePixelRatio || 1, { left, top, width, height } = u.bbox;
    g.save();
    g.beginPath();
    g.rect(left, top, width, height);
    g.clip();
    g.font = `${11 * dpr}px system-ui, sans-serif`;
    g.textAlign = "left";
    let last = -1e9;
    for (const one of K.state.incidents || []) {
      if (one.onset_step === null) continue;
      const x = u.valToPos(one.onset_step, "x", true);
      const until = one.relief_step ?? (one.status === "open" ? u.scales.x.max : null);
      const stands = one === K.standing();
      if (until !== null && (one.kind === "slow" || stands)) {
        g.globalAlpha = stands ? 0.25 : 0.12;
        g.fillStyle = K.token(stands ? "--bad" : "--warm");
        g.fillRect(x, top, Math.max(u.valToPos(until, "x", true) - x, 2), height);
        g.globalAlpha = 1;
      }
      g.strokeStyle = g.fillStyle = K.token("--ink");
      g.lineWidth = dpr;
      g.setLineDash([4 * dpr, 4 * dpr]);
      g.beginPath(); g.moveTo(x, top); g.lineTo(x, top + height); g.stroke();
      g.setLineDash([]);
      const text = `#${one.number} ${one.kind}`, wide = g.measureText(text).width + 4 * dpr, before = x + wide > left + width;
      if (x - last > (before ? 70 * dpr + wide : 70 * dpr)) { g.fillText(text, before ? x - wide : x + 4 * dpr, top + 12 * dpr); last = x; }
    }
    g.restore();
  }
  // A first step of a minute would make a line of all others: few very long iterations are cut off.
  function top() {
    const known = K.state.pace.iteration_s.filter((v) => v !== null).sort((a, b) => a - b);
    return known.length ? Math.min(known[known.length - 1], 2.5 * known[Math.floor((known.length - 1) * 0.98)]) * 1.2 : 1;
  }
  function options(width) {
    const ink = K.token("--ink-2"), line = K.token("--line");
    const axis = (more) => ({ stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif", ...more });
    return {
      width, height: 220, legend: { show: false },
      cursor: { drag: { x: true, y: false }, y: false },
      scales: { x: { time: false }, s: { range: () => [0, top()] }, lost: { range: [0, 1] } },
      axes: [axis({ size: 32, values: (u, all) => all.map((v) => (Number.isInteger(v) ? String(v) : "")) }),
        axis({ scale: "s", size: 64, values: (u, all) => all.map((v) => K.seconds(v)) }),
        axis({ scale: "lost", side: 1, size: 58, grid: { show: false }, values: (u, all) => all.map((v) => `${Math.round(v * 100)} %`) })],
      series: [{ label: "step" },
        { label: "iteration", scale: "s", stroke: K.token("--cool"), width: 2, points: { size: 4 } },
        { label: "lost", scale: "lost", stroke: K.token("--warm"), width: 1.5, dash: [6, 4], points: { show: false } }],
      hooks: { draw: [marks], setCursor: [(u) => tell(u.cursor.idx)] },
    };
  }
  function tell(index) {
    const pace = K.state.pace;
    if (index === null || index === undefined || !pace || pace.steps[index] === undefined) return;
    at = index;
    const lost = pace.lost[index];
    tells.textContent = `step ${pace.steps[index]}${pace.stride > 1 ? ` to ${pace.steps[index] + pace.stride - 1}` : ""}: iteration ${
      K.seconds(pace.iteration_s[index])}${lost ? `, ${Math.round(lost * 100)} % of it lost` : ""}`;
  }
  holder.addEventListener("keydown", (event) => {
    const pace = K.state.pace, by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !pace) return;
    event.preventDefault();
    tell(Math.min(Math.max((at ?? pace.steps.length - 1) + by * (event.shiftKey ? 10 : 1), 0), pace.steps.length - 1));
  });

  // All is lost in a step that does not end: there is room for it behind the last one.
  function withStanding(pace, stands) {
    if (!stands) return [pace.steps, pace.iteration_s, pace.lost];
    const last = pace.steps[pace.steps.length - 1], from = Math.max(stands.onset_step ?? 0, last + 1);
    const more = [from, from + Math.max((from - pace.steps[0]) * 0.08, 1)];
    return [[...pace.steps, ...more], [...pace.iteration_s, null, null], [...pace.lost, 1, 1]];
  }
  function draw() {
    const pace = K.state.pace, width = Math.floor(holder.clientWidth);
    if (!pace || !pace.steps.length) { caption.textContent = "No step has been finished yet."; holder.hidden = true; return; }
    holder.hidden = false;
    const known = pace.iteration_s.filter((v) => v !== null), newest = known[known.length - 1];
    const fastest = [...known].sort((a, b) => a - b)[Math.floor((known.length - 1) / 4)];
    const stands = K.standing();
    const now = stands ? `; step ${stands.onset_step ?? pace.steps[pace.steps.length - 1] + 1} does not end` : `, ${K.state.job?.end ? "at the end" : "now"} ${K.seconds(newest)}`;
    caption.replaceChildren(`Usually ${K.seconds(fastest)} an iteration${now}. `,
      K.legend([el("span", { class: "key-line cool" }), "iteration time (left)"], [el("span", { class: "key-line warm dashed" }), "share of it that is lost (right)"]));
    holder.setAttribute("aria-label", `Iteration time by step: usually ${K.seconds(fastest)}${now}`);
    const data = withStanding(pace, stands), is = `${width} ${K.isDark()}`;
    if (width < 100) return;
    if (!chart || made !== is) {
      chart?.destroy();
      chart = new uPlot(options(width), data, holder);
      made = is;
    } else chart.setData(data);
  }
  K.addPicture({ needs: ["pace", "incidents"], element: box, draw });
})();
