// The page's own controls: dark and light, the keys, and what is said when no news comes.
"use strict";
(() => {
  const K = window.keepstep, { el } = K;
  const root = document.documentElement, theme = document.getElementById("theme");
  const remembered = (() => { try { return localStorage.getItem("keepstep-theme"); } catch { return null; } })();
  if (remembered === "dark" || remembered === "light") root.dataset.theme = remembered;
  function showTheme() {
    theme.textContent = K.isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Show the page ${K.isDark() ? "light" : "dark"}`);
  }
  theme.addEventListener("click", () => {
    root.dataset.theme = K.isDark() ? "light" : "dark";
    try { localStorage.setItem("keepstep-theme", root.dataset.theme); } catch { /* a private window */ }
    showTheme();
    K.redrawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { showTheme(); K.redrawAll(); });
  showTheme();

  const keys = document.getElementById("keys"), help = document.getElementById("help");
  const JUMPS = [["w", "words", "what is wrong"], ["h", "h-heat", "ranks × steps"], ["p", "h-pace", "pace"], ["i", "h-incidents", "incidents"], ["r", "h-recovery", "recovery"],
    ["d", "h-durability", "what is kept"], ["g", "h-pipeline", "pipeline"], ["l", "h-links", "links"]];
  keys.append(el("dl", null, [...JUMPS.map(([key, , text]) => [key, `to ${text}`]), ["t", "dark or light"], ["?", "these keys"], ["↑ ↓", "in the incidents: choose one, for recovery and pipeline"]]
    .map(([key, text]) => el("div", null, el("dt", null, el("kbd", null, key)), el("dd", null, text)))));
  const showKeys = () => {
    keys.hidden = !keys.hidden;
    help.setAttribute("aria-expanded", String(!keys.hidden));
  };
  help.addEventListener("click", showKeys);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) return;
    if (event.key === "?") return showKeys();
    if (event.key === "t") return theme.click();
    const jump = JUMPS.find(([key]) => key === event.key);
    if (!jump) return;
    const heading = document.getElementById(jump[1]), section = heading.closest("section");
    section.scrollIntoView({ block: "start" });
    const first = jump[1] === "words" ? section : section.querySelector("[tabindex='0'], button:not([disabled]), input, summary") || section;
    first.focus({ preventScroll: true });
  });

  const banner = document.getElementById("banner");
  let link = null;
  function tellNews() {
    const clock = K.state.clock, job = K.state.job;
    let text = "";
    if (link !== null) text = `Not heard from the server since ${K.clock(link / 1000)}: it has ended, or the network is away. What is shown is from then; asking again every 3 s.`;
    else if (K.embedded) text = `As of ${K.clock(clock?.unix_s, true)}: this is a file, it does not change.`;
    else if (clock && job && !job.end && clock.age_s > 15) text = `Not heard from the job since ${K.clock(clock.unix_s)} (${K.seconds(clock.age_s)} ago).`;
    if (banner.textContent !== text) banner.textContent = text;
    banner.hidden = !text;
    banner.classList.toggle("trouble", link !== null || (!K.embedded && Boolean(text)));
  }
  K.onLink((since) => { link = since; tellNews(); });
  K.addPicture({ needs: ["clock", "job"], element: banner, draw: tellNews });
  // Paper is light, and what is folded cannot be opened on it.
  let before = null;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme ?? "";
    root.dataset.theme = "light";
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
    K.pictures.forEach((one) => one.draw());
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    K.redrawAll();
  });
  K.begin();
})();
