
/* The page: one record of figures, drawn for the task in view; questions are read and drawn when they are opened. */

const readData = (id) => JSON.parse(document.getElementById(id).textContent);
const page = readData("page-data");
const { summary } = page;
const view = { scope: "overall", shown: 25, sought: "", form: "rounds" };
const scopes = ["overall", ...summary.tasks];
const compared = summary.methods.filter((name) => summary.reference !== null && name !== summary.reference);
const placeOf = (name) => (summary.reference === null ? summary.methods.indexOf(name) + 1 : summary.methods.indexOf(name));
const $ = (id) => document.getElementById(id);
const fill = (box, ...children) => box.replaceChildren(...children.flat().filter((child) => child !== null));
const cellOf = (name) => summary.cells[name][view.scope];

const COLUMNS = [
  ["method", "method", "text"],
  ["speed-up", "speedup", "paired_total: the reference's time over the method's, prefill inside, over turns with the same answer (sampling: time per token)"],
  ["95 % interval", "interval", "paired bootstrap over questions"],
  ["n", "n", "questions"],
  ["grade", "grade", "worst grade of a turn and how many turns got it; exact: the reference's ids; tie: rounding explains the first difference; sampled: ids are not compared"],
  ["turns", "turns", "turns in the figures: those that every compared method finished"],
  ["failed", "failed", "turns without an answer; they are in no figure"],
  ["tokens", "tokens", "emitted tokens"],
  ["emitted\n/ round", "emitted", "committed tokens per target pass, the target's own token included (MAT)"],
  ["accepted\n/ round", "accepted", "kept draft tokens per target pass, the target's own token not counted"],
  ["acceptance", "acceptance", "kept over drafted tokens; n/a where nothing was drafted"],
  ["first\ntoken", "ttft", "mean time up to and including the first token"],
  ["decode\ntok/s", "decode", "tokens per second after the first"],
  ["all\ntok/s", "speed", "tokens per second, prefill inside"],
];
const ESTIMATORS = [
  ["paired_total", "total time, prefill inside, over pairs with equal ids: the headline"],
  ["paired_decode", "the same over decode time"],
  ["spec_bench", "mean of the questions' tokens/s over the same mean of the reference"],
  ["paper_overall", "unweighted mean of the tasks' spec_bench; for all tasks together only"],
  ["geometric", "geometric mean of the questions' ratios"],
  ["mean_of_ratios", "arithmetic mean of the questions' ratios; flatters"],
];
const LADDER = [
  ["ceiling", "1 / c_bytes"],
  ["oracle", "T / (R + A c), as if every drafted token were kept"],
  ["draft", "T / (R + D c), wasted drafts paid"],
  ["verify", "T / (R v + D c), the wider pass paid"],
  ["search", "T / (R v + D c + P p), the search paid; the prediction"],
  ["measured", "paired_decode"],
  ["efficiency", "measured / oracle"],
  ["c", "one draft step by the clock, in reference tokens"],
  ["c_bytes", "one draft step by the bytes it reads"],
  ["v", "one verification pass, in reference tokens"],
  ["p", "one search for a skip set, in reference tokens"],
];

/* ---- small parts */

function methodCell(name) {
  const note = name === summary.reference ? make("span", { class: "note" }, " reference") : null;
  return make("th", { scope: "row", class: "text" }, methodMark(placeOf(name)), name, note);
}

function figure(text, name, key, kind) {
  return make("td", { class: [kind, text === "n/a" || text === "–" ? "none" : ""].join(" ").trim() || null, "data-method": name, "data-figure": key }, text);
}

/** A head cell; a line break in its label is where it may break. */
function head(label, kind) {
  return make("th", { scope: "col", class: kind || null }, label.split("\n").flatMap((part, place) => (place ? [make("br"), part] : [part])));
}

function meanings(box, pairs) {
  fill(box, pairs.flatMap(([label, meaning]) => [make("dt", null, label.replace("\n", " ")), make("dd", null, meaning)]));
}

const intervalText = (found) => (!found ? "n/a" : found.low === null ? "–" : `${number(found.low)} – ${number(found.high)}`);
const seconds = (value) => (value === null ? "n/a" : value < 1 ? `${(1000 * value).toFixed(1)} ms` : `${value.toFixed(2)} s`);
const widthOf = (box) => Math.max(240, Math.floor(box.clientWidth));

