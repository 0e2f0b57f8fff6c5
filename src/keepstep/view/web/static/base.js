// What all pictures share: elements made of text only, numbers and times in words, colours, and who listens to what.
"use strict";
window.keepstep = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else made.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
    }
    made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map((child) =>
      child instanceof Node ? child : document.createTextNode(String(child))));
    return made;
  }
  // In place of what is in an element; null stands for nothing.
  const put = (into, ...children) => { into.replaceChildren(); return fill(into, null, children); };
  // Whatever comes from the job becomes a text node: it is never read as HTML.
  const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
  const svg = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

  // Unprintable characters and those that turn the direction of writing, as the terminal shows them.
  const UNSAFE = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
  const line = (text) => String(text ?? "").replace(UNSAFE, (c) => {
    const code = c.charCodeAt(0);
    return c === "\n" ? "\\n" : code < 256 ? "\\x" + code.toString(16).padStart(2, "0") :
      "\\u" + code.toString(16).padStart(4, "0");
  });

  function seconds(value) {
    if (value === null || value === undefined || !isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
    if (size < 1) return `${(value * 1e3).toFixed(size < 0.01 ? 1 : 0)} ms`;
    if (size < 100) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
    if (size < 6000) return `${(value / 60).toFixed(0)} min`;
    if (size < 172800) return `${(value / 3600).toFixed(1)} h`;
    return `${(value / 86400).toFixed(1)} days`;
  }
  function bytesPerSecond(value) {
    if (value === null || value === undefined || !isFinite(value)) return "–";
    const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
    let at = 0;
    while (value >= 1000 && at < units.length - 1) { value /= 1000; at++; }
    return `${value.toFixed(value < 10 && at ? 1 : 0)} ${units[at]}`;
  }
  function clock(unix, withDay) {
    if (!unix) return "–";
    const at = new Date(unix * 1000);
    const day = withDay || Math.abs(Date.now() - at) > 43200000;
    const time = at.toLocaleTimeString("en-GB");
    return day ? `${at.getFullYear()}-${String(at.getMonth() + 1).padStart(2, "0")}-${
      String(at.getDate()).padStart(2, "0")} ${time}` : time;
  }
  const count = (n, word, plural) => `${Number(n).toLocaleString("en-US")} ${n === 1 ? word : plural || word + "s"}`;
  const number = (n) => Number(n).toLocaleString("en-US");
  // Round values from one to another, about so many at most; of seconds on a clock with `sizes` between them.
  function ticks(from, to, most, least = 0, sizes = null) {
    const rough = Math.max((to - from) / Math.max(most, 1), least), size = 10 ** Math.floor(Math.log10(rough));
    if (!(rough > 0) || !isFinite(rough)) return [from];
    const by = (sizes || [1, 2, 5, 10].map((n) => n * size)).find((one) => one >= rough * (1 - 1e-9)) ?? Math.ceil(rough / 86400) * 86400;
    const found = [];
    for (let at = Math.ceil(from / by - 1e-9); at * by <= to + by * 1e-9; at++) found.push(at * by);
    return found;
  }

  // Colours of ratios: blue is faster than usual, grey is usual, orange to dark red is slower. Told apart by people
  // who see no red or green, and in grey by their lightness.
  const LIGHT = [[0.25, [8, 64, 129]], [0.5, [43, 108, 176]], [0.85, [170, 200, 230]], [0.96, [238, 238, 235]],
    [1.05, [238, 238, 235]], [1.12, [250, 225, 190]], [1.35, [246, 173, 85]], [2, [217, 95, 14]], [4, [127, 39, 4]]];
  const DARK = [[0.25, [144, 205, 244]], [0.5, [66, 135, 200]], [0.85, [38, 66, 96]], [0.96, [44, 46, 52]],
    [1.05, [44, 46, 52]], [1.12, [84, 62, 38]], [1.35, [158, 98, 30]], [2, [245, 150, 50]], [4, [255, 225, 160]]];
  const isDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  function colourOf(ratio) {
    const stops = isDark() ? DARK : LIGHT;
    if (ratio <= stops[0][0]) return stops[0][1];
    for (let i = 1; i < stops.length; i++) {
      const [high, colour] = stops[i];
      if (ratio <= high) {
        const [low, from] = stops[i - 1];
        const part = Math.log(ratio / low) / Math.log(high / low);
        return from.map((c, k) => Math.round(c + (colour[k] - c) * part));
      }
    }
    return stops[stops.length - 1][1];
  }
  const rgb = (c) => `rgb(${c[0]} ${c[1]} ${c[2]})`;
  const inkOn = (c) => (0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2] > 140 ? "#111" : "#fff");
  const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Pictures are drawn when their data or the width or the theme changes, once a frame at most.
  const pictures = [];
  let waiting = null;
  const stale = new Set();
  function redraw(picture) {
    stale.add(picture);
    waiting ??= requestAnimationFrame(() => {
      waiting = null;
      const now = [...stale];
      stale.clear();
      for (const one of now) {
        const began = performance.now();
        one.draw();
        one.drawn_ms = performance.now() - began;
      }
    });
  }
  // A picture: {needs: names of the sections that it shows, element, draw()}.
  function addPicture(picture) {
    pictures.push(picture);
    let width = 0;
    new ResizeObserver(() => {
      const now = picture.element.clientWidth;
      if (now !== width) { width = now; redraw(picture); }
    }).observe(picture.element);
    return picture;
  }
  const changed = (names) => pictures.filter((one) => one.needs.some((need) => names.has(need))).forEach(redraw);
  const redrawAll = () => pictures.forEach(redraw);

  // A legend of shapes and words, never of colour alone.
  const legend = (...entries) => el("ul", { class: "legend" }, entries.map(([mark, text]) =>
    el("li", null, mark, " ", text)));
  const tellsBelow = (id, text) => el("p", { id, class: "tells", role: "status", "aria-live": "polite" }, text);

  return { el, svg, put, line, seconds, bytesPerSecond, clock, count, number, ticks, colourOf, rgb, inkOn, token, isDark,
    addPicture, redraw, redrawAll, changed, pictures, legend, tellsBelow, state: {}, chosen: null };
})();
