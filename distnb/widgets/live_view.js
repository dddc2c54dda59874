// The live view in the browser. It receives texts and tables as HTML, and the new points of curves as numbers. Curves are
// drawn here, so hovering, smoothing and the log scale also work while the kernel is busy with a cell.

const STYLE = `
.distnb-live{font:13px/1.5 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--jp-ui-font-color1,inherit);padding:4px 0}
.distnb-live [hidden]{display:none !important}
.distnb-live .status{display:flex;gap:8px;align-items:baseline}
.distnb-live .dot{width:9px;height:9px;border-radius:50%;background:#009e73;flex:none}
.distnb-live .dot.starting,.distnb-live .dot.cleaning,.distnb-live .dot.interrupted{background:#e69f00}
.distnb-live .dot.ended{background:#808080}
.distnb-live .dot.failed,.distnb-live .dot.died{background:#e5484d}
.distnb-live .dot.running{animation:distnb-pulse 1.4s ease-in-out infinite}
@keyframes distnb-pulse{50%{opacity:.35}}
@media (prefers-reduced-motion:reduce){.distnb-live .dot.running{animation:none}}
.distnb-live .controls{display:flex;flex-wrap:wrap;gap:2px 18px;font-size:12px;color:var(--jp-ui-font-color2,#808080)}
.distnb-live .controls label{display:flex;gap:6px;align-items:center}
.distnb-live .controls input{accent-color:var(--jp-brand-color1,#0072b2);margin:0}
.distnb-live .controls output{min-width:2.5em;font-variant-numeric:tabular-nums}
.distnb-live .charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:6px 14px}
.distnb-live figure{position:relative;margin:0;min-width:0}
.distnb-live figcaption{font-size:12px;line-height:1.4;overflow-wrap:anywhere}
.distnb-live figcaption .name{font-weight:600;margin-right:8px}
.distnb-live figcaption .series{margin-right:10px;white-space:nowrap}
.distnb-live .swatch{display:inline-block;width:12px;height:3px;border-radius:2px;vertical-align:middle;margin-right:4px}
.distnb-live .facts{font-size:11px;color:var(--jp-ui-font-color2,#808080);font-variant-numeric:tabular-nums}
.distnb-live figure svg{display:block;width:100%;height:200px;overflow:visible;touch-action:pan-y}
.distnb-live figure:only-child svg{height:240px}
.distnb-live figure svg:focus-visible{outline:2px solid var(--jp-brand-color1,#0072b2);outline-offset:2px}
.distnb-live svg.queue{display:block;width:100%;height:auto;max-width:640px;margin:2px 0}
.distnb-live svg text{fill:var(--jp-ui-font-color2,#808080);font-size:11px}
.distnb-live svg .grid{stroke:var(--jp-border-color2,#80808044)}
.distnb-live svg .epoch{stroke:var(--jp-ui-font-color2,#808080);stroke-dasharray:2 3;opacity:.7}
.distnb-live svg .cross{stroke:var(--jp-ui-font-color1,#808080);opacity:.6}
.distnb-live svg .mark,.distnb-live svg text.mark{stroke:#e5484d}
.distnb-live svg text.mark{stroke:none;fill:#e5484d}
.distnb-live .tip{position:absolute;z-index:10;pointer-events:none;padding:3px 8px;font-size:12px;line-height:1.45;white-space:nowrap;
background:var(--jp-layout-color1,#fff);border:1px solid var(--jp-border-color1,#808080);border-radius:3px;
font-variant-numeric:tabular-nums;box-shadow:0 1px 4px #0003}
.distnb-live td,.distnb-live th{color:inherit;font-variant-numeric:tabular-nums}
`;

const FRAME = `<style>${STYLE}</style><div class="above"></div>
<div class="controls" hidden>
<label><input type="checkbox" class="log">log scale</label>
<label>smoothing<input type="range" class="smoothing" min="0" max="0.99" step="0.01"><output></output></label></div>
<div class="charts"></div><div class="below"></div>
<details hidden><summary>You reloaded the page while the cell ran. This is the end of its output</summary><pre></pre></details>`;