/* ---- head, notes, provenance: the same for every task */

function drawHead() {
  const { run } = page;
  const machine = [run.machine.cpu, run.machine.num_cores && `${run.machine.num_cores} cores`].filter(Boolean).join(", ");
  const gpus = run.accelerators ? JSON.stringify(run.accelerators) : "no GPU";
  const fact = (label, value) => make("li", null, `${label} `, make("b", null, value));
  const versus = summary.reference === null ? summary.methods.join(", ") : `${compared.join(", ") || "nothing"} against ${summary.reference}`;
  fill($("head"), make("h1", null, versus), make("p", { class: "model" }, run.model), make("ul", { class: "facts" },
    fact("status", run.status), fact("run", run.id), fact("started", run.start), fact("machine", `${machine || "unknown"}; ${gpus}`),
    fact("dtype", run.dtype || "unknown"), fact("commit", `${(run.revision || "unknown").slice(0, 7)}${run.dirty ? ", changed files" : ""}`)));
}

function drawNotes() {
  const { run } = page;
  const found = [...run.notes, ...summary.notes.map((note) => note.text)];
  if (run.status !== "ok") found.unshift(`the run's status is ${run.status}`);
  $("notes").hidden = !found.length;
  fill($("notes").querySelector("ul"), found.map((text) => make("li", null, text)));
}

function drawProvenance() {
  fill($("provenance-groups"), page.provenance.map(({ name, pairs }, place) =>
    make("details", { class: "group", open: place === 0 }, make("summary", null, name),
      make("dl", null, pairs.flatMap(([label, value]) => [make("dt", null, label), make("dd", null, value)])))));
}

/* ---- figures of the task in view */

function drawSwitch() {
  const choices = scopes.map((scope) => {
    const radio = make("input", { type: "radio", name: "task", value: scope, checked: scope === view.scope });
    return make("label", { class: "choice" }, radio, make("span", null, scope));
  });
  fill($("switch"), make("fieldset", null, make("legend", null, "Task"), make("div", { class: "choices" }, choices)));
  $("switch").addEventListener("change", (event) => {
    view.scope = event.target.value;
    view.shown = 25;
    drawScope();
  });
  $("switch").addEventListener("submit", (event) => event.preventDefault());
}

function drawScope() {
  for (const place of document.querySelectorAll("h2 .scope")) place.textContent = view.scope;
  drawSummary();
  drawEstimators();
  drawLadderTable();
  drawPositionTable();
  drawFailures();
  drawQuestions();
  drawCharts();
}

/** What depends on the width as well. */
function drawCharts() {
  const lines = summary.methods.map((name) => ({ name, place: placeOf(name) }));
  $("speedup-chart").hidden = !compared.length;
  if (compared.length) {
    const found = lines.filter(({ name }) => compared.includes(name)).map((line) => ({ ...line, found: cellOf(line.name).speedup[summary.headline] }));
    fill($("speedup-chart"), intervalChart(found, widthOf($("speedup-chart")), summary.reference));
  }
  drawLadders();
  fill($("latency-chart"), shareChart(lines.map((line) => ({ ...line, shares: cellOf(line.name).shares })), widthOf($("latency-chart"))));
  drawPositions(lines);
  drawSkips(lines);
}

