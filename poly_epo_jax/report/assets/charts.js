"use strict";
// Draws the figures of charts.py. Hovering, touching, or focusing one and pressing arrow keys tells its numbers.

const report = JSON.parse(document.getElementById("data").textContent);
const WIDTH = 420, HEIGHT = 280;
const INNER = { left: 48, right: WIDTH - 14, top: 26, bottom: HEIGHT - 42 };

function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function draw(parent, tag, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  parent?.append(node);
  return node;
}

const look = (place) => `look${place % 7}`;
const dash = (place) => `dash${Math.floor(place / 7) % 4}`;
const path = (points) => points.map(([x, y], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

function linearTicks(low, high, about) {
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.7);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(n * step);
  return ticks;
}

function powerTicks(high, base, about) {
  const powers = Math.floor(Math.log(high) / Math.log(base) + 1e-9), every = Math.max(1, Math.ceil(powers / about));
  const ticks = [];
  for (let power = 0; power <= powers; power += every) ticks.push(base ** power);
  return ticks;
}

const shownTick = (value) => String(Number(value.toPrecision(6)));

function range(values, padding) {
  const low = Math.min(...values), high = Math.max(...values);
  const room = high > low ? (high - low) * padding : Math.abs(high) * 0.1 || 0.1;
  return [low - room, high + room];
}

// The place of a value between two ends of the panel.
function scale(from, to, [low, high], transform = (value) => value) {
  const start = transform(low), length = transform(high) - start || 1;
  return (value) => from + (to - from) * (transform(value) - start) / length;
}

function xAxis(svg, x, ticks, label, left = INNER.left) {
  draw(svg, "path", { class: "axis", d: `M${Math.min(left, x(ticks[0]))} ${INNER.bottom}H${INNER.right}` });
  for (const tick of ticks) {
    draw(svg, "path", { class: "axis", d: `M${x(tick)} ${INNER.bottom}v4` });
    draw(svg, "text", { x: x(tick), y: INNER.bottom + 17, "text-anchor": "middle" }, shownTick(tick));
  }
  draw(svg, "text", { x: (left + INNER.right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, label);
}

function axes(svg, x, y, xTicks, yTicks, xLabel, yLabel = "") {
  draw(svg, "text", { x: 4, y: 14 }, yLabel);
  for (const tick of yTicks) {
    draw(svg, "path", { class: "grid", d: `M${INNER.left} ${y(tick)}H${INNER.right}` });
    draw(svg, "text", { x: INNER.left - 6, y: y(tick) + 4, "text-anchor": "end" }, shownTick(tick));
  }
  xAxis(svg, x, xTicks, xLabel);
}

// Draws the panel and returns its points in rows, [{x, y, label, text}]: one row per line.
function drawLines(svg, panel) {
  const points = panel.series.flatMap((series) => series.points);
  const faint = panel.series.flatMap((series) => series.faint);
  const log = panel.x.scale === "log2", xs = points.map((point) => point[0]);
  const xRange = log ? [1, Math.max(2, ...xs)] : range(xs, 0.04);
  const heights = points.flatMap((point) => [point[1], point[2] ?? point[1], point[3] ?? point[1]]);
  const yRange = range([...heights, ...faint.map((point) => point[1])], 0.06);
  const x = scale(INNER.left + 8, INNER.right - 8, xRange, log ? Math.log2 : undefined);
  const y = scale(INNER.bottom, INNER.top, yRange);
  const xTicks = log ? powerTicks(xRange[1], 2, 6) : linearTicks(...xRange, 5);
  axes(svg, x, y, xTicks, linearTicks(...yRange, 5), panel.x.label, panel.y.label);
  for (const series of panel.series) {
    const group = draw(svg, "g", { class: look(series.look) });
    const bounded = series.points.filter((point) => point[2] !== null && point[3] !== null);
    const band = [...bounded.map((p) => [x(p[0]), y(p[2])]), ...bounded.map((p) => [x(p[0]), y(p[3])]).reverse()];
    if (bounded.length > 1) draw(group, "path", { class: "band", d: `${path(band)}Z` });
    if (series.faint.length) draw(group, "path", { class: "faint", d: path(series.faint.map((p) => [x(p[0]), y(p[1])])) });
    draw(group, "path", { class: `line ${dash(series.look)}`, d: path(series.points.map((p) => [x(p[0]), y(p[1])])) });
    if (!series.marked && series.points.length > 1) continue;
    const marks = series.points.filter((p, place) => !log || Number.isInteger(Math.log2(p[0])) || place === series.points.length - 1);
    for (const p of marks) draw(group, "circle", { class: "dot", cx: x(p[0]), cy: y(p[1]), r: 4 });
  }
  return panel.series.map((series) =>
    series.points.map((p) => ({ x: x(p[0]), y: y(p[1]), label: series.label, text: p[4] })));
}

function drawTree(svg, panel) {
  const x = scale(INNER.left - 30, INNER.right - 10, [0, panel.longest], (value) => Math.log2(1 + value));
  const y = scale(INNER.top - 14, INNER.bottom - 8, [0, Math.max(1, panel.rows - 1)]);
  axes(svg, x, y, [0, ...powerTicks(panel.longest, 4, 6)], [], "token position");
  const group = draw(svg, "g", {});
  for (const [start, end, row, parentRow, size] of panel.edges) {
    const d = path([[x(start), y(parentRow)], [x(start), y(row)], [x(end), y(row)]]);
    draw(group, "path", { class: "edge", d, "stroke-width": 1 + Math.log2(size) / 2 });
  }
  for (const [length, row, edgeRow, right] of panel.leaves) {
    const [px, py] = [x(length), y(row)];
    draw(group, "path", { class: "edge", d: path([[px, y(edgeRow)], [px, py]]), "stroke-width": 1 });
    if (right) draw(group, "circle", { class: "leaf-right", cx: px, cy: py, r: 4.5 });
    else draw(group, "path", { class: "leaf-wrong", d: `M${px - 3.5} ${py - 3.5}l7 7m0 -7l-7 7` });
  }
  return [panel.leaves.map(([length, row, , , text]) => ({ x: x(length), y: y(row), label: panel.title, text }))];
}

function drawTimeline(svg, panel) {
  const left = 86, height = (INNER.bottom - INNER.top) / panel.lanes.length, bar = Math.min(0.7 * height, 22);
  const x = scale(left, INNER.right, [0, panel.seconds]);
  const y = (lane) => INNER.top + (lane + 0.5) * height;
  panel.lanes.forEach((stage, lane) => {
    draw(svg, "path", { class: "grid", d: `M${left} ${y(lane)}H${INNER.right}` });
    draw(svg, "text", { x: left - 6, y: y(lane) + 4, "text-anchor": "end" }, stage);
  });
  panel.steps.forEach(([step, start], place) => {
    const width = x(panel.steps[place + 1]?.[1] ?? panel.seconds) - x(start);
    if (place) draw(svg, "path", { class: "cut", d: `M${x(start)} ${INNER.top - 8}V${INNER.bottom}` });
    if (panel.steps.length > 1 && width > 30) draw(svg, "text", { x: x(start) + width / 2, y: 14, "text-anchor": "middle" }, step);
  });
  const group = draw(svg, "g", { class: look(panel.look) });
  const rows = panel.lanes.map(() => []);
  for (const [start, end, lane, odd, alone, text] of panel.bars) {
    const place = { y: y(lane) - bar / 2, height: bar };
    const across = (from, to) => ({ x: x(from), width: Math.max(0.75, x(to) - x(from)), ...place });
    draw(group, "rect", { class: `bar ${odd ? "odd" : ""}`, ...across(start, end) });
    for (const part of alone) draw(group, "rect", { class: `bar alone ${odd ? "odd" : ""}`, ...across(...part) });
    rows[lane].push({ x: x((start + end) / 2), left: x(start), right: x(end), y: y(lane), label: panel.lanes[lane], text });
  }
  xAxis(svg, x, linearTicks(0, panel.seconds, 5), "seconds", left);
  return rows;
}

// Tells the nearest point's numbers; arrow keys go along a line (left, right) and to the next line (up, down).
function inspect(figure, svg, rows) {
  const tip = make("div", "tip");
  tip.hidden = true;
  tip.setAttribute("role", "status");
  figure.append(tip);
  const ring = draw(svg, "circle", { class: "here", r: 7, visibility: "hidden" });
  let row = 0, place = -1;

  function hide() {
    tip.hidden = true;
    ring.setAttribute("visibility", "hidden");
  }
  function show() {
    const point = rows[row][place], box = svg.getBoundingClientRect(), factor = box.width / WIDTH;
    ring.setAttribute("cx", point.x);
    ring.setAttribute("cy", point.y);
    ring.setAttribute("visibility", "visible");
    tip.replaceChildren(make("b", "", point.label), point.text);
    tip.hidden = false;
    const left = point.x * factor + (point.x > WIDTH / 2 ? -tip.offsetWidth - 12 : 12);
    const top = box.top - figure.getBoundingClientRect().top + point.y * factor - tip.offsetHeight - 8;
    tip.style.left = `${Math.max(0, Math.min(left, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, top)}px`;
  }
  function nearest(event) {
    const box = svg.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) * WIDTH / box.width, (event.clientY - box.top) * WIDTH / box.width];
    let least = Infinity;
    const within = (point) => Math.max(point.left ?? point.x, Math.min(x, point.right ?? point.x)); // a bar is wide
    rows.forEach((points, r) => points.forEach((point, p) => {
      const distance = (within(point) - x) ** 2 + (point.y - y) ** 2;
      if (distance < least) [least, row, place] = [distance, r, p];
    }));
    rows[row][place].x = within(rows[row][place]);
    show();
  }
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const [along, across] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key] ?? [];
    if (event.key === "Escape") hide();
    if (along === undefined) return;
    event.preventDefault();
    row = (row + across + rows.length) % rows.length;
    place = Math.max(0, Math.min(place + along, rows[row].length - 1));
    show();
  });
}

const DRAWN_BY = { lines: drawLines, tree: drawTree, timeline: drawTimeline };

function drawPanel(panel) {
  const figure = make("figure", panel.kind, make("figcaption", "", panel.title));
  const name = `${panel.title}${panel.y?.label ? `: ${panel.y.label}` : ""}. Arrow keys tell its numbers.`;
  const svg = draw(figure, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "application", "aria-label": name });
  inspect(figure, svg, DRAWN_BY[panel.kind](svg, panel));
  return figure;
}

function drawSection({ title, note, legend, panels }) {
  const entries = make("ul", "legend");
  for (const entry of legend) {
    const item = make("li");
    const swatch = draw(item, "svg", { viewBox: "0 0 28 12", class: look(entry.look), "aria-hidden": "true" });
    draw(swatch, "path", { class: `line ${dash(entry.look)}`, d: "M2 6H26" });
    item.append(entry.label);
    entries.append(item);
  }
  const grid = make("div", "panels", ...panels.map(drawPanel));
  return make("section", "", make("h2", "", title), make("p", "muted", note), entries, grid);
}

document.getElementById("figures").append(...report.sections.map(drawSection));