const [LEFT, RIGHT, TOP, FOOT] = [50, 8, 8, 20];
const RED = "#e5484d";

// -- numbers ----------------------------------------------------------------------------------------------------------

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const wide = (words) => 6.6 * words.length; // at most, in the charts' font
const whole = (number) => number.toLocaleString("en");

function short(number) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "nan" : number > 0 ? "inf" : "-inf";
  return Math.abs(number) >= 1e5 || (number && Math.abs(number) < 1e-4) ? number.toExponential(2) : `${+number.toPrecision(4)}`;
}

// Return about `about` round numbers within a range.
function ticks(low, high, about) {
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const powers = [];
  for (let power = Math.ceil(low - 1e-9); power <= high + 1e-9; power++) powers.push(power);
  if (powers.length < 2) return ticks(10 ** low, 10 ** high, 4).filter((tick) => tick > 0).map(Math.log10);
  return powers.filter((_, i) => i % Math.ceil(powers.length / 6) === 0);
}

function span(numbers) {
  let [low, high] = [Infinity, -Infinity];
  for (const number of numbers) {
    if (!Number.isFinite(number)) continue;
    if (number < low) low = number;
    if (number > high) high = number;
  }
  if (low > high) return [0, 1];
  const half = Math.abs(low) * 0.05 || 0.5;
  return low < high ? [low, high] : [low - half, high + half];
}

// -- lines: arrays of [step, value, least, greatest], see curves.py ----------------------------------------------------

const joined = (first, second) =>
  second === undefined
    ? first
    : [second[0], Number.isFinite(first[1]) ? second[1] : first[1], Math.min(first[2], second[2]), Math.max(first[3], second[3])];

class Lines {
  constructor() {
    this.byNumber = new Map();
    this.charts = [];
  }

  // Apply a message of `WidgetView.message` in widget_view.py.
  receive({ charts, lines }, buffer) {
    const numbers = new Float32Array(buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength));
    let place = 0;
    for (const [number, width, at, count] of lines) {
      const line = this.byNumber.get(number);
      const points = [];
      for (let i = 0; i < count; i++, place += 4) points.push(Array.from(numbers.subarray(place, place + 4)));
      if (at === 0) this.byNumber.set(number, { width, points });
      else if (line) this.append(line, width, at, points);
    }
    this.charts = charts;
  }

  append(line, width, at, points) {
    for (; line.width < width; line.width *= 2)
      line.points = line.points.filter((_, i) => i % 2 === 0).map((point, i) => joined(point, line.points[2 * i + 1]));
    if (line.points.length < at) return; // a message was lost; all points of the line will soon be sent again
    line.points.length = at;
    line.points.push(...points);
  }

  // Return what to draw for a series: the points of its only line, or the mean of several lines with their range.
  drawn([label, color, thick, members]) {
    const lines = members.map(([number]) => this.byNumber.get(number)).filter((line) => line?.points.length);
    if (lines.length === 0) return null;
    const points = lines.length > 1 ? mean(lines.map((line) => line.points)) : lines[0].points;
    return { label, color, thick, members, points, width: lines[0].width };
  }
}

