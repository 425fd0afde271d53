
/* Question by question: lines that are drawn as they are asked for, and answers that are read when they are opened. */


function drawTools() {
  const search = make("input", { type: "search", placeholder: "number, task or category", "aria-label": "Find a question" });
  search.addEventListener("input", () => {
    view.sought = search.value.trim().toLowerCase();
    view.shown = 25;
    drawQuestions();
  });
  const forms = [["rounds", "rounds and tokens"], ["plain", "plain text"]].map(([form, label]) => {
    const radio = make("input", { type: "radio", name: "form", value: form, checked: form === view.form });
    radio.addEventListener("change", () => {
      view.form = form;
      for (const opened of document.querySelectorAll("tr.opened .detail")) fill(opened, detail(Number(opened.dataset.question)));
    });
    return make("span", { class: "choice" }, radio, make("span", null, label));
  });
  fill($("question-tools"), search, make("div", { class: "choices", role: "radiogroup", "aria-label": "Answers as" }, forms.map((each) => make("label", null, each))), key());
}

function key() {
  const kinds = [["accepted", "drafted and accepted"], ["own", "the target's own: a correction or a bonus"], ["rejected", "drafted and rejected"], ["cut", "drafted beyond the end"]];
  return make("ul", { class: "legend", "aria-label": "Kinds of tokens" }, kinds.map(([kind, label]) => make("li", null, make("span", { class: `token ${kind}` }, "token"), label)),
    make("li", null, make("span", { class: "round drafted" }), "a round begins; point at it for its counters and times"));
}

function drawQuestions() {
  const matches = page.questions.map((question, place) => ({ question, place })).filter(({ question }) =>
    (view.scope === "overall" || question.task === view.scope) && `${question.id} ${question.task} ${question.category}`.toLowerCase().includes(view.sought));
  const names = compared.length ? compared : summary.methods;
  const groups = names.map((name) => make("th", { scope: "col" }, methodMark(placeOf(name)), name, make("br"), compared.length ? "speed-up" : "tok/s"));
  const headings = make("tr", null, head("question", "text"), head("task", "text"), head("turns"), head("failed"), groups);
  const columns = headings.children.length;
  const rows = matches.slice(0, view.shown).map(({ question, place }) => questionRow(question, place, names, columns));
  const none = make("tr", null, make("td", { class: "text none", colspan: columns }, "No question matches."));
  fill($("question-table"), make("thead", null, headings), make("tbody", null, rows.length ? rows : none));
  const left = matches.length - view.shown;
  const more = make("button", { type: "button" }, `Show ${Math.min(left, 100)} more of ${matches.length}`);
  more.addEventListener("click", () => {
    view.shown += 100;
    drawQuestions();
  });
  fill($("question-more"), left > 0 ? more : null);
}

function questionRow(question, place, names, columns) {
  const opener = make("button", { type: "button", class: "opener", "aria-expanded": "false" }, question.id);
  const failed = make("td", null, question.num_failed ? make("span", { class: "grade bad" }, question.num_failed) : "0");
  const row = make("tr", { "data-question": place }, make("th", { scope: "row", class: "text" }, opener), make("td", { class: "text" }, question.task === question.category ? question.task : `${question.task}, ${question.category}`), make("td", null, question.num_turns), failed,
    names.map((name) => figure(compared.length ? times(question.methods[name].speedup) : number(question.methods[name].tokens_per_s, 1), name, "question-speed")));
  opener.addEventListener("click", () => toggle(opener, row, place, columns));
  return row;
}

function toggle(opener, row, place, columns) {
  const isOpen = opener.getAttribute("aria-expanded") === "true";
  opener.setAttribute("aria-expanded", String(!isOpen));
  if (isOpen) row.nextElementSibling.remove();
  else {
    const box = make("div", { class: "detail", "data-question": place }, detail(place));
    row.after(make("tr", { class: "opened" }, make("td", { colspan: columns }, box)));
  }
}

/** A question's prompt and answers, turn by turn; read from its own block of data. */
function detail(place) {
  const question = readData(`question-${place}`);
  const slots = [...new Set(question.answers.map((answer) => `${answer.turn} ${answer.repeat}`))].map((slot) => slot.split(" ").map(Number));
  const repeats = new Set(slots.map(([, repeat]) => repeat)).size;
  const parts = slots.flatMap(([turn, repeat]) => [
    make("h3", null, `Turn ${turn + 1}${repeats > 1 ? `, repeat ${repeat + 1}` : ""}`),
    question.turns ? make("pre", { class: "prompt", dir: "auto", tabindex: "0" }, question.turns[turn] ?? "") : null,
    question.answers.filter((answer) => answer.turn === turn && answer.repeat === repeat).map(answerBox),
  ]).flat();
  if (!question.turns) parts.unshift(make("p", { class: "none" }, "This run kept no text (store_text), so the question and the answers' words are not known; tokens are shown by their ids."));
  return parts.filter((part) => part !== null);
}

function answerBox(answer) {
  const facts = answer.error !== null ? ["failed"] : [
    `${count(answer.ids.length, "token")}, ended by ${answer.stop_reason}`,
    answer.rounds && `${count(answer.rounds.num, "round")}`,
    answer.emitted_per_round !== null && `${number(answer.emitted_per_round)} emitted / round`,
    answer.tokens_per_s !== null && `${number(answer.tokens_per_s, 1)} tok/s`,
    answer.grade && answer.grade + (answer.grade !== "exact" && answer.first_divergence !== null ? `, parts at token ${answer.first_divergence + 1}` : ""),
  ].filter(Boolean);
  const title = make("h4", null, make("span", null, methodMark(placeOf(answer.method)), answer.method), make("small", null, facts.join(" · ")));
  return make("div", null, title, answerText(answer));
}

function answerText(answer) {
  if (answer.error !== null) return make("div", { class: "answer failed" }, answer.error);
  if (view.form === "plain") return make("div", { class: "answer plain", dir: "auto", tabindex: "0" }, plainText(answer.ids, page.pieces));
  const box = tokens(answer, page.pieces);
  rove(box);
  return box;
}
