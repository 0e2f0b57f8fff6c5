// Where the page's data come from: the server, live, or what is embedded in a page that is one file.
"use strict";
(() => {
  const K = window.keepstep;
  const MOST_INCIDENTS = 100; // as the server tells
  const SILENT_MS = 20000, AGAIN_MS = 3000, LONGEST_MS = 30000;
  const embedded = document.getElementById("embedded");
  const listeners = { link: () => {} };
  let source = null, retry = null, heardAt = Date.now(), lostAt = null;

  function apply(part, whole) {
    const names = new Set(Object.keys(part).filter((name) => name !== "version"));
    if (whole) K.state = part;
    else {
      for (const name of names) {
        if (name === "incidents") mergeIncidents(part.incidents);
        else if (name === "pace" && part.pace.from !== undefined) mergePace(part.pace);
        else K.state[name] = part[name];
      }
      K.state.version = part.version;
    }
    heard();
    K.changed(names);
  }
  function mergeIncidents(changed) {
    const known = new Map((K.state.incidents || []).map((one) => [one.number, one]));
    for (const one of changed) known.set(one.number, one);
    const all = [...known.values()].sort((a, b) => a.number - b.number), older = new Set(K.state.older_open);
    // Of one that is too old to be told any more only this tells that it is still open.
    K.state.incidents = all.filter((one, at) => older.has(one.number) || at >= all.length - MOST_INCIDENTS);
  }
  function mergePace(part) {
    const pace = K.state.pace;
    for (const key of ["steps", "iteration_s", "lost"]) pace[key] = pace[key].slice(0, part.from).concat(part[key]);
    pace.stride = part.stride;
  }
  function heard() {
    heardAt = Date.now();
    if (lostAt !== null) { lostAt = null; }
    listeners.link(null);
  }
  function lost() {
    lostAt ??= heardAt;
    listeners.link(lostAt);
  }

  async function ask(path) {
    const answer = await fetch(path, { credentials: "same-origin", cache: "no-store", redirect: "error",
      signal: AbortSignal.timeout(LONGEST_MS) });
    if (!answer.ok) throw Object.assign(new Error(`${answer.status}`), { status: answer.status });
    return answer;
  }
  const json = async (path) => (await ask(path)).json();

  async function login(token) {
    const answer = await fetch("login", { method: "POST", body: token, credentials: "same-origin",
      headers: { "content-type": "text/plain" }, redirect: "error" });
    return answer.ok;
  }

  async function begin() {
    if (embedded) {
      K.embedded = JSON.parse(embedded.textContent);
      apply(K.embedded.state, true);
      return;
    }
    const shown = decodeURIComponent(location.hash.slice(1));
    const isAnchor = shown && document.getElementById(shown);
    if (shown && !isAnchor) {
      // The token must not stay in the address, nor in the history.
      history.replaceState(null, "", location.pathname + location.search);
      if (!await login(shown).catch(() => false)) return askForToken("This is not the token of this server.");
    }
    await load();
  }
  async function load() {
    clearTimeout(retry);
    try {
      apply(await json("api"), true);
    } catch (error) {
      if (error.status === 401) return askForToken("");
      lost();
      return again();
    }
    follow();
  }
  function again() {
    clearTimeout(retry);
    retry = setTimeout(load, AGAIN_MS);
  }
  function follow() {
    source?.close();
    if (document.hidden) { source = null; return; } // it goes on when somebody looks
    source = new EventSource(`api/events?seen=${K.state.version ?? ""}`);
    const take = (whole) => (event) => apply(JSON.parse(event.data), whole);
    source.addEventListener("whole", take(true));
    source.addEventListener("change", take(false));
    source.onerror = () => {
      source?.close();
      source = null;
      lost();
      again(); // what was missed meanwhile is asked for as a whole
    };
  }
  setInterval(() => { if (source && Date.now() - heardAt > SILENT_MS) lost(); }, 2000);
  // A page that nobody sees takes no events.
  document.addEventListener("visibilitychange", () => {
    if (embedded || !K.state.job) return;
    if (document.hidden) {
      source?.close();
      source = null;
    } else load();
  });

  function askForToken(why) {
    const form = document.getElementById("login");
    form.hidden = false;
    document.getElementById("words").hidden = true;
    document.getElementById("refused").textContent = why;
    document.getElementById("token").focus();
    form.onsubmit = async (event) => {
      event.preventDefault();
      const field = document.getElementById("token");
      const ok = await login(field.value.trim()).catch(() => false);
      field.value = "";
      if (!ok) { document.getElementById("refused").textContent = "This is not the token of this server."; return; }
      form.hidden = true;
      document.getElementById("words").hidden = false;
      load();
    };
  }

  Object.assign(K, { begin, json, ask, onLink: (told) => { listeners.link = told; }, incident: (number) =>
    (K.state.incidents || []).find((one) => one.number === number),
    // The step that is under way and does not end: the incident that says so.
    standing: () => (K.state.incidents || []).findLast((one) => one.status === "open" && (one.kind === "hang" || one.kind === "desync")) });
})();
