"use strict";

/* From ids to text. Nothing that comes from a run is ever read as markup: it reaches the page as text nodes only. */

/** An element with attributes and children; a child that is not a node becomes text. */
function make(tag, attributes, ...children) {
  const svg = ["svg", "g", "rect", "line", "path", "text", "circle", "polyline", "tspan"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

const number = (value, digits = 2) => (value === null || value === undefined ? "n/a" : value.toFixed(digits));
const times = (value) => (value === null || value === undefined ? "n/a" : `${value.toFixed(2)}×`);
const percent = (value, digits = 0) => (value === null || value === undefined ? "n/a" : `${(100 * value).toFixed(digits)} %`);
const count = (value, one, many) => `${value} ${value === 1 ? one : many || `${one}s`}`;

/** How many bytes at the end of `bytes` begin a character that is not complete yet. */
function unfinished(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back += 1) {
    const byte = bytes[bytes.length - back];
    if (byte >= 0xc0) {
      const length = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
      return length > back ? back : 0;
    }
    if (byte < 0x80) return 0;
  }
  return 0;
}

/** The text of each piece. Bytes of a split character wait for its last piece, which then shows it. */
function decoded(pieces, pending = []) {
  const encoder = new TextEncoder();
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  let waiting = pending;
  const parts = pieces.map((piece) => {
    if (typeof piece === "string" && !waiting.length) return piece;
    const bytes = [...waiting, ...(typeof piece === "string" ? encoder.encode(piece) : piece)];
    const keep = unfinished(bytes);
    waiting = keep ? bytes.slice(-keep) : [];
    return decoder.decode(new Uint8Array(keep ? bytes.slice(0, -keep) : bytes));
  });
  return { parts, waiting };
}

/** A token as it is shown among others: control and direction characters by their number, line ends marked. */
function visible(text, breaks) {
  const control = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
  const shown = text.replace(control, (letter) => `⟨U+${letter.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
  return shown.replace(/\n/g, breaks ? "↵\n" : "↵");
}

/** The value of round `index` in a list that is stored as one value where all are the same. */
const at = (packed, index) => (Array.isArray(packed) ? packed[index] : packed);

/** The rounds of an answer: kept, own and dropped tokens, as ids; `dropped` is null where only their number is known. */
function roundsOf(answer) {
  const trace = answer.rounds;
  const rounds = [];
  let start = 1;
  for (let index = 0; index < trace.num; index += 1) {
    const [drafted, accepted, emitted] = [trace.drafted, trace.accepted, trace.emitted].map((list) => at(list, index));
    const ids = answer.ids.slice(start, start + emitted);
    const path = trace.path && trace.path[index];
    const isKept = (place) => (path ? path.includes(place) : place < accepted);
    rounds.push({
      index,
      drafted,
      accepted,
      emitted,
      kept: ids.slice(0, accepted),
      own: ids.slice(accepted),
      dropped: trace.ids ? trace.ids[index].filter((_, place) => !isKept(place)) : null,
      isTree: Boolean(path),
      wasCut: emitted === accepted,
    });
    start += emitted;
  }
  return rounds;
}

/** What one round says when it is pointed at. */
function roundInWords(round, trace) {
  const ms = (list) => `${(at(list, round.index) / 1000).toFixed(2)} ms`;
  const own = round.drafted === 0 ? "the target's token" : round.wasCut ? "cut at the end of the answer" :
    round.accepted === round.drafted ? "and a bonus token" : "and a correction";
  const searches = at(trace.searches, round.index);
  const lines = [
    `Round ${round.index + 1} of ${trace.num}`,
    round.drafted ? `${round.drafted} drafted, ${round.accepted} accepted, ${own}` : `nothing drafted: ${own}`,
    `draft ${ms(trace.draft_us)}, verify ${ms(trace.verify_us)}, select ${ms(trace.select_us)}`,
  ];
  if (searches) lines.push(count(searches, "search", "searches"));
  const skipped = trace.skip_sets[at(trace.skip, round.index)];
  if (skipped) lines.push(skipped);
  return lines.join("\n");
}

/** An answer as rounds of coloured tokens. */
function tokens(answer, pieces) {
  const box = make("div", { class: "answer" });
  const known = Object.keys(pieces).length > 0;
  const piece = (id) => (pieces[id] === undefined ? ` #${id}` : pieces[id]);
  let waiting = [];
  const span = (text, id, kind) => {
    const shown = text === "" ? "·" : visible(text, kind !== "rejected" && kind !== "cut");
    return make("span", { class: `token ${kind}${known ? "" : " id"}` }, known ? shown : `#${id}`);
  };
  const committed = (ids, kind) => {
    const found = decoded(ids.map(piece), waiting);
    waiting = found.waiting;
    return found.parts.map((text, place) => span(text, ids[place], kind));
  };
  const dropped = (round) => {
    if (!round.dropped) {
      const missing = round.drafted - round.accepted;
      const kind = round.wasCut ? "cut" : "rejected";
      return missing ? [make("span", { class: `count ${kind}` }, `${missing} ${kind === "cut" ? "cut off" : "rejected"}`)] : [];
    }
    const pieceTexts = round.dropped.map(piece);
    const parts = round.isTree ? pieceTexts.map((one) => decoded([one]).parts[0]) : decoded(pieceTexts, waiting).parts;
    return parts.map((text, place) => span(text, round.dropped[place], round.wasCut ? "cut" : "rejected"));
  };
  if (!answer.rounds) {
    box.append(...committed(answer.ids, "plain"));
    return box;
  }
  const tip = `First token, from the prefill\n${(1000 * answer.prefill_s).toFixed(1)} ms for ${answer.num_prompt_tokens} prompt tokens`;
  box.append(make("span", { class: "round", role: "group", "data-tip": tip, "aria-label": tip }, committed(answer.ids.slice(0, 1), "own")));
  for (const round of roundsOf(answer)) {
    const words = roundInWords(round, answer.rounds);
    const group = make("span", { class: round.drafted ? "round drafted" : "round", role: "group", "data-tip": words, "aria-label": words });
    group.append(...committed(round.kept, "accepted"), ...dropped(round), ...committed(round.own, round.drafted ? "own" : "plain"));
    box.append(group);
  }
  return box;
}

/** The whole answer as one text. */
function plainText(ids, pieces) {
  const found = decoded(ids.map((id) => (pieces[id] === undefined ? ` #${id}` : pieces[id])));
  return found.parts.join("") + (found.waiting.length ? "\ufffd" : "");
}