// Return the index of the latest point at or before a step, or -1.
function placeAt(points, step) {
  let [low, high] = [0, points.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function mean(lines) {
  const places = lines.map(() => 0);
  return lines[0].map(([step]) => {
    let [sum, count, low, high, bad] = [0, 0, Infinity, -Infinity, null];
    lines.forEach((points, i) => {
      while (places[i] + 1 < points.length && points[places[i] + 1][0] <= step) places[i]++;
      const point = points[places[i]];
      if (point[0] > step) return;
      if (!Number.isFinite(point[1])) bad = point[1];
      [sum, count] = [sum + point[1], count + 1];
      low = Math.min(low, point[2]);
      high = Math.max(high, point[3]);
    });
    return [step, bad ?? sum / count, low, high];
  });
}

// Return the exponential moving average. A point that represents several values has the weight of all of them.
function smoothed({ points, width }, weight) {
  const kept = weight ** width;
  let [average, mass] = [0, 0];
  return points.map(([step, value]) => {
    if (!Number.isFinite(value)) return [step, value, value, value];
    [average, mass] = [kept * average + (1 - kept) * value, kept * mass + (1 - kept)];
    return [step, average / mass, average / mass, average / mass];
  });
}

// -- a chart ----------------------------------------------------------------------------------------------------------

class Chart {
  constructor(name, container, lines) {
    this.lines = lines;
    this.figure = document.createElement("figure");
    this.figure.innerHTML = `<figcaption></figcaption><svg role="img" tabindex="0"><g class="drawn"></g><g class="pointer"></g></svg>
      <div class="facts"></div><div class="tip" role="status" hidden></div>`;
    container.append(this.figure);
    [this.caption, this.svg, this.facts, this.tip] = this.figure.children;
    this.svg.dataset.name = name;
    this.at = null; // the step under the pointer
    this.series = [];
    this.svg.addEventListener("pointermove", (event) => this.pointAt(this.stepAt(event.clientX)));
    this.svg.addEventListener("pointerleave", () => this.pointAt(null));
    this.svg.addEventListener("blur", () => this.pointAt(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  draw(chart, { log, smoothing }) {
    this.chart = chart;
    this.series = chart.series.map((series) => this.lines.drawn(series)).filter(Boolean);
    const all = this.series.flatMap(({ points }) => points);
    this.log = log && all.some((point) => point[3] > 0);
    const scale = this.log ? (value) => (value > 0 ? Math.log10(value) : NaN) : (value) => value;
    this.width = this.svg.clientWidth || 400;
    this.height = this.svg.clientHeight || 200;
    const [xLow, xHigh] = span(all.map((point) => point[0]));
    let [yLow, yHigh] = span(all.flatMap((point) => [scale(point[2]), scale(point[3])]));
    const pad = (yHigh - yLow) * 0.05;
    [yLow, yHigh] = [yLow - pad, yHigh + pad];
    const [right, foot] = [this.width - RIGHT, this.height - FOOT];
    this.x = (step) => LEFT + ((step - xLow) / (xHigh - xLow)) * (right - LEFT);
    this.y = (value) => foot - ((scale(value) - yLow) / (yHigh - yLow)) * (foot - TOP);
    this.steps = { low: xLow, high: xHigh, left: LEFT, right };
    const parts = [];
    for (const tick of this.log ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, 4)) {
      const y = foot - ((tick - yLow) / (yHigh - yLow)) * (foot - TOP);
      parts.push(`<path class="grid" d="M${LEFT} ${y.toFixed(1)}H${right}"/>`);
      parts.push(`<text x="${LEFT - 5}" y="${(y + 4).toFixed(1)}" text-anchor="end">${short(this.log ? 10 ** tick : tick)}</text>`);
    }
    const steps = ticks(xLow, xHigh, Math.max(2, this.width / 110)).map((tick) => [this.x(tick), short(tick)]);
    parts.push(this.labels(steps.map(([x, words]) => [x - wide(words) / 2, words]), foot + 15));
    parts.push(this.epochs(chart.epochs, xLow, xHigh, foot));
    for (const series of [...this.series].reverse()) parts.push(this.line(series, smoothing));
    parts.push(this.marks(foot));
    this.svg.firstElementChild.innerHTML = parts.join("");
    this.svg.setAttribute("aria-label", `${chart.name}: ${chart.facts}. Arrow keys read values.`);
    this.facts.textContent = chart.facts + (log && !this.log ? " · no positive values: the scale is linear" : "");
    this.legend();
    this.pointAt(this.at);
  }

  legend() {
    const named = this.series.map(({ label, color, points }) => {
      const value = this.series.length <= 2 ? ` ${short(points.at(-1)[1])}` : "";
      return `<span class="series"><span class="swatch" style="background:${color}"></span>${escaped(label)}${value}</span>`;
    });
    this.caption.innerHTML = `<span class="name">${escaped(this.chart.name)}</span>${named.join("")}`;
  }

  // Draw a dotted line and a number, counted from 1, where an epoch begins. With many epochs, only some are drawn.
  epochs(epochs, low, high, foot) {
    const inside = epochs.filter(([step]) => low < step && step < high);
    const every = Math.ceil(inside.length / Math.max(3, this.width / 60));
    const marks = inside.filter((_, i) => i % every === 0).map(([step, number]) => [this.x(step), number + 1]);
    const labels = marks.map(([x, number], i) => {
      const words = i === 0 ? `epoch ${number}` : `${number}`;
      return [x + 3 + wide(words) <= this.width ? x + 3 : x - 3 - wide(words), words];
    });
    return marks.map(([x]) => `<path class="epoch" d="M${x.toFixed(1)} ${TOP}V${foot}"/>`).join("") + this.labels(labels, TOP + 9);
  }

  // Draw the labels [left edge, words] of a row that do not touch the label before, moved into the picture.
  labels(labels, y) {
    let free = 0;
    const shown = labels.map(([left, words]) => {
      const place = Math.min(left, this.width - wide(words));
      if (place < free) return "";
      free = place + wide(words) + 5;
      return `<text x="${place.toFixed(1)}" y="${y}">${words}</text>`;
    });
    return shown.join("");
  }

  path(points) {
    let [path, open] = ["", false];
    for (const [step, value] of points) {
      const y = this.y(value);
      if (Number.isFinite(y)) path += `${open ? "L" : "M"}${this.x(step).toFixed(1)} ${y.toFixed(1)}${open ? "" : "h0"}`;
      open = Number.isFinite(y);
    }
    return path;
  }

  line(series, smoothing) {
    const { points, color, thick } = series;
    const look = `fill="none" stroke="${color}" stroke-linejoin="round" stroke-linecap="round"`;
    const width = points.length === 1 ? 5 : thick ? 2.4 : 1.3;
    if (smoothing > 0)
      return `<path class="raw" d="${this.path(points)}" ${look} stroke-width="1" stroke-opacity=".3"/>
        <path class="line" d="${this.path(smoothed(series, smoothing))}" ${look} stroke-width="${width}"/>`;
    return `${this.band(points, color)}<path class="line" d="${this.path(points)}" ${look} stroke-width="${width}"/>`;
  }

  // Draw the band from the least to the greatest value, if points represent several values.
  band(points, color) {
    if (points.every((point) => point[2] === point[3])) return "";
    const inside = points.map((point) => [this.x(point[0]), this.y(point[2]), this.y(point[3])]).filter((each) => each.every(Number.isFinite));
    const up = inside.map(([x, , high]) => `${x.toFixed(1)} ${high.toFixed(1)}`);
    const down = inside.map(([x, low]) => `${x.toFixed(1)} ${low.toFixed(1)}`).reverse();
    return inside.length ? `<path class="band" d="M${[...up, ...down].join("L")}Z" fill="${color}" fill-opacity=".18"/>` : "";
  }

  // Draw a cross at the foot for each nan or infinite value, and a triangle at the top where values exploded.
  marks(foot) {
    const bad = this.series.flatMap(({ points }) => points.filter((point) => !Number.isFinite(point[1])));
    let drawn = bad.map(([step]) => `M${(this.x(step) - 3).toFixed(1)} ${foot - 7}l6 6m0 -6l-6 6`).join("");
    if (drawn) {
      const [step, value] = bad.reduce((first, each) => (each[0] < first[0] ? each : first));
      const side = this.x(step) < this.width - 50 ? `x="${this.x(step) + 6}"` : `x="${this.x(step) - 6}" text-anchor="end"`;
      drawn = `<path class="mark" d="${drawn}" fill="none" stroke-width="1.5"/><text class="mark" ${side} y="${foot - 1}">${short(value)}</text>`;
    }
    const heads = this.chart.exploded.map((step) => `M${(this.x(step) - 5).toFixed(1)} ${TOP + 10}l5 -9l5 9z`).join("");
    return drawn + (heads ? `<path class="exploded" d="${heads}" fill="${RED}"/>` : "");
  }

  // -- reading values ---------------------------------------------------------------------------------------------------

  stepAt(clientX) {
    const { low, high, left, right } = this.steps;
    return low + ((clientX - this.svg.getBoundingClientRect().left - left) / (right - left)) * (high - low);
  }

  key(event) {
    const points = this.longest();
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.pointAt(null);
    if (move === undefined || !points.length) return;
    event.preventDefault();
    event.stopPropagation();
    const from = this.at === null ? points.length : placeAt(points, this.at);
    this.pointAt(points[Math.max(0, Math.min(points.length - 1, from + move))][0]);
  }

  longest() {
    return this.series.reduce((longest, { points }) => (points.length > longest.length ? points : longest), []);
  }

  pointAt(step) {
    const pointer = this.svg.lastElementChild;
    const points = this.longest();
    this.at = step;
    this.tip.hidden = step === null || !points.length;
    if (this.tip.hidden) {
      pointer.innerHTML = "";
      return;
    }
    let place = placeAt(points, step); // moved below to the nearest point
    if (place < 0 || (place + 1 < points.length && points[place + 1][0] - step < step - points[place][0])) place++;
    const at = points[place][0];
    const x = this.x(at);
    const found = this.series.map((series) => [series, series.points[placeAt(series.points, at)]]).filter(([, point]) => point);
    const dots = found.filter(([, point]) => Number.isFinite(this.y(point[1])));
    pointer.innerHTML =
      `<path class="cross" d="M${x.toFixed(1)} ${TOP}V${this.height - FOOT}"/>` +
      dots.map(([{ color }, point]) => `<circle cx="${x.toFixed(1)}" cy="${this.y(point[1]).toFixed(1)}" r="3" fill="${color}"/>`).join("");
    this.tip.innerHTML = [this.where(points, place), ...found.map(([series, point]) => this.row(series, point, at))].join("<br>");
    const left = x + 12 + this.tip.offsetWidth < this.width ? x + 12 : Math.max(0, x - 12 - this.tip.offsetWidth);
    const top = this.y(points[place][1]) < this.height / 2 ? this.height / 2 : TOP; // not over the line
    Object.assign(this.tip.style, { left: `${left}px`, top: `${this.caption.offsetHeight + top}px` });
  }

  where(points, place) {
    const [at, before] = [points[place][0], place ? points[place - 1][0] + 1 : points[place][0]];
    const steps = before < at && this.series[0].width > 1 ? `steps ${whole(before)} to ${whole(at)}` : `step ${whole(at)}`;
    const epoch = this.chart.epochs.filter(([step]) => step < at).at(-1);
    return `<b>${steps}</b>${epoch ? ` · epoch ${epoch[1] + 1}` : ""}`;
  }

  row({ label, color, members }, point, at) {
    const [, value, low, high] = point;
    const [least, greatest] = members.length > 1 ? this.whose(members, at) : ["", ""];
    const range = low < high ? ` (${short(low)}${least} to ${short(high)}${greatest})` : "";
    const name = escaped(label || this.chart.name);
    return `<span class="swatch" style="background:${color}"></span>${name} <b>${short(value)}</b>${range}`;
  }

  // Return the replicas with the least and the greatest value at a step, as marks.
  whose(members, at) {
    const values = members
      .map(([number, replica]) => {
        const points = this.lines.byNumber.get(number)?.points ?? [];
        return [replica, points[placeAt(points, at)]?.[1]];
      })
      .filter(([, value]) => Number.isFinite(value))
      .sort((one, other) => one[1] - other[1]);
    return values.length ? [values[0], values.at(-1)].map(([replica]) => ` [${replica}]`) : ["", ""];
  }
}

// -- the widget -------------------------------------------------------------------------------------------------------

function settings() {
  try {
    return { log: false, smoothing: 0, ...JSON.parse(sessionStorage.getItem("distnb-live")) };
  } catch {
    return { log: false, smoothing: 0 }; // the browser denies this page storage
  }
}

function saveSettings(chosen) {
  try {
    sessionStorage.setItem("distnb-live", JSON.stringify(chosen)); // used by the charts of the next cell
  } catch {
    return;
  }
}

export default () => {
  // True if the page was reloaded while the cell ran: another page has shown the widget before.
  let restored = false;
  const lines = new Lines();
  const views = new Set(); // the redraw function of each view of the widget
  return {
    initialize({ model }) {
      restored = model.get("above") !== "";
      const { points, ...curves } = model.get("curves");
      lines.receive(curves, points);
      model.on("msg:custom", (content, buffers) => {
        lines.receive(content, buffers[0]);
        views.forEach((redraw) => redraw());
      });
    },
    render({ model, el }) {
      el.innerHTML = `<div class="distnb-live">${FRAME}</div>`;
      const find = (selector) => el.querySelector(selector);
      const [above, below, controls, container, written] = [".above", ".below", ".controls", ".charts", "details"].map(find);
      const chosen = settings();
      const charts = new Map();
      let [pending, kernelEnded] = [false, false];
      const draw = () => {
        pending = false;
        above.innerHTML = model.get("above");
        below.innerHTML = model.get("below");
        if (kernelEnded) markEnded();
        controls.hidden = lines.charts.length === 0;
        for (const chart of lines.charts) {
          if (!charts.has(chart.name)) charts.set(chart.name, new Chart(chart.name, container, lines));
          charts.get(chart.name).draw(chart, chosen);
        }
        written.hidden = !(restored && model.get("written"));
        written.querySelector("pre").textContent = model.get("written");
      };
      const schedule = () => {
        if (!pending) requestAnimationFrame(draw); // a hidden tab runs this only when it is visible again
        pending = true;
      };
      const changed = () => {
        kernelEnded = false;
        schedule();
      };
      // Called when the kernel has ended or restarted, so no message will follow. Earlier ones may not be drawn yet.
      const onKernelEnded = () => {
        kernelEnded = true;
        markEnded();
      };
      const markEnded = () => {
        const [dot, state] = [above.querySelector(".dot"), above.querySelector(".head .state")];
        if (!dot?.matches(".starting,.running,.asks,.cleaning")) return;
        state.textContent = "the kernel ended";
        dot.className = "dot died";
      };
      const [log, smoothing, output] = [".log", ".smoothing", "output"].map(find);
      const choose = () => {
        Object.assign(chosen, { log: log.checked, smoothing: +smoothing.value });
        output.textContent = smoothing.value;
        saveSettings(chosen);
        schedule();
      };
      [log.checked, smoothing.value] = [chosen.log, chosen.smoothing];
      [log, smoothing].forEach((control) => control.addEventListener("input", choose));
      output.textContent = smoothing.value;
      const size = new ResizeObserver(schedule);
      size.observe(container);
      model.on("change:above", changed);
      model.on("change:below", changed);
      model.on("comm_live_update", onKernelEnded);
      views.add(changed);
      schedule();
      return () => {
        // A picture replaces the widget at the cell's end. A restored widget has no picture.
        if (model.get("ended") && !restored) model.send({ replaced: true });
        size.disconnect();
        views.delete(changed);
        model.off("change:above", changed);
        model.off("change:below", changed);
        model.off("comm_live_update", onKernelEnded);
      };
    },
  };
};
