// In words first: what is wrong, who, since when, what was done, what you should do.
"use strict";
(() => {
  const K = window.keepstep, { el, line } = K;
  const MOODS = { healthy: ["✓", "Healthy"], changing: ["↻", "Changing"], trouble: ["!", "Trouble"],
    unknown: ["?", "Not clear"], ended: ["■", "Ended"], failed: ["✕", "Failed"] };
  const answer = document.getElementById("answer"), headline = document.getElementById("headline");
  let shown = "";

  function rows(words) {
    const listed = [["What", words.what], ["Who", words.who], ["Since", words.since], ["Done, next", words.done],
      ["Do", words.advice], ["Note", words.notes], ["Also", words.others]];
    return listed.filter(([, texts]) => texts && texts.length).map(([label, texts]) => [
      el("dt", null, label),
      el("dd", { class: label === "Do" ? "do" : null }, label === "Do" ?
        el("ol", null, texts.map((step) => el("li", null, advice(step)))) :
        texts.map((text) => el("p", null, marked(text)))),
    ]);
  }
  const advice = (step) => step.command ?
    [step.text ? [marked(step.text), ": "] : "", el("code", { tabindex: 0 }, line(step.command))] : marked(step.text);
  // What stands between backticks is to be typed.
  const marked = (text) => line(text).split("`").map((part, at, all) =>
    at % 2 && at < all.length - 1 ? el("code", null, part) : at % 2 ? "`" + part : part);

  function draw() {
    const words = K.state.words;
    if (!words) return;
    document.getElementById("pictures").hidden = false;
    const now = JSON.stringify(words);
    if (now === shown) return; // screen readers tell what changed, and only then
    shown = now;
    const [mark, mood] = MOODS[words.mood] || MOODS.unknown;
    document.getElementById("words").dataset.mood = words.mood;
    headline.replaceChildren(el("span", { class: "mood" }, el("span", { "aria-hidden": true }, mark + " "), mood),
      " ", line(words.headline));
    answer.replaceChildren(el("dl", null, rows(words)));
    document.title = `${mood}: ${line(K.state.job?.name)} – keepstep`;
  }

  const facts = document.getElementById("facts");
  function drawFacts() {
    const job = K.state.job;
    if (!job) return;
    document.getElementById("run").textContent = line(job.name);
    const state = job.end ? `ended, exit code ${job.end.exit_code}` : job.state || "not known yet";
    document.getElementById("state").textContent = line(state);
    const told = [["Step", job.newest_step < 0 ? "–" : K.number(job.newest_step)],
      ["Iteration", K.seconds(job.iteration_s)],
      ["Ranks", K.number(job.world_size)], ["Nodes", K.number(job.nodes)],
      ["Restarts", job.max_restarts ? `${job.restarts} of ${job.max_restarts}` : K.number(job.restarts)],
      ["Loss now", job.end ? "–" : job.has_checkpoints ? (job.loss_now_steps === null ? "–" : K.count(job.loss_now_steps, "step")) :
        "no checkpoints"],
      ["Open", K.count(job.open_incidents, "incident")]];
    facts.replaceChildren(...told.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
  }
  K.addPicture({ needs: ["words"], element: answer, draw });
  K.addPicture({ needs: ["job"], element: facts, draw: drawFacts });

  const ranks = document.getElementById("ranks");
  function drawRanks() {
    const rows = K.state.ranks || [];
    if (!rows.length) { ranks.replaceChildren(el("p", { class: "none" }, "Nothing is known of the ranks yet.")); return; }
    const head = ["Rank", "Node", "Step", "Phase", "Iteration", "Own time", "Idle"];
    ranks.replaceChildren(el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Ranks" }, el("table", null,
      el("thead", null, el("tr", null, head.map((text) => el("th", { scope: "col" }, text)))),
      el("tbody", null, rows.map((row) => el("tr", null, el("th", { scope: "row" }, row.rank), el("td", null, line(row.node)),
        el("td", null, row.step < 0 ? "–" : row.step), el("td", null, row.alive ? line(row.phase) : "process ended"),
        el("td", null, row.iteration_s ? K.seconds(row.iteration_s) : "–"), el("td", null, row.self_s ? K.seconds(row.self_s) : "–"),
        el("td", null, row.idle_s ? K.seconds(row.idle_s) : "–")))))));
  }
  K.addPicture({ needs: ["ranks"], element: ranks, draw: drawRanks });
})();
