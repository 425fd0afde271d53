
/* Charts as SVG, drawn at the width of their box so that text keeps its size. */

/** A mark that says something when it is pointed at, focused or touched. */
function marked(tip, ...shapes) {
  return make("g", { "data-tip": tip, "aria-label": tip.replaceAll("\n", ", "), role: "img", tabindex: "-1" }, ...shapes);
}

function svg(width, height, label, ...children) {
  const chart = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label }, ...children);
  rove(chart);
  return chart;
}

/** One stop for the tab key; arrow keys then go from mark to mark. */
function rove(box) {
  const marks = [...box.querySelectorAll("[data-tip]")];
  marks.forEach((mark, place) => mark.setAttribute("tabindex", place ? "-1" : "0"));
  if (marks.length) box.addEventListener("keydown", (event) => step(event, marks));
}

function step(event, marks) {
  const here = marks.indexOf(document.activeElement);
  const moves = { ArrowRight: here + 1, ArrowDown: here + 1, ArrowLeft: here - 1, ArrowUp: here - 1, Home: 0, End: marks.length - 1 };
  const next = marks[moves[event.key]];
  if (here < 0 || !next) return;
  event.preventDefault();
  marks[here].setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}

const series = (place) => `var(--series-${place === 0 ? 0 : ((place - 1) % 7) + 1})`;

/** The shape that stands for a method beside its colour. */
function shape(place, x, y, size = 5) {
  const fill = { class: "shape", style: null, fill: series(place) };
  const corner = (points) => make("path", { ...fill, d: `M${points.map(([dx, dy]) => `${x + dx * size},${y + dy * size}`).join("L")}Z` });
  const shapes = [
    () => make("rect", { ...fill, x: x - size, y: y - size, width: 2 * size, height: 2 * size }),
    () => make("circle", { ...fill, cx: x, cy: y, r: size }),
    () => corner([[0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]]),
    () => corner([[0, -1.2], [1.2, 0.95], [-1.2, 0.95]]),
    () => corner([[0, 1.2], [1.2, -0.95], [-1.2, -0.95]]),
    () => corner([[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4], [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]]),
  ];
  return shapes[place % shapes.length]();
}

