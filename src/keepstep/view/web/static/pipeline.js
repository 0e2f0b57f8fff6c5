// The pipeline of an incident's culprit, one step before its onset and one after, on one scale of time.
"use strict";
(() => {
  const K = window.keepstep, { el, svg, line } = K;
  const box = document.getElementById("pipeline");
  const ROW = 22, LEFT = 70;
  const WHATS = ["forward", "backward", "optimizer", "data", "wait", "other"];
  const known = new Map(), asked = new Map();
  let shown = null;

  async function fetched(number) {
    if (K.embedded) return K.embedded.pipelines[number] || { reason: "not in this file: it has those of the newest incidents only" };
    if (!known.has(number)) {
      known.set(number, K.json(`api/pipeline/${number}`).catch(() => { known.delete(number); return { reason: "the server did not answer" }; }));
      if (known.size > 8) known.delete(known.keys().next().value);
    }
    return known.get(number);
  }
  async function draw() {
    const one = K.incident(K.chosen);
    if (!one) {
      box.replaceChildren(el("p", { class: "none" }, "No incident, so there is no onset. All operations of all ranks: keepstep export."));
      shown = null;
      return;
    }
    const is = `${one.number} ${one.status} ${one.onset_step} ${one.who} ${one.events.length}`, about = `${is} ${box.clientWidth}`;
    if (about === shown) return;
    shown = about;
    if (asked.get(one.number) !== is) known.delete(one.number); // rings may have been saved meanwhile, or others are blamed
    asked.set(one.number, is);
    const found = await fetched(one.number);
    if (one.number !== K.chosen) return;
    if (found.reason) {
      box.replaceChildren(el("p", { class: "none" }, `Incident #${one.number}: ${line(found.reason)}.`));
      return;
    }
    const longest = Math.max(...found.steps.map((step) => step.seconds));
    const used = new Set(found.steps.flatMap((step) => step.ranks.flatMap((rank) => rank.bars.map((bar) => bar[0]))));
    box.replaceChildren(
      el("p", { class: "caption" }, `Incident #${one.number}, onset at step ${found.onset_step}. Both on one scale of time: ${found.steps.map((step) => step.when === "stuck" ? `step ${step.step} does not end, and is drawn up to its last call` : `step ${step.step} took ${K.seconds(step.seconds)}`).join(", ")}. Where nothing is drawn a rank does what nothing marks: often its forward pass.`),
      el("div", { class: "bar" }, K.legend(...WHATS.filter((what) => used.has(what)).map((what) => [svg("svg", { width: 22, height: 12, "aria-hidden": true }, svg("rect", { width: 22, height: 12, class: `block ${what}` })),
        what === "wait" ? "in communication" : what]))),
      ...found.steps.map((step) => gantt(step, longest, found.culprits)));
  }
  function gantt(step, longest, culprits) {
    const width = box.clientWidth, height = step.ranks.length * ROW + 20;
    const x = (s) => LEFT + s / longest * (width - LEFT - 6);
    const told = step.ranks.map((rank) => `rank ${rank.rank}: ${WHATS.map((what) => [what, rank.bars.filter((bar) => bar[0] === what).reduce((sum, bar) => sum + bar[2] - bar[1], 0)])
      .filter(([, s]) => s > 0).map(([what, s]) => `${what} ${K.seconds(s)}`).join(", ")}`).join("; ");
    const drawing = svg("svg", { width, height, role: "img", "aria-label": `Step ${step.step}. ${told}` });
    for (const s of K.ticks(0, longest, Math.max(width / 100, 2))) {
      drawing.append(svg("line", { x1: x(s), x2: x(s), y1: 0, y2: height - 16, class: "grid" }), svg("text", { x: x(s), y: height - 3, class: "tick", "text-anchor": x(s) > width - 24 ? "end" : "middle" }, K.seconds(s)));
    }
    step.ranks.forEach((rank, row) => {
      const y = row * ROW, isCulprit = culprits.includes(rank.rank);
      drawing.append(svg("text", { x: LEFT - 6, y: y + 15, class: `label${isCulprit ? " culprit" : ""}`, "text-anchor": "end" }, `${isCulprit ? "▸ " : ""}rank ${rank.rank}`));
      for (const [what, from, to, name] of rank.bars) {
        const thin = what === "wait";
        const bar = svg("rect", { x: x(from).toFixed(2), y: y + (thin ? 13 : 3), width: Math.max(x(to) - x(from), 0.6).toFixed(2), height: thin ? 6 : ROW - 6, class: `block ${what}` });
        bar.append(svg("title", null, `${line(name)}, ${K.seconds(to - from)}`));
        drawing.append(bar);
      }
    });
    return el("figure", null, el("figcaption", null, step.when === "stuck" ? `After: step ${step.step}, which does not end` : `${step.when === "before" ? "Before" : "After"}: step ${step.step}, ${K.seconds(step.seconds)}`), drawing);
  }
  K.addPicture({ needs: ["incidents", "chosen", "job"], element: box, draw });
})();
