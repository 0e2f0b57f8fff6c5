// Durability by node: sealed, backed up and persisted steps, and what would be lost now.
"use strict";
(() => {
  const K = window.keepstep, { el, svg, line } = K;
  const box = document.getElementById("durability");
  const ROW = 26, MOST = 16; // rows of the picture; the table has more
  const MARKS = { sealed: ["M-4,-4 H4 V4 H-4 Z", "sealed: whole in the node's own memory"], backed_up: ["M-5,0 A5,5 0 1 0 5,0 A5,5 0 1 0 -5,0 Z", "backed up: another node has it as well"],
    stored: ["M0,-6 L6,0 L0,6 L-6,0 Z", "persisted: on storage"] };
  const mark = (what, attributes) => svg("path", { d: MARKS[what][0], class: `kept ${what}`, ...attributes });

  function draw() {
    const nodes = K.state.nodes, job = K.state.job;
    if (!nodes || !job) return;
    if (!job.has_checkpoints) {
      box.replaceChildren(el("p", { class: "none" }, "This job saves no checkpoints with keepstep: a restart begins where the script's own checkpoints are."));
      return;
    }
    const lost = job.loss_now_steps;
    const worst = nodes.lost_steps[nodes.lost_steps.length - 1];
    const named = nodes.rows.find((row) => lossOf(row, job.newest_step) === worst?.[0]);
    const who = !worst ? "" : worst[1] === nodes.count && nodes.count > 1 ? "any node" : worst[1] === 1 && named ? line(named.name) : `one of ${worst[1]} nodes`;
    K.put(box,
      job.end ? el("p", { class: "caption" }, "The job has ended. This is what was kept at its end.") : el("p", { class: "big" }, "Loss now: ", el("strong", null, lost === null ? "not known" : K.count(lost, "step")),
        lost !== null && who ? ` if ${who} died` : ""),
      job.backup_trouble ? el("p", { class: "trouble" }, `Not backed up: ${line(job.backup_trouble)}`) : null,
      el("div", { class: "bar" }, K.legend(...Object.keys(MARKS).map((what) => [svg("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": true }, mark(what)), MARKS[what][1]]))),
      picture(worstOf(nodes, job), job),
      nodes.count > MOST ? el("p", { class: "caption" }, `The worst ${MOST} of ${K.number(nodes.count)} nodes. ${
        nodes.lost_steps.map(([steps, n]) => `${K.count(n, "node")} would lose ${K.count(steps, "step")}`).slice(-4).join("; ")}.`) : null,
      table(nodes, job));
  }
  function worstOf(nodes, job) {
    const worst = [...nodes.rows].sort((a, b) => lossOf(b, job.newest_step) - lossOf(a, job.newest_step) || a.node - b.node).slice(0, MOST);
    return { ...nodes, rows: worst.sort((a, b) => a.node - b.node) };
  }
  function picture(nodes, job) {
    const width = box.clientWidth, newest = job.newest_step;
    const left = Math.min(Math.max(...nodes.rows.map((row) => row.name.length * 7.2), 40) + 10, width * 0.4), right = 64;
    const behind = nodes.rows.flatMap((row) => [row.sealed, row.backed_up, row.stored].filter((step) => step >= 0).map((step) => newest - step));
    const most = Math.max(2, ...behind, ...nodes.rows.map((row) => Math.min(lossOf(row, newest), 1000)));
    // Few steps matter more than whether it is 500 or 600: the scale is logarithmic.
    const x = (lag) => width - right - Math.log1p(Math.max(lag, 0)) / Math.log1p(most) * (width - left - right - 8);
    const height = nodes.rows.length * ROW + 24;
    const drawing = svg("svg", { width, height, role: "img", "aria-label": `Steps kept by node, newest step ${newest}; the same as a table follows` });
    for (const lag of (width < 480 ? [0, 3, 30, 300] : [0, 1, 3, 10, 30, 100, 300, 1000]).filter((lag) => lag <= most)) {
      drawing.append(svg("line", { x1: x(lag), x2: x(lag), y1: 0, y2: height - 20, class: "grid" }), svg("text", { x: x(lag), y: height - 5, class: "tick", "text-anchor": "middle" }, lag ? `−${lag}` : "newest"));
    }
    nodes.rows.forEach((row, at) => {
      const y = at * ROW + ROW / 2, lost = lossOf(row, newest), isSafe = Math.max(row.backed_up, row.stored);
      drawing.append(svg("text", { x: left - 8, y: y + 4, class: "label", "text-anchor": "end" }, line(row.name).slice(0, Math.max(Math.floor(left / 7), 4))),
        svg("line", { x1: isSafe >= 0 ? x(lost) : left, x2: x(0), y1: y, y2: y, class: "lost" }));
      for (const what of ["stored", "backed_up", "sealed"]) if (row[what] >= 0) drawing.append(mark(what, { transform: `translate(${x(newest - row[what]).toFixed(1)} ${y})` }));
      drawing.append(svg("text", { x: width - 4, y: y + 4, class: "value", "text-anchor": "end" }, isSafe < 0 ? "all" : lost ? `−${lost}` : "0"));
    });
    return drawing;
  }
  const lossOf = (row, newest) => Math.max(newest - Math.max(row.backed_up, row.stored), 0);
  function table(nodes, job) {
    const step = (value) => (value < 0 ? "none" : value);
    return el("details", null, el("summary", null, "As a table"), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Durability by node" }, el("table", null,
      el("thead", null, el("tr", null, ["Node", "Agent", "Sealed", "Backed up", "Persisted", "Lost if it died"].map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", null, nodes.rows.map((row) => el("tr", null, el("th", { scope: "row" }, line(row.name)), el("td", null, row.agent), el("td", null, step(row.sealed)), el("td", null, step(row.backed_up)),
        el("td", null, step(row.stored)), el("td", null, Math.max(row.backed_up, row.stored) < 0 ? "all" : K.count(lossOf(row, job.newest_step), "step"))))))));
  }
  K.addPicture({ needs: ["nodes", "job"], element: box, draw });
})();