function methodMark(place) {
  return make("svg", { class: "mark", viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" }, shape(place, 6, 6, 4.4));
}

/** Round steps that cut [low, high] into about `num` parts. */
function ticks(low, high, num = 5) {
  const raw = (high - low) / num || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((base) => base * power).find((each) => each >= raw);
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-9; value += size) found.push(Number(value.toPrecision(10)));
  return found;
}

const labelWidth = (names) => 26 + 7.6 * Math.max(...names.map((name) => name.length), 2);

/** Speed-ups as points with their intervals; the dashed line is the reference. */
function intervalChart(lines, width, reference) {
  const known = lines.filter((line) => line.found);
  if (!known.length) return make("p", { class: "remark" }, "No pair of turns to compare here.");
  const ends = known.flatMap(({ found }) => [found.low ?? found.value, found.high ?? found.value, 1]);
  const left = labelWidth(lines.map((line) => line.name));
  const right = width < 520 ? 48 : 150;
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const room = Math.max(0.05, (high - low) * 0.12);
  const [from, to] = [Math.max(0, low - room), high + room];
  const x = (value) => left + ((value - from) / (to - from)) * (width - left - right);
  const [row, top] = [36, 8];
  const bottom = top + row * lines.length;
  const parts = ticks(from, to, width < 520 ? 3 : 6).map((value) => [
    make("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: bottom }),
    make("text", { class: "muted small middle", x: x(value), y: bottom + 18 }, times(value).replace(/0×$/, "×").replace(/\.0×$/, "×")),
  ]).flat();
  parts.push(make("line", { class: "unit", x1: x(1), x2: x(1), y1: top - 6, y2: bottom }));
  lines.forEach((line, index) => {
    const y = top + row * (index + 0.5);
    parts.push(shape(line.place, 8, y, 5), make("text", { x: 22, y: y + 4.5 }, line.name));
    if (!line.found) {
      parts.push(make("text", { class: "muted", x: left + 6, y: y + 4.5 }, "n/a"));
      return;
    }
    const { value, low: least, high: most, n } = line.found;
    const span = least === null ? "no interval from one question" : `95 % interval ${number(least)} to ${number(most)}`;
    const shapes = [make("rect", { x: left, y: y - row / 2, width: width - left, height: row, fill: "transparent" })];
    if (least !== null) {
      const ink = { stroke: series(line.place), "stroke-width": 2.5 };
      shapes.push(make("line", { ...ink, x1: x(least), x2: x(most), y1: y, y2: y }));
      for (const end of [least, most]) shapes.push(make("line", { ...ink, x1: x(end), x2: x(end), y1: y - 5, y2: y + 5 }));
    }
    shapes.push(shape(line.place, x(value), y, 6));
    shapes.push(make("text", { class: "strong end", x: width < 520 ? width : width - 94, y: y + 4.5 }, times(value)));
    if (width >= 520 && least !== null) shapes.push(make("text", { class: "muted end", x: width, y: y + 4.5 }, `${number(least)} – ${number(most)}`));
    parts.push(marked(`${line.name}: ${times(value)} against ${reference}\n${span}, n = ${n}`, shapes));
  });
  return svg(width, bottom + 26, "Speed-up by method with 95 % intervals", ...parts);
}

const LEVELS = ["ceiling", "oracle", "draft", "verify", "search", "measured"];
const LOSSES = {
  oracle: ["rejection", "rejection", "not every token can be drafted, and a draft step costs more than its bytes"],
  draft: ["wasted drafts", "wasted_drafts", "tokens were drafted that the target did not keep"],
  verify: ["wide verification", "wide_verification", "a pass over several tokens costs more than one over a single token"],
  search: ["search", "search", "finding the layers to skip"],
  measured: ["host", "host", "sampling, cache, Python, synchronisation"],
};

/** The steps of the waterfall: whole bars for the first level and the last, and what is lost between two levels. */
function waterfall(ladder) {
  const levels = LEVELS.filter((name) => ladder[name] !== null);
  const first = levels[0];
  const bars = [{ name: first === "ceiling" ? "ceiling (bytes)" : first, whole: true, from: 0, to: ladder[first], tip: `${first}: ${times(ladder[first])}` }];
  for (const [place, name] of levels.slice(1).entries()) {
    const before = ladder[levels[place]];
    const [label, key, why] = LOSSES[name];
    const factor = ladder.steps[key];
    bars.push({
      name: label,
      from: before,
      to: ladder[name],
      factor,
      tip: `${label}: ${times(before)} → ${times(ladder[name])} (factor ${number(factor, 3)})\n${ladder[name] > before ? "a gain here, where a loss is usual: noise, or a cheaper step" : why}`,
    });
  }
  bars.push({ name: "measured", whole: true, from: 0, to: ladder.measured, tip: `measured: ${times(ladder.measured)}, ${percent(ladder.efficiency)} of the oracle's` });
  return bars;
}

function ladderChart(ladder, width, place, most) {
  const bars = waterfall(ladder);
  const [left, right, row] = [124, 58, 27];
  const x = (value) => left + (value / most) * (width - left - right);
  const height = row * bars.length;
  const parts = [make("line", { class: "unit", x1: x(1), x2: x(1), y1: 0, y2: height + 2 }), make("text", { class: "muted small middle", x: x(1), y: height + 16 }, "1×")];
  bars.forEach((bar, index) => {
    const y = row * index + 4;
    const [low, high] = [Math.min(bar.from, bar.to), Math.max(bar.from, bar.to)];
    const fill = bar.whole ? series(place) : bar.to > bar.from ? "var(--gain)" : "var(--loss)";
    const change = number(high - low);
    const label = bar.whole ? times(bar.to) : `${change === "0.00" ? "" : bar.to > bar.from ? "+" : "−"}${change}`;
    const shapes = [
      make("rect", { x: 0, y: row * index, width, height: row, fill: "transparent" }),
      make("text", { class: bar.whole ? "strong end" : "end", x: left - 10, y: y + 14 }, bar.name),
      make("rect", { class: "shape", x: x(low), y, width: Math.max(1.5, x(high) - x(low)), height: row - 8, rx: 2, fill }),
      make("text", { class: bar.whole ? "strong halo" : "muted halo", x: x(high) + 7, y: y + 14 }, label),
    ];
    if (index < bars.length - 1) parts.push(make("line", { class: "grid", x1: x(bar.to), x2: x(bar.to), y1: y + row - 8, y2: y + row }));
    parts.push(marked(bar.tip, shapes));
  });
  return svg(width, height + 20, "Loss ladder", ...parts);
}

const PARTS = [
  ["draft", "draft", "var(--on-draft)"],
  ["verify", "verify", "var(--on-part)"],
  ["select", "select (search for layers)", "var(--on-part)"],
  ["host", "host (sampling, cache, Python)", "var(--on-host)"],
];

/** One stacked bar for each method. */
function shareChart(lines, width) {
  const left = labelWidth(lines.map((line) => line.name));
  const row = 38;
  const parts = lines.flatMap((line, index) => {
    const y = row * index;
    const drawn = [shape(line.place, 8, y + 15, 5), make("text", { x: 22, y: y + 19.5 }, line.name)];
    if (line.shares.draft === null) return [...drawn, make("text", { class: "muted", x: left + 6, y: y + 19.5 }, "no trace")];
    let from = left;
    for (const [key, label, ink] of PARTS) {
      const share = Math.max(0, line.shares[key]);
      const wide = share * (width - left);
      if (wide < 0.5) continue;
      const shapes = [make("rect", { class: "shape", x: from + 0.5, y, width: Math.max(0.5, wide - 1), height: 30, rx: 2, fill: `var(--${key})` })];
      if (wide > 96) shapes.push(make("text", { x: from + 9, y: y + 19.5, style: null, class: "part" }, `${key} ${percent(share)}`));
      else if (wide > 40) shapes.push(make("text", { x: from + 6, y: y + 19.5, class: "part small" }, percent(share)));
      for (const text of shapes.slice(1)) text.style.fill = ink;
      drawn.push(marked(`${line.name}, ${label}: ${percent(share, 1)} of decode time`, shapes));
      from += wide;
    }
    return drawn;
  });
  return svg(width, row * lines.length, "Shares of decode time by method", ...parts);
}

/** Rates by position, a line for each method. */
function positionChart(lines, width) {
  const longest = Math.max(...lines.map((line) => line.positions.length));
  const [left, right, top, height] = [46, 14, 10, 220];
  const x = (place) => left + (longest === 1 ? 0.5 : place / (longest - 1)) * (width - left - right);
  const y = (rate) => top + (1 - rate) * height;
  const parts = [0, 0.25, 0.5, 0.75, 1].flatMap((rate) => [
    make("line", { class: "grid", x1: left, x2: width - right, y1: y(rate), y2: y(rate) }),
    make("text", { class: "muted small end", x: left - 8, y: y(rate) + 4 }, percent(rate)),
  ]);
  const every = Math.ceil(longest / ((width - left) / 34));
  for (let place = 0; place < longest; place += every) {
    parts.push(make("text", { class: "muted small middle", x: x(place), y: top + height + 19 }, place + 1));
  }
  parts.push(make("text", { class: "muted small end", x: width - right, y: top + height + 37 }, "position in the draft"));
  for (const line of lines) {
    const known = line.positions.map((each, place) => ({ ...each, place })).filter((each) => each.conditional_rate !== null);
    parts.push(make("polyline", { points: known.map((each) => `${x(each.place)},${y(each.conditional_rate)}`).join(" "), fill: "none", stroke: series(line.place), "stroke-width": 2, "stroke-dasharray": ["", "6 3", "2 3", "8 3 2 3"][Math.max(0, line.place - 1) % 4] || null }));
    for (const each of known) {
      const tip = `${line.name}, position ${each.place + 1}: ${percent(each.conditional_rate, 1)}\n${each.accepted} kept of ${each.reached} reached; ${each.drafted} drafted`;
      parts.push(marked(tip, make("circle", { cx: x(each.place), cy: y(each.conditional_rate), r: 11, fill: "transparent" }), shape(line.place, x(each.place), y(each.conditional_rate), 4.5)));
    }
  }
  return svg(width, top + height + 44, "Acceptance by position in the draft", ...parts);
}

/** Two strips of bars, attention above MLP: a bar's height is the share of draft steps that skip the sub-layer. */
function skipChart(map, width, place) {
  const num = map.attn.length;
  const [left, height, gap] = [76, 38, 12];
  const cell = (width - left) / num;
  const parts = [];
  ["attn", "mlp"].forEach((kind, index) => {
    const base = height + index * (height + gap);
    parts.push(make("text", { class: "muted small", x: 0, y: base - height / 2 + 4 }, kind === "attn" ? "attention" : "MLP"));
    map[kind].forEach((share, layer) => {
      const tip = `layer ${layer}, ${kind === "attn" ? "attention" : "MLP"}: skipped in ${percent(share, 1)} of draft steps`;
      const box = { x: left + cell * layer, width: Math.max(1, cell - (cell > 4 ? 1.5 : 0.5)) };
      parts.push(marked(tip, make("rect", { ...box, y: base - height, height, fill: "var(--faint)", class: "shape" }), make("rect", { ...box, y: base - height * share, height: height * share, fill: series(place) })));
    });
  });
  const every = [1, 2, 5, 10, 20].find((size) => size * cell >= 26) || 50;
  for (let layer = 0; layer < num; layer += every) {
    parts.push(make("text", { class: "muted small middle", x: left + cell * (layer + 0.5), y: 2 * height + gap + 16 }, layer));
  }
  return svg(width, 2 * height + gap + 20, "Skipped sub-layers", ...parts);
}