function drawSummary() {
  const rows = summary.methods.map((name) => {
    const cell = cellOf(name);
    const isReference = name === summary.reference;
    const found = cell.speedup[summary.headline];
    const grade = cell.grade;
    const graded = grade && Object.values(grade.counts).reduce((sum, each) => sum + each, 0);
    const failed = cell.num_failed + cell.num_missing;
    const gradeCell = figure(grade ? "" : "–", name, "grade", "text");
    if (grade) gradeCell.append(make("span", { class: `grade ${grade.worst}` }, `${grade.worst} ${grade.counts[grade.worst] ?? 0}/${graded}`));
    const failedCell = figure("", name, "failed");
    failedCell.append(failed ? make("span", { class: "grade bad" }, failed) : "0");
    const speedCell = figure("", name, "speedup");
    speedCell.append(isReference ? make("span", { class: "interval" }, "1×") : make("b", null, times(found ? found.value : null)));
    return make("tr", null, methodCell(name), speedCell,
      figure(isReference ? "–" : intervalText(found), name, "interval"),
      figure(cell.num_questions, name, "n"), gradeCell, figure(cell.num_turns, name, "turns"), failedCell, figure(cell.num_tokens.toLocaleString("en"), name, "tokens"),
      figure(number(cell.mean_emitted_per_round.rounds), name, "emitted"), figure(number(cell.mean_accepted_per_round.rounds), name, "accepted"),
      figure(number(cell.acceptance_rate.rounds, 3), name, "acceptance"), figure(seconds(cell.time_to_first_token_s), name, "ttft"),
      figure(number(cell.decode_tokens_per_s, 1), name, "decode"), figure(number(cell.end_to_end_tokens_per_s, 1), name, "speed"));
  });
  const headings = COLUMNS.map(([label, key]) => head(label, key === "method" || key === "grade" ? "text" : null));
  fill($("summary-table"), make("thead", null, make("tr", null, headings)), make("tbody", null, rows));
  $("headline-meaning").textContent = summary.reference === null
    ? "This run had no reference, so it has no speed-ups."
    : `Time of ${summary.reference} over time of the method, prefill inside, both run right after one another on the same prompts; with its 95 % interval over questions.`;
}

function drawEstimators() {
  $("estimators").hidden = !compared.length;
  const labels = ESTIMATORS.filter(([label]) => label !== "paper_overall" || view.scope === "overall");
  const rows = compared.map((name) => {
    const cell = cellOf(name);
    const found = labels.map(([label]) => {
      const estimate = cell.speedup[label];
      const box = figure(times(estimate ? estimate.value : null), name, label);
      if (estimate && estimate.low !== null) box.append(" ", make("span", { class: "interval" }, `[${number(estimate.low)}, ${number(estimate.high)}]`));
      return box;
    });
    return make("tr", null, methodCell(name), found, figure(times(cell.typical), name, "typical"), figure(percent(cell.slow_share), name, "slow"));
  });
  const more = [["typical", "decode speed-up if every round had cost the median of its kind"], ["slow turns", "pairs whose reference took over twice its median time per token"]];
  fill($("estimator-table"), make("thead", null, make("tr", null, head("method", "text"), [...labels, ...more].map(([label]) => head(label)))), make("tbody", null, rows));
  meanings($("estimator-meanings"), [...labels, ...more]);
}

function drawLadders() {
  const found = compared.map((name) => [name, (summary.ladders[name] || {})[view.scope]]);
  $("ladder").hidden = !compared.length;
  const most = Math.max(...found.filter(([, ladder]) => ladder).flatMap(([, ladder]) => LEVELS.map((level) => ladder[level] ?? 0)), 1);
  const panels = found.map(([name]) => make("div", { class: "panel" }, make("h3", null, methodMark(placeOf(name)), name)));
  fill($("ladder-charts"), panels);
  found.forEach(([name, ladder], place) => {
    if (!ladder) panels[place].append(make("p", null, "No ladder: rows without a trace, or nothing to compare."));
    else {
      panels[place].append(make("p", null, `${times(ladder.measured)} measured, ${percent(ladder.efficiency)} of the oracle's ${times(ladder.oracle)}`));
      panels[place].append(ladderChart(ladder, Math.min(widthOf(panels[place]), 640), placeOf(name), most));
    }
  });
}

function drawLadderTable() {
  const rows = compared.map((name) => {
    const ladder = (summary.ladders[name] || {})[view.scope] || {};
    const text = (label) => (label === "efficiency" ? percent(ladder[label]) : number(ladder[label], ["c", "c_bytes", "v", "p"].includes(label) ? 3 : 2));
    return make("tr", null, methodCell(name), LADDER.map(([label]) => figure(text(label), name, `ladder-${label}`)));
  });
  fill($("ladder-table"), make("thead", null, make("tr", null, head("method", "text"), LADDER.map(([label]) => head(label)))), make("tbody", null, rows));
  meanings($("ladder-meanings"), LADDER);
}

function drawPositions(lines) {
  const all = lines.map((line) => ({ ...line, positions: page.positions[line.name][view.scope] }));
  const drawn = all.filter((line) => line.positions && line.positions.length);
  const trees = all.filter((line) => line.positions === null).map((line) => line.name);
  $("acceptance").hidden = !drawn.length && !trees.length;
  fill($("acceptance-legend"), drawn.map((line) => make("li", null, methodMark(line.place), line.name)));
  fill($("acceptance-chart"), drawn.length ? positionChart(drawn, widthOf($("acceptance-chart"))) : null);
  $("acceptance-remark").textContent = trees.length ? `Not shown: ${trees.join(", ")}, whose drafts are trees (a token there has no single position) or whose rows have no trace.` : "";
}

