// A recovery as a waterfall of its phases.
"use strict";
(() => {
  const K = window.keepstep, { el, svg, line } = K;
  const box = document.getElementById("recovery");
  const ROW = 24;
  let at = null; // number of the incident whose recovery is shown

  const withRecovery = () => (K.state.incidents || []).filter((one) => one.recovery);
  function draw() {
    const all = withRecovery();
    if (!all.length) {
      const end = K.state.job?.end;
      K.put(box, el("p", { class: "none" }, `No recovery in this run: ${end ? "nothing was restarted." : "nothing had to be restarted so far."}`));
      return;
    }
    const chosen = K.incident(K.chosen);
    if (chosen?.recovery) at = K.chosen;
    if (!all.some((one) => one.number === at)) at = all[all.length - 1].number;
    const place = all.findIndex((one) => one.number === at), one = all[place], found = one.recovery;
    const step = (by) => () => { at = all[place + by].number; K.chooseIncident(at); };
    const how = [found.standbys ? `${K.count(found.standbys, "rank")} taken over by standbys` : "", found.survived ? `${K.count(found.survived, "process", "processes")} went on` : ""].filter(Boolean);
    K.put(box,
      el("p", { class: "caption" }, `Training again ${K.seconds(found.seconds)} after rank ${found.rank} ${line(found.what)} (incident #${one.number}, incarnation ${found.incarnation}${how.length ? `; ${how.join(", ")}` : ""}).`),
      all.length > 1 ? el("div", { class: "bar" }, el("button", { type: "button", disabled: place === 0, onclick: step(-1) }, "Earlier"),
        el("button", { type: "button", disabled: place === all.length - 1, onclick: step(1) }, "Later"), `${place + 1} of ${all.length}`) : null,
      waterfall(found));
  }
  function waterfall(found) {
    const width = box.clientWidth, left = Math.min(Math.max(...found.phases.map(([name]) => name.length * 7)) + 10, width * 0.45);
    const height = found.phases.length * ROW + 24, total = Math.max(found.seconds, 1e-9);
    const x = (s) => left + s / total * (width - left - 70);
    const text = found.phases.map(([name, s]) => `${line(name)} ${K.seconds(s)}`).join(", ");
    const drawing = svg("svg", { width, height, role: "img", "aria-label": `Phases of the recovery: ${text}` });
    for (const s of K.ticks(0, total, width - left < 330 ? 3 : 5)) {
      drawing.append(svg("line", { x1: x(s), x2: x(s), y1: 0, y2: height - 20, class: "grid" }), svg("text", { x: x(s), y: height - 5, class: "tick", "text-anchor": "middle" }, K.seconds(s)));
    }
    let from = 0;
    found.phases.forEach(([name, s], row) => {
      const y = row * ROW;
      drawing.append(svg("text", { x: left - 8, y: y + 16, class: "label", "text-anchor": "end" }, line(name)),
        svg("rect", { x: x(from), y: y + 4, width: Math.max(x(from + s) - x(from), 2), height: ROW - 8, class: `phase p${row % 2}` }),
        svg("text", { x: Math.max(x(from + s), x(from) + 2) + 5, y: y + 16, class: "value" }, K.seconds(s)));
      from += s;
    });
    return drawing;
  }
  K.addPicture({ needs: ["incidents", "chosen"], element: box, draw });
})();
