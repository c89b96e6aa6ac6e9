"use strict";
// Draws the curves of the JSON block #data: {step_axis, metrics: [{key, title, axis}],
// runs: [{name, steps, curves, restarts, skipped}]}. `step_axis` and `axis` name the axes.
// `steps` are the first and the last step. A curve is {x, mean}.
// If its points cover several steps, it also has {low, high}.

const { step_axis, metrics, runs } = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 7;
const HEIGHT = 244;
const EDGE = { left: 66, right: 20, top: 16, bottom: 48 };
const FEW = 40; // points of a curve that are drawn one by one, and not smoothed
const hidden = new Set();
let smoothing = 0;

const look = (i) => `c${i % COLOURS}${Math.floor(i / COLOURS) % 2 ? " dashed" : ""}`;

function svgElement(parent, tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

function htmlElement(parent, tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

function format(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  if (size !== 0 && size < 1e-2) return (+value.toPrecision(4)).toExponential();
  return String(+value.toPrecision(4));
}

// ------------------------------------------------------------------------------------------------------- scales

function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
    for (const m of [1, 2, 5]) ticks.push(+(m * 10 ** p).toPrecision(3));
  }
  const inside = ticks.filter((t) => t >= low && t <= high);
  if (inside.length < 2) return linearTicks(low, high, 4);
  return inside.length > 7 ? inside.filter((t) => String(t.toExponential()).startsWith("1e")) : inside;
}

// A scale maps a value to a pixel. `log` leaves out values that are not positive.
function makeScale(values, from, to, log) {
  let low = Infinity, high = -Infinity;
  for (const list of values) {
    for (const v of list) {
      if (log && v <= 0) continue;
      if (v < low) low = v;
      if (v > high) high = v;
    }
  }
  if (low > high) return null;
  if (low === high) {
    const pad = Math.abs(low) / 2 || 0.5;
    [low, high] = log ? [low / 2, high * 2] : [low - pad, high + pad];
  }
  const place = log ? Math.log10 : (v) => v;
  const [a, b] = [place(low), place(high)];
  const at = (v) => from + ((place(v) - a) / (b - a)) * (to - from);
  return { low, high, at, shown: (v) => !log || v > 0 };
}

