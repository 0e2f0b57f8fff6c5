// Links between nodes: who sends to whom how fast, against what is usual there.
"use strict";
(() => {
  const K = window.keepstep, { el, svg, line } = K;
  const box = document.getElementById("links");
  let cursor = null;
  const tells = K.tellsBelow("link-tells", "");
  const content = el("div");
  box.append(content, tells);

  const ratioOf = (row) => (row[3] > 0 && row[2] > 0 ? row[3] / row[2] : 1); // how much slower than usual
  function draw() {
    const links = K.state.links;
    if (!links) return;
    if (!links.rows.length) {
      const nodes = K.state.job?.nodes ?? 0;
      content.replaceChildren(el("p", { class: "none" }, nodes < 2 ? "The job is on one node: it has no links between nodes." : "Nothing is known of the links: nothing was sent between nodes lately, or their agents do not tell."));
      tells.textContent = "";
      return;
    }
    const worst = [...links.rows].sort((a, b) => ratioOf(b) - ratioOf(a))[0], name = namer(links);
    K.put(content,
      el("p", { class: "caption" }, ratioOf(worst) > 1.25 ? `Slowest against its usual: ${name(worst[0])} to ${name(worst[1])}, ${K.bytesPerSecond(worst[2])} instead of ${K.bytesPerSecond(worst[3])}.` : "All as fast as usual.",
        links.of_nodes > links.nodes.length ? ` The ${links.nodes.length} nodes with the worst links of ${K.number(links.of_nodes)}.` : ""),
      matrix(links), el("p", { class: "keys" }, "Rows send, columns receive; so much a second. A dot or ÷: slower than usual, by how much."));
    tell();
  }
  const namer = (links) => { const names = new Map(links.nodes); return (node) => line(names.get(node) ?? `node ${node}`); };
  // Nodes of a cluster begin alike: the end of a name tells which one it is.
  const tail = (name, room) => (name.length > room ? `…${name.slice(1 - room)}` : name);
  function matrix(links) {
    const n = links.nodes.length, width = box.clientWidth, left = Math.min(Math.max(...links.nodes.map(([, name]) => name.length * 7)) + 12, width * 0.35);
    const size = Math.max(Math.min((width - left - 4) / n, 56), 9), top = n <= 10 ? 22 : 8, height = top + n * size + 4;
    const drawing = svg("svg", { width, height, role: "application", "aria-roledescription": "matrix", tabindex: 0, "aria-label": "Links: rows send, columns receive", "aria-describedby": "link-tells", onkeydown: move });
    const place = new Map(links.nodes.map(([node], at) => [node, at]));
    const by = new Map(links.rows.map((row) => [`${row[0]} ${row[1]}`, row]));
    links.nodes.forEach(([node, name], at) => {
      if (size >= 12) drawing.append(svg("text", { x: left - 8, y: top + at * size + size / 2 + 4, class: "label", "text-anchor": "end" }, line(name).slice(0, Math.max(Math.floor(left / 7), 3))));
      if (n <= 10) drawing.append(svg("text", { x: left + at * size + size / 2, y: top - 7, class: "tick", "text-anchor": "middle" }, tail(line(name), Math.max(Math.floor(size / 7), 2))));
      for (const [other] of links.nodes) {
        const row = by.get(`${node} ${other}`), x = left + place.get(other) * size, y = top + at * size;
        const colour = row ? K.colourOf(ratioOf(row)) : null;
        const cell = svg("rect", { x: x + 0.5, y: y + 0.5, width: size - 1, height: size - 1, class: row ? "link" : node === other ? "link self" : "link none", fill: colour ? K.rgb(colour) : null,
          onpointerenter: () => { cursor = [at, place.get(other)]; tell(); } });
        drawing.append(cell);
        if (row && size >= 40) drawing.append(svg("text", { x: x + size / 2, y: y + size / 2 + 4, class: "in-cell", "text-anchor": "middle", fill: K.inkOn(colour) }, ratioOf(row) > 1.25 ? `÷${ratioOf(row).toFixed(1)}` : K.bytesPerSecond(row[2]).replace("/s", "")));
        else if (row && ratioOf(row) > 1.5) drawing.append(svg("circle", { cx: x + size / 2, cy: y + size / 2, r: Math.max(size / 8, 1.5), fill: K.inkOn(colour) }));
      }
    });
    drawing.append(svg("rect", { id: "link-cursor", x: 0, y: 0, width: size, height: size, class: "cursor", visibility: "hidden" }));
    drawing.dataset.at = JSON.stringify([left, top, size]);
    return drawing;
  }
  function tell() {
    const links = K.state.links;
    if (!cursor || !links) { tells.textContent = "Point at a cell, or move with the arrow keys: it tells the speed."; return; }
    const from = links.nodes[cursor[0]], to = links.nodes[cursor[1]], mark = document.getElementById("link-cursor");
    if (!from || !to || !mark) return;
    const [left, top, size] = JSON.parse(mark.ownerSVGElement.dataset.at);
    mark.setAttribute("x", left + cursor[1] * size);
    mark.setAttribute("y", top + cursor[0] * size);
    mark.setAttribute("visibility", "visible");
    const row = links.rows.find((one) => one[0] === from[0] && one[1] === to[0]);
    tells.textContent = from === to ? line(from[1]) : `${line(from[1])} to ${line(to[1])}: ${row ? `${K.bytesPerSecond(row[2])}${row[3] ? `, usually ${K.bytesPerSecond(row[3])}` : ""}${row[4] ? `, ${row[4]} packets a second sent again` : ""}` : "nothing sent"}`;
  }
  function move(event) {
    const n = K.state.links.nodes.length, by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    cursor = [0, 1].map((k) => Math.min(Math.max((cursor?.[k] ?? 0) + by[k], 0), n - 1));
    tell();
  }
  K.addPicture({ needs: ["links", "job"], element: box, draw });
})();
