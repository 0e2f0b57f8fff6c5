// Ranks × steps: each tile shows its worst rank, against that rank's own pace or its peers'.
"use strict";
(() => {
  const K = window.keepstep, { el, line } = K;
  const MOST_ROWS = 256, LEFT = 64, BOTTOM = 26, TOP = 16, MAGIC = 0x3154534b; // "KST1"
  const HEIGHT = 340, AGAIN_MS = 3000;
  const STRIP = 110; // where a step stands that does not end, and so has no tiles
  const box = document.getElementById("heat");
  const view = { mode: "own", row0: 0, row1: 0, column0: 0, column1: 0, follows: true };
  let tile = null, cursor = null, drag = null, asking = false, again = false, cellTimer = null, known = null, retry = null;

  const canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "heat map", "aria-label":
    "Ranks by steps", "aria-describedby": "heat-keys heat-tells" });
  const tells = K.tellsBelow("heat-tells", "Point at a tile, or move with the arrow keys: it tells rank, node, step and own time.");
  const modes = el("fieldset", { class: "choice" }, el("legend", null, "Coloured against"), ...[["own", "its own usual pace"],
    ["peers", "its peers' pace"]].map(([mode, text]) => el("label", null, el("input", { type: "radio", name: "heat-mode",
    value: mode, checked: mode === view.mode, onchange: () => { view.mode = mode; ask(); } }), " ", text)));
  const whole = el("button", { type: "button", onclick: () => zoomOut(true) }, "Show all");
  const caption = el("p", { class: "caption" });
  const scale = el("canvas", { class: "scale", role: "img", "aria-label": "Colours: blue is faster than usual, grey as usual, orange slower" });
  const scaleBox = el("div", { class: "scale-box" }, el("span", null, "½× faster"), scale, el("span", null, "4× slower; empty: not known"));
  box.append(caption, el("div", { class: "bar" }, modes, whole, scaleBox), canvas, tells, el("p", { id: "heat-keys", class: "keys" },
    "Drag to zoom in. Keys: arrows move (Shift: ten tiles), + and - zoom, 0 shows all, Page Up and Down scroll."));

  const heat = () => K.state.heat;
  const stepsOf = (column) => {
    const { first_step: first, stride } = heat();
    return [first + column * stride, first + (column + 1) * stride - 1];
  };
  const isWhole = () => view.row0 === 0 && view.row1 === heat().rows && view.column0 === 0 && view.follows;

  // Rows stand in the order PP, DP, EP, CP, TP; a rank's place in the layout tells its row.
  function rankOfRow(row) {
    const layout = K.state.job?.layout;
    if (!heat().by_layout || !layout) return row;
    const at = {};
    for (const name of ["tp", "cp", "ep", "dp", "pp"]) { at[name] = row % layout[name]; row = Math.floor(row / layout[name]); }
    let rank = 0, stride = 1;
    const named = layout.order.split("-");
    for (const name of [...named, ...["tp", "cp", "ep", "dp", "pp"].filter((one) => !named.includes(one))]) {
      rank += at[name] * stride; stride *= layout[name];
    }
    return rank;
  }
  function placeOfRow(row) {
    const layout = K.state.job?.layout;
    if (!heat().by_layout || !layout) return "";
    const parts = [];
    for (const name of ["tp", "cp", "ep", "dp", "pp"]) {
      if (layout[name] > 1) parts.unshift(`${name} ${row % layout[name]}`);
      row = Math.floor(row / layout[name]);
    }
    return parts.join(", ");
  }

  function query(column0, column1) {
    return `mode=${view.mode}&row0=${view.row0}&row1=${view.row1}&column0=${column0}&column1=${column1}&rows=${MOST_ROWS}&columns=512`;
  }
  async function fetched(column0, column1) {
    if (K.embedded) return K.embeddedHeat.tile(view, column0, column1, MOST_ROWS);
    const content = await (await K.ask(`api/tile?${query(column0, column1)}`)).arrayBuffer();
    const head = new DataView(content);
    if (content.byteLength < 32 || head.getUint32(0, true) !== MAGIC) throw new Error("no tile");
    const [rows, columns, row0, row1, from, to] = [1, 2, 3, 4, 5, 6].map((at) => head.getUint32(4 * at, true));
    return { rows, columns, row0, row1, column0: from, column1: to, cells: new Uint8Array(content, 32, rows * columns) };
  }

  // Asks for what is not here: all of the window, or only its new columns.
  async function ask() {
    if (asking) { again = true; return; }
    asking = true;
    try {
      const have = tile && tile.mode === view.mode && tile.row0 === view.row0 && tile.row1 === view.row1 &&
        tile.stride === heat().stride && tile.first === heat().first_step && tile.column0 === view.column0 &&
        tile.columns === tile.column1 - tile.column0 && view.column1 >= tile.column1;
      const asked = { mode: view.mode, stride: heat().stride, first: heat().first_step };
      if (have) {
        const from = Math.max(tile.column1 - 2, tile.column0); // the newest columns may still change
        const part = await fetched(from, view.column1);
        if (part.rows === tile.rows) tile = { ...joined(tile, part, from), ...asked };
        else tile = { ...await fetched(view.column0, view.column1), ...asked };
      } else tile = { ...await fetched(view.column0, view.column1), ...asked };
    } catch { // the link to the server is told of elsewhere; the picture stays as it was until this succeeds
      clearTimeout(retry);
      retry = setTimeout(ask, AGAIN_MS);
    }
    asking = false;
    K.redraw(picture);
    if (again) { again = false; ask(); }
  }
  function joined(old, part, from) {
    const keep = from - old.column0, columns = keep + part.columns, cells = new Uint8Array(old.rows * columns);
    for (let row = 0; row < old.rows; row++) {
      cells.set(old.cells.subarray(row * old.columns, row * old.columns + keep), row * columns);
      cells.set(part.cells.subarray(row * part.columns, (row + 1) * part.columns), row * columns + keep);
    }
    return { ...old, columns, cells, column1: part.column1 };
  }

  function draw() {
    const now = heat();
    if (!now || !now.columns || !now.rows) {
      caption.textContent = "No step has been finished yet.";
      canvas.hidden = true;
      return;
    }
    canvas.hidden = false;
    const is = `${now.rows} ${now.columns} ${now.stride} ${now.first_step} ${now.version}`;
    if (is !== known) {
      const rescaled = known === null || Number(known.split(" ")[2]) !== now.stride || Number(known.split(" ")[0]) !== now.rows;
      known = is;
      if (rescaled) Object.assign(view, { row0: 0, row1: now.rows, column0: 0, column1: now.columns, follows: true });
      if (view.follows) view.column1 = now.columns;
      ask();
    }
    paint();
    tellCaption();
  }

  function tellCaption() {
    const now = heat(), [from] = stepsOf(view.column0), to = Math.min(stepsOf(view.column1 - 1)[1], now.newest_step);
    const each = tile && tile.rows ? Math.ceil((view.row1 - view.row0) / tile.rows) : 1;
    const rows = view.row1 - view.row0 === now.rows ? K.count(now.rows, "rank") : `${K.count(view.row1 - view.row0, "rank")} of ${K.number(now.rows)}`;
    caption.textContent = `${rows}, steps ${K.number(from)} to ${K.number(to)}. A tile is ${K.count(each, "rank")} × ${K.count(now.stride, "step")}` +
      `${each > 1 || now.stride > 1 ? " and shows its worst" : ""}.` + (now.by_layout ? ` Rows in the layout's order: ${line(K.state.job.layout.text)}.` : "") +
      (stuck() ? ` Step ${stuck().onset_step ?? now.newest_step + 1} does not end: ${line(stuck().who) || "nobody is blamed"}.` : "");
    whole.disabled = isWhole();
  }

  const stuck = () => (view.follows ? K.standing() : undefined);
  const size = () => ({ width: canvas.clientWidth, height: HEIGHT, w: canvas.clientWidth - LEFT - 4 - (stuck() ? STRIP : 0), h: HEIGHT - TOP - BOTTOM });
  function paint() {
    const { width, height, w, h } = size();
    if (width < 80) return;
    const dpr = Math.min(devicePixelRatio || 1, 2);
    if (canvas.width !== Math.round(width * dpr)) canvas.width = Math.round(width * dpr);
    if (canvas.height !== Math.round(height * dpr)) canvas.height = Math.round(height * dpr);
    const g = canvas.getContext("2d", { willReadFrequently: true });
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    g.clearRect(0, 0, width, height);
    if (tile && tile.rows && tile.columns) paintCells(g, w, h);
    paintAxes(g, w, h);
    paintMarks(g, w, h);
    if (stuck()) paintStrip(g, w, h);
    paintScale();
  }
  function paintStrip(g, w, h) {
    const one = stuck(), x = LEFT + w + 5, wide = STRIP - 5, rows = view.row1 - view.row0, high = h / rows;
    const mark = K.colourOf(4), all = one.ranks.length + one.victim_count === heat().rows;
    g.save();
    g.beginPath();
    g.rect(x, TOP, wide, h);
    g.clip();
    g.strokeStyle = K.token("--line");
    g.lineWidth = 2;
    for (let at = -h; at < wide; at += 9) { g.beginPath(); g.moveTo(x + at, TOP + h); g.lineTo(x + at + h, TOP); g.stroke(); }
    g.font = "12px system-ui, sans-serif";
    g.textAlign = "center";
    g.textBaseline = "middle";
    for (let row = view.row0; row < view.row1; row++) {
      const blamed = one.ranks.includes(rankOfRow(row)), y = TOP + (row - view.row0) * high;
      if (blamed) { g.fillStyle = K.rgb(mark); g.fillRect(x, y, wide, Math.max(high, 2)); }
      if (high < 16 || !(blamed || all)) continue;
      const text = blamed ? "✕ stands still" : "waits", half = g.measureText(text).width / 2 + 5;
      if (!blamed) { g.fillStyle = K.token("--card"); g.fillRect(x + wide / 2 - half, y + high / 2 - 9, 2 * half, 18); }
      g.fillStyle = blamed ? K.inkOn(mark) : K.token("--ink-2");
      g.fillText(text, x + wide / 2, y + high / 2);
    }
    g.restore();
    g.strokeStyle = K.token("--bad");
    g.lineWidth = 1;
    g.strokeRect(x - 0.5, TOP - 0.5, wide, h + 1);
    g.fillStyle = K.token("--ink");
    g.textAlign = "center";
    g.fillText(`step ${one.onset_step ?? heat().newest_step + 1}`, x + wide / 2, TOP + h + 14);
  }
  let small = null;
  function paintCells(g, w, h) {
    const { rows, columns, cells } = tile;
    const table = palette();
    if (!small || small.width !== columns || small.height !== rows) {
      small = document.createElement("canvas");
      small.width = columns;
      small.height = rows;
    }
    const image = new ImageData(columns, rows), pixels = new Uint32Array(image.data.buffer);
    for (let at = 0; at < cells.length; at++) pixels[at] = table[cells[at]];
    small.getContext("2d", { willReadFrequently: true }).putImageData(image, 0, 0);
    g.imageSmoothingEnabled = false;
    // The tile may be of another window than is shown now: it is put where it belongs.
    const x = LEFT + (tile.column0 - view.column0) / (view.column1 - view.column0) * w;
    const y = TOP + (tile.row0 - view.row0) / (view.row1 - view.row0) * h;
    const wide = (tile.column1 - tile.column0) / (view.column1 - view.column0) * w;
    const high = (tile.row1 - tile.row0) / (view.row1 - view.row0) * h;
    g.save();
    g.beginPath();
    g.rect(LEFT, TOP, w, h);
    g.clip();
    g.drawImage(small, x, y, wide, high);
    // Not by colour alone: a tile half again as slow has a cross where there is room for one.
    const cw = wide / columns, ch = high / rows;
    if (cw >= 7 && ch >= 7) {
      g.lineWidth = 1.4;
      for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
        const code = cells[row * columns + column];
        if (code < 147) continue; // ×1.5
        g.strokeStyle = K.inkOn(K.colourOf(ratioOf(code)));
        const cx = x + (column + 0.5) * cw, cy = y + (row + 0.5) * ch, r = Math.min(cw, ch, 14) * 0.22;
        g.beginPath();
        g.moveTo(cx - r, cy - r); g.lineTo(cx + r, cy + r); g.moveTo(cx - r, cy + r); g.lineTo(cx + r, cy - r);
        g.stroke();
      }
    }
    g.restore();
  }
  const ratioOf = (code) => 2 ** ((code - 128) / 32);
  let made = null;
  function palette() {
    const dark = K.isDark();
    if (made?.dark === dark) return made.table;
    const table = new Uint32Array(256);
    for (let code = 1; code < 256; code++) {
      const [r, g, b] = K.colourOf(ratioOf(code));
      table[code] = (255 << 24 | b << 16 | g << 8 | r) >>> 0;
    }
    made = { dark, table };
    return table; // 0, not known, stays clear
  }
  function paintAxes(g, w, h) {
    g.fillStyle = K.token("--ink-2");
    g.strokeStyle = K.token("--line");
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    g.textAlign = "right";
    g.strokeRect(LEFT - 0.5, TOP - 0.5, w + 1, h + 1);
    const rows = view.row1 - view.row0, lines = Math.min(rows, Math.floor(h / 34));
    for (let i = 0; i < lines; i++) {
      const row = view.row0 + Math.floor(i * rows / lines);
      const y = TOP + (row - view.row0 + (rows <= lines ? 0.5 : 0)) / rows * h;
      g.fillText(String(rankOfRow(row)), LEFT - 6, Math.max(y, TOP + 6));
    }
    g.save();
    g.translate(11, TOP + h / 2);
    g.rotate(-Math.PI / 2);
    g.textAlign = "center";
    g.fillText("rank", 0, 0);
    g.restore();
    const columns = view.column1 - view.column0, { first_step: first, stride } = heat(), [from] = stepsOf(view.column0);
    const ticks = K.ticks(from, stepsOf(view.column1 - 1)[0], w / 90, stride);
    for (const step of ticks.length ? ticks : [from]) {
      const x = LEFT + ((step - first) / stride - view.column0) / columns * w, text = (step === ticks[0] ? "step " : "") + step;
      g.textAlign = "left";
      if (x + g.measureText(text).width <= LEFT + w + 4) g.fillText(text, x, TOP + h + 14);
      g.beginPath(); g.moveTo(x + 0.5, TOP + h); g.lineTo(x + 0.5, TOP + h + 5); g.stroke();
    }
  }
  function paintMarks(g, w, h) {
    const { first_step: first, stride } = heat();
    const columns = view.column1 - view.column0;
    g.fillStyle = g.strokeStyle = K.token("--ink");
    g.textAlign = "center";
    g.font = "11px system-ui, sans-serif";
    let last = -100;
    for (const one of K.state.incidents || []) {
      if (one.onset_step === null) continue;
      const column = (one.onset_step - first) / stride;
      const x = LEFT + (column - view.column0) / columns * w;
      if (x < LEFT - 1 || x > LEFT + w) continue;
      g.beginPath(); g.moveTo(x - 4, TOP - 7); g.lineTo(x + 4, TOP - 7); g.lineTo(x, TOP - 1); g.fill();
      if (x - last > 30) {
        g.textAlign = x > LEFT + w - 20 ? "right" : "center";
        g.fillText(`#${one.number}`, x, 5);
        last = x;
      }
      g.setLineDash([3, 3]);
      g.beginPath(); g.moveTo(x, TOP); g.lineTo(x, TOP + h); g.stroke();
      g.setLineDash([]);
    }
    if (cursor) {
      const [x, y, cw, ch] = rectangleOf(cursor, w, h);
      g.lineWidth = 2;
      g.strokeStyle = K.token("--focus");
      g.strokeRect(x, y, cw, ch);
      g.lineWidth = 1;
    }
    if (drag && drag.moved) {
      g.strokeStyle = K.token("--focus");
      g.setLineDash([4, 3]);
      g.strokeRect(Math.min(drag.x0, drag.x1), Math.min(drag.y0, drag.y1), Math.abs(drag.x1 - drag.x0), Math.abs(drag.y1 - drag.y0));
      g.setLineDash([]);
    }
  }
  function paintScale() {
    const g = scale.getContext("2d");
    scale.width = 120; scale.height = 10;
    for (let x = 0; x < 120; x++) {
      g.fillStyle = K.rgb(K.colourOf(2 ** (-1 + 3 * x / 120)));
      g.fillRect(x, 0, 1, 10);
    }
  }

  // The tile under a place, and the place of a tile. A cursor is {row, column} in tiles.
  const rowsShown = () => Math.min(tile?.rows || 1, view.row1 - view.row0);
  function rectangleOf({ row, column }, w, h) {
    const columns = view.column1 - view.column0, rows = rowsShown();
    return [LEFT + column / columns * w, TOP + row / rows * h, Math.max(w / columns, 3), Math.max(h / rows, 3)];
  }
  function at(event) {
    const { w, h } = size(), bounds = canvas.getBoundingClientRect();
    const x = event.clientX - bounds.left - LEFT, y = event.clientY - bounds.top - TOP;
    if (x < 0 || y < 0 || x >= w || y >= h) return null;
    return { row: Math.floor(y / h * rowsShown()), column: Math.floor(x / w * (view.column1 - view.column0)) };
  }
  function moveTo(next) {
    cursor = next;
    K.redraw(picture);
    clearTimeout(cellTimer);
    if (!cursor) return;
    cellTimer = setTimeout(tellCell, 60);
  }
  async function tellCell() {
    const each = Math.ceil((view.row1 - view.row0) / rowsShown());
    const row0 = view.row0 + cursor.row * each, column = view.column0 + cursor.column;
    const row1 = Math.min(row0 + each, view.row1), asked = cursor;
    let cell;
    try {
      cell = K.embedded ? K.embeddedHeat.cell(view.mode, row0, row1, column, rankOfRow) :
        await K.json(`api/cell?mode=${view.mode}&row0=${row0}&row1=${row1}&column0=${column}&column1=${column + 1}`);
    } catch { return; }
    if (cursor !== asked) return;
    const [from, to] = stepsOf(column);
    const steps = from === to ? `step ${from}` : `steps ${from} to ${to}`;
    if (cell.rank === null && cell.ratio) {
      tells.textContent = `${steps}, worst of ${K.count(row1 - row0, "rank")}: ×${cell.ratio.toFixed(2)}. This file does not say which; keepstep serve does.`;
      return;
    }
    if (cell.rank === null || cell.rank === undefined) {
      tells.textContent = `${steps}, ${row1 - row0 === 1 ? `rank ${rankOfRow(row0)}` : K.count(row1 - row0, "rank")}: nothing known.`;
      return;
    }
    const place = placeOfRow(row0), many = row1 - row0 > 1 ? `worst of ${K.count(row1 - row0, "rank")}: ` : "";
    tells.textContent = `${many}rank ${cell.rank}${cell.node ? ` on ${line(cell.node)}` : ""}${place && !many ? ` (${place})` : ""}, ${steps}: own time ${
      K.seconds(cell.own_s)}, ×${cell.ratio.toFixed(2)} of ${view.mode === "own" ? "its usual" : "its peers'"} ${K.seconds(cell.usual_s)}`;
  }

  function zoomTo(row0, row1, column0, column1) {
    const now = heat();
    row0 = Math.max(0, Math.floor(row0)); row1 = Math.min(now.rows, Math.max(Math.ceil(row1), row0 + 1));
    column0 = Math.max(0, Math.floor(column0)); column1 = Math.min(now.columns, Math.max(Math.ceil(column1), column0 + 1));
    Object.assign(view, { row0: Math.min(row0, row1 - 1), row1, column0: Math.min(column0, column1 - 1), column1, follows: column1 === now.columns });
    cursor = null;
    ask();
    K.redraw(picture);
  }
  function zoomOut(all) {
    const now = heat();
    if (all) return zoomTo(0, now.rows, 0, now.columns);
    const rows = view.row1 - view.row0, columns = view.column1 - view.column0;
    zoomTo(view.row0 - rows / 2, view.row1 + rows / 2, view.column0 - columns / 2, view.column1 + columns / 2);
  }
  function zoomIn() {
    const each = Math.ceil((view.row1 - view.row0) / rowsShown());
    const row = cursor ? view.row0 + (cursor.row + 0.5) * each : (view.row0 + view.row1) / 2;
    const column = cursor ? view.column0 + cursor.column + 0.5 : (view.column0 + view.column1) / 2;
    const rows = (view.row1 - view.row0) / 4, columns = (view.column1 - view.column0) / 4;
    zoomTo(row - rows, row + rows, column - columns, column + columns);
  }

  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const bounds = canvas.getBoundingClientRect();
      drag.x1 = event.clientX - bounds.left; drag.y1 = event.clientY - bounds.top;
      drag.moved ||= Math.hypot(drag.x1 - drag.x0, drag.y1 - drag.y0) > 6;
      K.redraw(picture);
    }
    const next = at(event);
    if (next && (!cursor || next.row !== cursor.row || next.column !== cursor.column)) moveTo(next);
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button !== 0 || !heat()) return; // a finger scrolls the page
    const bounds = canvas.getBoundingClientRect(), from = at(event);
    if (!from) return;
    drag = { from, x0: event.clientX - bounds.left, y0: event.clientY - bounds.top, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", (event) => {
    const done = drag;
    drag = null;
    if (!done || !done.moved) return;
    const to = at(event) || cursor, each = Math.ceil((view.row1 - view.row0) / rowsShown());
    if (!to) return;
    const rows = [done.from.row, to.row].sort((a, b) => a - b), columns = [done.from.column, to.column].sort((a, b) => a - b);
    zoomTo(view.row0 + rows[0] * each, view.row0 + (rows[1] + 1) * each, view.column0 + columns[0], view.column0 + columns[1] + 1);
  });
  canvas.addEventListener("dblclick", () => zoomOut(true));
  canvas.addEventListener("keydown", (event) => {
    if (!heat() || event.ctrlKey || event.metaKey || event.altKey) return;
    const columns = view.column1 - view.column0, rows = rowsShown(), by = event.shiftKey ? 10 : 1;
    const now = cursor || { row: 0, column: columns - 1 };
    const move = { ArrowLeft: [0, -by], ArrowRight: [0, by], ArrowUp: [-by, 0], ArrowDown: [by, 0], Home: [0, -columns], End: [0, columns] }[event.key];
    const page = { PageUp: -1, PageDown: 1 }[event.key];
    if (move) moveTo({ row: Math.min(Math.max(now.row + move[0], 0), rows - 1), column: Math.min(Math.max(now.column + move[1], 0), columns - 1) });
    else if (page) {
      const span = view.row1 - view.row0, from = Math.min(Math.max(view.row0 + page * span, 0), heat().rows - span);
      zoomTo(from, from + span, view.column0, view.column1);
    } else if (event.key === "+" || event.key === "=") zoomIn();
    else if (event.key === "-") zoomOut(false);
    else if (event.key === "0" || event.key === "Escape") zoomOut(true);
    else return;
    event.preventDefault();
  });
  canvas.addEventListener("blur", () => { cursor = null; K.redraw(picture); });

  const picture = K.addPicture({ needs: ["heat", "incidents", "job"], element: box, draw });
  K.heat = { view, zoomTo, tile: () => tile };
})();
