// The heat map of a page that is one file: from the tiles and samples in it.
"use strict";
(() => {
  const K = window.keepstep;
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const read = {};
  function whole(mode) {
    if (read[mode]) return read[mode];
    const content = bytes(K.embedded.heat.tiles[mode]), head = new DataView(content.buffer);
    const [rows, columns, row0, row1] = [1, 2, 3, 4].map((at) => head.getUint32(4 * at, true));
    return (read[mode] = { rows, columns, row0, row1, each: Math.ceil((row1 - row0) / Math.max(rows, 1)), cells: content.subarray(32) });
  }
  function tile(view, column0, column1, mostRows) {
    const all = whole(view.mode), first = Math.floor(view.row0 / all.each), last = Math.min(Math.ceil(view.row1 / all.each), all.rows);
    column1 = Math.min(column1, all.columns);
    const together = Math.max(Math.ceil((last - first) / mostRows), 1), rows = Math.ceil((last - first) / together), columns = column1 - column0;
    const cells = new Uint8Array(rows * columns);
    for (let row = first; row < last; row++) for (let column = 0; column < columns; column++) {
      const at = Math.floor((row - first) / together) * columns + column;
      cells[at] = Math.max(cells[at], all.cells[row * all.columns + column0 + column]);
    }
    return { rows, columns, row0: first * all.each, row1: Math.min(last * all.each, all.row1), column0, column1, cells };
  }
  let own = null;
  function cell(mode, row0, row1, column, rankOfRow) {
    const all = whole(mode);
    let best = 0, place = row0;
    for (let row = Math.floor(row0 / all.each); row * all.each < row1; row++) {
      const code = all.cells[row * all.columns + column];
      if (code > best) { best = code; place = row; }
    }
    if (!best) return { rank: null };
    const ratio = 2 ** ((best - 128) / 32);
    if (all.each > 1 || !K.embedded.heat.own_s) return { rank: null, ratio };
    own ??= new Float32Array(bytes(K.embedded.heat.own_s).buffer);
    const rank = rankOfRow(place), seconds = own[rank * all.columns + column];
    return { rank, ratio, own_s: seconds, usual_s: seconds / ratio, node: nodeOf(rank) };
  }
  function nodeOf(rank) {
    for (const [name, ranks] of K.embedded.heat.nodes) for (const part of ranks.split(",")) {
      const [low, high] = part.split("-").map(Number);
      if (rank >= low && rank <= (high ?? low)) return name;
    }
    return "";
  }
  K.embeddedHeat = { tile, cell };
})();