function drawPositionTable() {
  const rows = summary.methods.flatMap((name) => (page.positions[name][view.scope] || []).map((each, place) =>
    make("tr", null, methodCell(name), ...[place + 1, each.drafted, each.reached, each.accepted, percent(each.conditional_rate, 1), percent(each.rate, 1)].map((value) => make("td", null, value)))));
  const labels = ["position", "drafted", "reached", "kept", "kept of reached", "kept of drafted"];
  fill($("acceptance-table"), make("thead", null, make("tr", null, head("method", "text"), labels.map((label) => head(label)))), make("tbody", null, rows));
}

function drawSkips(lines) {
  const found = lines.map((line) => ({ ...line, map: page.skips[line.name][view.scope] })).filter((line) => line.map);
  $("skips").hidden = !found.length;
  const sum = (shares) => shares.reduce((total, share) => total + share, 0);
  const panels = found.map(({ name, place, map }) => {
    const of = `of ${map.attn.length}`;
    const words = `${count(map.num_sets, "set")}; a draft step skips ${number(sum(map.attn), 1)} ${of} attention and ${number(sum(map.mlp), 1)} ${of} MLP sub-layers on average`;
    return make("div", { class: "panel" }, make("h3", null, methodMark(place), name), make("p", null, words));
  });
  fill($("skip-charts"), panels);
  found.forEach(({ place, map }, index) => panels[index].append(skipChart(map, widthOf(panels[index]), place)));
}

function drawFailures() {
  const found = page.failures.filter((failure) => view.scope === "overall" || failure.task === view.scope);
  $("failures").hidden = !page.failures.length;
  const rows = found.map((failure) => make("tr", null, methodCell(failure.method), make("td", { class: "text" }, failure.task), make("td", null, failure.question_id),
    make("td", null, failure.turn + 1), make("td", { class: "text wrap" }, failure.error)));
  const none = make("tr", null, make("td", { class: "text none", colspan: 5 }, "None in this task."));
  fill($("failure-table"), make("thead", null, make("tr", null, head("method", "text"), head("task", "text"), head("question"), head("turn"), head("error", "text"))), make("tbody", null, rows.length ? rows : none));
}

/* ---- what is said of a mark that is pointed at */

const pointed = { mark: null, x: null };

function point(event) {
  pointed.mark = (event.target.closest && event.target.closest("[data-tip]")) || null;
  pointed.x = event.type === "pointerover" ? event.clientX : null;
  placeTip();
}

function placeTip() {
  const { mark } = pointed;
  const tip = $("tip");
  tip.hidden = !mark || !mark.isConnected;
  if (tip.hidden) return;
  tip.textContent = mark.dataset.tip;
  const boxes = mark.getClientRects();
  const box = boxes.length ? boxes[0] : mark.getBoundingClientRect();
  const x = pointed.x ?? box.left + Math.min(box.width, 200) / 2;
  const above = box.top - tip.offsetHeight - 8;
  tip.style.left = `${Math.max(8, Math.min(x - tip.offsetWidth / 2, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${above > 60 ? above : box.bottom + 8}px`;
}

function hideTip() {
  pointed.mark = null;
  placeTip();
}

function watch() {
  document.addEventListener("pointerover", point);
  document.addEventListener("focusin", point);
  document.addEventListener("focusout", hideTip);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  document.addEventListener("scroll", placeTip, { passive: true, capture: true });
  let width = document.documentElement.clientWidth;
  new ResizeObserver(() => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    drawCharts();
  }).observe(document.documentElement);
}

drawHead();
drawNotes();
drawSwitch();
drawProvenance();
meanings($("column-meanings"), COLUMNS.slice(1).map(([label, , meaning]) => [label, meaning]));
fill($("latency-legend"), PARTS.map(([key, label]) => {
  const swatch = make("span", { class: "swatch" });
  swatch.style.background = `var(--${key})`;
  return make("li", null, swatch, label);
}));
drawTools();
drawScope();
watch();
