// Incidents on a time line: onset, noticed, verdict, action, relief, each with a shape of its own.
"use strict";
(() => {
  const K = window.keepstep, { el, svg, line } = K;
  const box = document.getElementById("incidents");
  const ROW = 30, MOST = 20, TOP = 6;
  const TICKS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const SHAPES = {
    onset: ["M-5,-5 L5,0 L-5,5 Z", "onset"], noticed: ["M0,-6 L5,4 L-5,4 Z", "noticed"],
    verdict: ["M-4.5,-4.5 H4.5 V4.5 H-4.5 Z", "verdict"], action: ["M0,-6 L6,0 L0,6 L-6,0 Z", "action"],
    deaths: ["M-5,-5 L5,5 M-5,5 L5,-5", "processes died"], relief: ["M-5,0 A5,5 0 1 0 5,0 A5,5 0 1 0 -5,0 Z", "over"],
  };
  const shape = (what, attributes) => svg("path", { d: SHAPES[what][0], class: `mark ${what}`, ...attributes });
  const key = (what) => svg("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", "aria-hidden": true }, shape(what));
  let page = 0, near = false, last = null, byHand = false;
  const caption = el("p", { class: "caption" });
  const bar = el("div", { class: "bar" });
  const drawing = el("div");
  const tells = K.tellsBelow("incident-tells", "");
  const details = el("div", { id: "incident-details" });
  box.append(caption, bar, drawing, tells, details);

  const tick = (unix) => K.clock(unix + 0.01) + (Math.round(unix * 10) % 10 ? `.${Math.round(unix * 10) % 10}` : "");
  const began = (one) => one.onset_unix_s ?? one.detected_unix_s ?? one.events[0]?.unix_s ?? null;
  const ends = (one, now) => one.closed_unix_s ?? (one.status === "open" ? now : Math.max(one.detected_unix_s ?? 0, ...one.events.map((e) => e.unix_s ?? 0)));
  function moments(one) {
    const found = [];
    if (one.onset_unix_s) found.push(["onset", one.onset_unix_s, one.onset_step !== null ? `onset at step ${one.onset_step}` : "onset"]);
    let hasVerdict = false;
    for (const event of one.events) {
      if (!event.unix_s) continue;
      const what = event.what === "noticed" ? "noticed" : event.what === "deaths" ? "deaths" : "verdict";
      hasVerdict ||= what === "verdict";
      found.push([what, event.unix_s, `${event.what}${event.detail ? `: ${line(event.detail)}` : ""}`]);
    }
    if (one.detected_unix_s && !hasVerdict) found.push(["verdict", one.detected_unix_s, "verdict"]);
    for (const action of one.actions) if (action.unix_s) found.push(["action", action.unix_s, `action: ${line(action.name)}`]);
    if (one.closed_unix_s) found.push(["relief", one.closed_unix_s, one.status === "ended" ? "ended with the job" : "over"]);
    return found.sort((a, b) => a[1] - b[1]);
  }

  function draw() {
    const all = [...(K.state.incidents || [])].reverse(), total = K.state.job?.incidents ?? all.length;
    if (!all.length) {
      caption.textContent = K.state.job?.end ? "None." : "None so far.";
      for (const one of [bar, drawing, details]) one.replaceChildren();
      tells.textContent = "";
      tells.hidden = true;
      return;
    }
    tells.hidden = false;
    // Until somebody chooses, it is the one that the words above are about.
    byHand &&= Boolean(K.incident(K.chosen));
    const worst = K.state.words?.incident ?? all[0].number;
    if (!byHand && K.chosen !== worst) {
      K.chosen = worst;
      K.changed(new Set(["chosen"]));
    }
    const pages = Math.ceil(all.length / MOST);
    page = Math.min(page, pages - 1);
    const shown = all.slice(page * MOST, (page + 1) * MOST);
    const open = all.filter((one) => one.status === "open").length;
    caption.textContent = `${K.count(total, "incident")}, ${open ? `${open} open` : "none open"}. Newest first${
      total > all.length ? `; the newest ${all.length} are here, all in keepstep report` : ""}.`;
    bar.replaceChildren(K.legend(...Object.keys(SHAPES).map((what) => [key(what), SHAPES[what][1]])),
      el("button", { type: "button", "aria-pressed": String(near), onclick: () => { near = !near; K.redraw(picture); } }, near ? "Whole run" : "Around the chosen one"),
      ...(pages > 1 ? [el("button", { type: "button", disabled: page === 0, onclick: () => { page--; K.redraw(picture); } }, "Newer"),
        el("button", { type: "button", disabled: page === pages - 1, onclick: () => { page++; K.redraw(picture); } }, "Older")] : []));
    const wasFocused = drawing.contains(document.activeElement);
    drawing.replaceChildren(rows(shown));
    if (wasFocused) drawing.firstChild.focus({ preventScroll: true });
    tellChosen();
  }

  function rows(shown) {
    const now = (K.state.clock?.unix_s ?? 0) + (K.state.clock?.age_s ?? 0);
    const about = near ? shown.filter((one) => one.number === K.chosen) : shown;
    const from0 = Math.min(...(about.length ? about : shown).map((one) => began(one) ?? Infinity));
    const to0 = Math.max(...(about.length ? about : shown).map((one) => ends(one, now) || 0));
    const pad = Math.max((to0 - from0) * 0.04, 0.5), from = isFinite(from0) ? from0 - pad : 0, to = to0 + pad;
    const width = box.clientWidth, narrow = width < 560, left = narrow ? 0 : Math.min(Math.max(width * 0.3, 190), 330);
    const row = narrow ? ROW + 20 : ROW, height = TOP + shown.length * row + 22;
    const x = (unix) => left + 8 + (unix - from) / (to - from) * (width - left - 16);
    const picture = svg("svg", { width, height, role: "listbox", "aria-label": "Incidents on a time line", tabindex: 0, "aria-activedescendant": `incident-${K.chosen}`, onkeydown: move });
    for (const unix of K.ticks(from, to, Math.max((width - left) / 90, 2), 0.1, TICKS)) {
      const at = x(unix);
      picture.append(svg("line", { x1: at, x2: at, y1: TOP, y2: height - 20, class: "grid" }),
        at > 28 && at < width - 28 ? svg("text", { x: at, y: height - 6, class: "tick", "text-anchor": "middle" }, tick(unix)) : "");
    }
    shown.forEach((one, at) => {
      const y = TOP + at * row, middle = y + (narrow ? row - 14 : row / 2), chosen = one.number === K.chosen;
      const label = `#${one.number} ${one.kind}: ${line(one.who) || "nobody is blamed"}`;
      const group = svg("g", { role: "option", id: `incident-${one.number}`, "data-number": one.number, "aria-selected": String(chosen), "aria-label": `${label}, ${one.status}`,
        class: `incident ${one.status}${chosen ? " chosen" : ""}`, onclick: () => choose(one.number) },
        svg("rect", { x: 0, y: y + 1, width, height: row - 2, class: "row" }),
        svg("text", { x: 6, y: narrow ? y + 16 : middle + 4, class: "label" }, short(label, narrow ? width / 7.2 : left / 7)),
        svg("line", { x1: x(began(one) ?? from), x2: x(ends(one, now) || to), y1: middle, y2: middle, class: "span" }));
      for (const [what, unix, text] of moments(one)) {
        if (unix < from - pad || unix > to + pad) continue;
        group.append(shape(what, { transform: `translate(${x(unix).toFixed(1)} ${middle})` }));
        group.lastChild.append(svg("title", null, `${K.clock(unix)} ${text}`));
      }
      picture.append(group);
    });
    return picture;
  }
  const short = (text, most) => (text.length > most ? text.slice(0, Math.max(Math.floor(most) - 1, 3)) + "…" : text);

  function move(event) {
    const shown = [...(K.state.incidents || [])].reverse().slice(page * MOST, (page + 1) * MOST);
    const at = shown.findIndex((one) => one.number === K.chosen);
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = shown[Math.min(Math.max(at + by, 0), shown.length - 1)];
    if (next) choose(next.number);
  }
  function choose(number) {
    byHand = true;
    K.chosen = number;
    K.changed(new Set(["chosen"]));
  }

  function tellChosen() {
    const one = K.incident(K.chosen);
    if (!one) return;
    const is = JSON.stringify(one);
    if (is === last) return;
    last = is;
    const facts = [one.confidence && one.who ? `confidence ${one.confidence}` : "", one.cause ? line(one.cause) : "",
      one.slowdown ? `job ×${one.slowdown.toFixed(2)}` : "", one.lost_s ? `cost ${K.seconds(one.lost_s)}${one.status === "open" ? " so far" : ""}` : "",
      one.saved_s ? `saved ${K.seconds(one.saved_s)}` : "", one.status].filter(Boolean).join(", ");
    tells.textContent = `#${one.number} ${one.kind}: ${line(one.who) || "nobody is blamed"}; ${facts}`;
    K.put(details, el("details", { open: details.firstChild?.open }, el("summary", null, `What happened in #${one.number}, in order`),
      el("ol", { class: "moments" }, moments(one).map(([what, unix, text]) => el("li", null, key(what), " ", el("time", null, K.clock(unix)), " ", text))),
      one.next ? el("p", null, "Next: ", line(one.next)) : null,
      el("p", null, "All evidence: ", el("code", { tabindex: 0 }, `keepstep report ${line(K.state.job?.run)} ${one.number}`))));
  }

  const picture = K.addPicture({ needs: ["incidents", "words", "chosen"], element: box, draw });
  K.chooseIncident = choose;
})();