// An exponential moving average, weighted so that its start is not drawn towards zero.
function smooth(values) {
  let sum = 0, weight = 0;
  return values.map((v) => {
    sum = smoothing * sum + (1 - smoothing) * v;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}

// ------------------------------------------------------------------------------------------------------- a chart

function line(xs, ys, x, y) {
  let path = "", pen = "M";
  for (let i = 0; i < xs.length; i++) {
    if (!y.shown(ys[i])) { pen = "M"; continue; }
    path += `${pen}${x.at(xs[i]).toFixed(1)} ${y.at(ys[i]).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

function band(curve, x, y) {
  const at = (i, v) => `${x.at(curve.x[i]).toFixed(1)} ${y.at(y.shown(v) ? v : y.low).toFixed(1)}`;
  const up = curve.x.map((_, i) => at(i, curve.high[i]));
  const down = curve.x.map((_, i) => at(i, curve.low[i])).reverse();
  return `M${up.join("L")}L${down.join("L")}Z`;
}

function drawAxes(svg, metric, width, x, y, log) {
  for (const t of log ? logTicks(y.low, y.high) : linearTicks(y.low, y.high, 5)) {
    const at = y.at(t);
    svgElement(svg, "line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at });
    svgElement(svg, "text", { x: EDGE.left - 6, y: at + 4, "text-anchor": "end" }, format(t));
  }
  for (const t of linearTicks(x.low, x.high, Math.max(2, Math.floor(width / 75)))) {
    svgElement(svg, "text", { x: x.at(t), y: HEIGHT - 21, "text-anchor": "middle" }, format(t));
  }
  const [middle, centre] = [(EDGE.left + width - EDGE.right) / 2, (EDGE.top + HEIGHT - EDGE.bottom) / 2];
  svgElement(svg, "text", { class: "axis", x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, step_axis);
  const upright = `translate(11 ${centre}) rotate(-90)`;
  svgElement(svg, "text", { class: "axis", transform: upright, "text-anchor": "middle" }, metric.axis);
}

function drawMarks(svg, run, group, x) {
  const inside = (step) => step >= x.low && step <= x.high;
  for (const step of run.restarts.filter(inside)) {
    const at = x.at(step);
    svgElement(group, "line", { class: "resumed", x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
    const head = svgElement(group, "path", { class: "restart", d: `M${at - 5} 6h10l-5 8Z` });
    svgElement(head, "title", {}, `${run.name}: resumed after step ${step}`);
  }
  for (const step of run.skipped.filter(inside)) {
    const at = x.at(step), foot = HEIGHT - EDGE.bottom + 8;
    const mark = svgElement(group, "path", { class: "skip", d: `M${at - 3} ${foot - 3}l6 6m0 -6l-6 6` });
    svgElement(mark, "title", {}, `${run.name}: skipped step ${step}`);
  }
}

function drawRun(svg, i, curve, x, y) {
  const group = svgElement(svg, "g", { class: look(i).split(" ")[0] });
  const dashed = look(i).endsWith("dashed") ? " dashed" : "";
  if (curve.low) svgElement(group, "path", { class: "band", d: band(curve, x, y) });
  const faint = smoothing > 0 && curve.x.length > FEW ? " raw" : "";
  svgElement(group, "path", { class: `curve${dashed}${faint}`, d: line(curve.x, curve.mean, x, y) });
  if (faint) svgElement(group, "path", { class: `curve${dashed}`, d: line(curve.x, smooth(curve.mean), x, y) });
  if (curve.x.length <= FEW) {
    curve.x.forEach((step, k) => {
      if (y.shown(curve.mean[k])) svgElement(group, "circle", { class: "dot", r: 2.5, cx: x.at(step), cy: y.at(curve.mean[k]) });
    });
  }
  return group;
}

// The index of the point of the curve that a step belongs to, or is nearest to.
function pointAt(curve, step) {
  let low = 0, high = curve.x.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (curve.x[middle] <= step) low = middle; else high = middle - 1;
  }
  const nearer = !curve.low && low + 1 < curve.x.length && curve.x[low + 1] - step < step - curve.x[low];
  return nearer ? low + 1 : low;
}

function makeChart(metric) {
  const figure = htmlElement(document.getElementById("charts"), "figure");
  const caption = htmlElement(figure, "figcaption", "", metric.title);
  const button = htmlElement(caption, "button", "", "log");
  button.setAttribute("aria-pressed", "false");
  button.title = "logarithmic scale";
  const svg = svgElement(figure, "svg", { height: HEIGHT, role: "img", "aria-label": metric.title });
  const tip = htmlElement(figure, "div", "tip");
  tip.hidden = true;
  const chart = { metric, figure, svg, tip, log: false, shown: [], x: null };
  button.onclick = () => {
    chart.log = !chart.log;
    button.setAttribute("aria-pressed", String(chart.log));
    draw(chart);
  };
  svg.onpointermove = svg.onpointerdown = (event) => showTip(chart, event);
  svg.onpointerleave = () => { tip.hidden = true; svg.querySelector(".cross")?.remove(); };
  new ResizeObserver(() => { if (svg.clientWidth !== chart.width) draw(chart); }).observe(figure);
  return chart;
}

function draw(chart) {
  const { svg, metric, log } = chart;
  const width = chart.width = svg.clientWidth;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  chart.shown = runs.map((run, i) => [run, i, run.curves[metric.key]]).filter(([, i, c]) => !hidden.has(i) && c.x.length);
  const curves = chart.shown.map(([, , curve]) => curve);
  const steps = runs.filter((_, i) => !hidden.has(i)).map((run) => run.steps); // all charts have the same range
  chart.x = makeScale(steps, EDGE.left, width - EDGE.right, false);
  const values = curves.flatMap((c) => (c.low ? [c.low, c.high] : [c.mean]));
  chart.y = makeScale(values, HEIGHT - EDGE.bottom, EDGE.top, log);
  if (!chart.x || !chart.y) {
    svgElement(svg, "text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing to show");
    return;
  }
  drawAxes(svg, metric, width, chart.x, chart.y, log);
  for (const [run, i, curve] of chart.shown) drawMarks(svg, run, drawRun(svg, i, curve, chart.x, chart.y), chart.x);
}

function showTip(chart, event) {
  const { svg, tip, x, y } = chart;
  if (!x || !y) return;
  const left = svg.getBoundingClientRect().left;
  const pixel = Math.min(Math.max(event.clientX - left, EDGE.left), chart.width - EDGE.right);
  const step = x.low + ((pixel - EDGE.left) / (chart.width - EDGE.left - EDGE.right)) * (x.high - x.low);
  svg.querySelector(".cross")?.remove();
  svgElement(svg, "line", { class: "cross", x1: pixel, x2: pixel, y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
  tip.replaceChildren();
  for (const [run, i, curve] of chart.shown) {
    const k = pointAt(curve, step);
    const row = htmlElement(tip, "div");
    htmlElement(row, "i", `line ${look(i)}`);
    const range = curve.low ? ` (${format(curve.low[k])} to ${format(curve.high[k])})` : "";
    row.append(`${run.name}, step ${curve.x[k].toLocaleString("en")}: ${format(curve.mean[k])}${range}`);
  }
  tip.hidden = false;
  const room = chart.figure.clientWidth - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(room, pixel > chart.width / 2 ? pixel - tip.offsetWidth : pixel + 24))}px`;
}

// ------------------------------------------------------------------------------------------------------ controls

const charts = metrics.map(makeChart);
const drawAll = () => charts.forEach(draw);

runs.forEach((run, i) => {
  const button = htmlElement(document.getElementById("legend"), "button");
  htmlElement(button, "i", `line ${look(i)}`);
  button.append(run.name);
  button.setAttribute("aria-pressed", "true");
  button.onclick = () => {
    if (!hidden.delete(i)) hidden.add(i);
    button.setAttribute("aria-pressed", String(!hidden.has(i)));
    drawAll();
  };
});
document.getElementById("smoothing").oninput = (event) => {
  smoothing = Number(event.target.value);
  drawAll();
};
drawAll();
