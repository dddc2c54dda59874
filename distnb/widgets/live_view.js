// The live view in the browser. It receives texts and tables as HTML, and the new points of curves as numbers. Curves are
// drawn here by uPlot, so pointing, zooming, smoothing and the log scale also work while the kernel is busy with a cell.
//
// `_module` in widget_view.py puts uPlot and its style sheet, UPLOT_STYLE, before this text.

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
.distnb-live .plot{position:relative}
.distnb-live .plot:focus-visible{outline:2px solid var(--jp-brand-color1,#0072b2);outline-offset:2px}
.distnb-live .uplot{position:absolute}
.distnb-live .u-over{cursor:crosshair}
.distnb-live .u-select{background:#80808044}
.distnb-live .plot :is(.raw,.low,.high){display:none}
.distnb-live svg.queue{display:block;width:100%;height:auto;max-width:640px;margin:2px 0}
.distnb-live svg text{fill:var(--jp-ui-font-color2,#808080);font-size:11px}
.distnb-live .tip{position:absolute;z-index:10;pointer-events:none;padding:3px 8px;font-size:12px;line-height:1.45;white-space:nowrap;
background:var(--jp-layout-color1,#fff);border:1px solid var(--jp-border-color1,#808080);border-radius:3px;
font-variant-numeric:tabular-nums;box-shadow:0 1px 4px #0003}
.distnb-live .u-legend{margin:0;border:0;font-size:12px}
.distnb-live .u-legend tr{display:block;margin:0;text-align:left;background:none !important}
.distnb-live .u-legend tr :is(td,th){padding:0 6px 0 0;line-height:1.45}
.distnb-live .u-legend .u-marker{width:12px;height:3px}
.distnb-live .u-legend tr:first-child th{display:none}
.distnb-live .u-legend .u-value{font-weight:600}
.distnb-live td,.distnb-live th{color:inherit;font-variant-numeric:tabular-nums}
`;

const FRAME = `<style>${UPLOT_STYLE}${STYLE}</style><div class="above"></div>
<div class="controls" hidden>
<label><input type="checkbox" class="log">log scale</label>
<label>smoothing<input type="range" class="smoothing" min="0" max="0.99" step="0.01"><output></output></label></div>
<div class="charts"></div><div class="below"></div>
<details hidden><summary>You reloaded the page while the cell ran. This is the end of its output</summary><pre></pre></details>`;

const RED = "#e5484d";
const GREY = "#808080"; // legible in light and dark themes
const FONT = "11px system-ui,sans-serif";
const AXIS = { stroke: GREY, font: FONT, grid: { stroke: "#80808038", width: 1 }, ticks: { show: false } };
const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();

// -- numbers ----------------------------------------------------------------------------------------------------------

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const wide = (words) => 6.6 * words.length; // at most, in FONT
const whole = (number) => number.toLocaleString("en");

function short(number) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "nan" : number > 0 ? "inf" : "-inf";
  return Math.abs(number) >= 1e5 || (number && Math.abs(number) < 1e-4) ? number.toExponential(2) : `${+number.toPrecision(4)}`;
}

// Return the label of a tick. uPlot gives null to one without a label.
function label(tick) {
  if (tick === null) return "";
  const rounded = +tick.toPrecision(10);
  return tick && (Math.abs(tick) < 1e-4 || Math.abs(tick) >= 1e6) ? rounded.toExponential() : `${rounded}`;
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

// Return the columns that draw a series in uPlot's table, by the place of their numbers in a point. Those beside the line
// itself are the line before smoothing, or the edges of a band, if points represent several values.
function columnsOf(series, smoothing) {
  const line = { series, points: series.points, place: 1, kind: "line" };
  if (smoothing > 0) return [{ ...line, kind: "raw" }, { ...line, points: smoothed(series, smoothing) }];
  if (series.points.every((point) => !(point[2] < point[3]))) return [line];
  return [{ ...line, place: 2, kind: "low" }, { ...line, place: 3, kind: "high" }, line];
}

class Chart {
  constructor(name, container, lines) {
    this.lines = lines;
    this.container = container;
    this.figure = document.createElement("figure");
    this.figure.innerHTML = `<figcaption></figcaption><div class="plot" role="img" tabindex="0">
      <div class="tip" role="status" hidden></div></div><div class="facts"></div>`;
    this.figure.dataset.name = name;
    container.append(this.figure);
    [this.caption, this.place, this.facts] = this.figure.children;
    this.tip = this.place.firstElementChild;
    this.step = null; // the step that the keyboard has chosen
    this.place.addEventListener("pointermove", () => (this.step = null));
    this.place.addEventListener("blur", () => this.choose(null));
    this.place.addEventListener("keydown", (event) => this.key(event));
  }

  draw(chart, { log, smoothing }) {
    this.chart = chart;
    this.series = chart.series.map((series) => this.lines.drawn(series)).filter(Boolean);
    const isLog = log && this.series.some(({ points }) => points.some((point) => point[3] > 0));
    this.columns = this.series.flatMap((series) => columnsOf(series, smoothing));
    this.show(isLog);
    this.place.setAttribute("aria-label", `${chart.name}: ${chart.facts}. Arrow keys read values.`);
    this.facts.textContent = chart.facts + (log && !isLog ? " · no positive values: the scale is linear" : "");
    this.legend();
  }

  legend() {
    const named = this.series.map(({ label, color, points }) => {
      const value = this.series.length <= 2 ? ` ${short(points.at(-1)[1])}` : "";
      return `<span class="series"><span class="swatch" style="background:${color}"></span>${escaped(label)}${value}</span>`;
    });
    this.caption.innerHTML = `<span class="name">${escaped(this.chart.name)}</span>${named.join("")}`;
  }

  show(isLog) {
    const size = { width: this.figure.clientWidth || 400, height: this.container.childElementCount > 1 ? 216 : 256 };
    this.place.style.height = `${size.height}px`;
    const data = this.table(isLog);
    const form = JSON.stringify([isLog, this.columns.map(({ kind, series: { label, color, thick } }) => [kind, label, color, thick])]);
    const before = this.plot;
    const zoom = before && this.zoom();
    if (this.form !== form) {
      before?.destroy();
      this.form = form;
      this.plot = this.figure.plot = new uPlot({ ...size, ...this.options(isLog) }, data, this.place);
    } else {
      this.plot.setData(data, !zoom);
      if (before.width !== size.width || before.height !== size.height) this.plot.setSize(size);
    }
    if (zoom) this.plot.setScale("x", zoom);
    if (this.step !== null) this.choose(this.step);
  }

  // Return the range of steps that the user has chosen, or null if all are shown.
  zoom() {
    const [steps, { min, max }] = [this.plot.data[0], this.plot.scales.x];
    return min > steps[0] || max < steps.at(-1) ? { min, max } : null;
  }

  // Return the columns at the steps of all series. null breaks a line, a step of another series (undefined) does not.
  table(isLog) {
    const number = (value) => (Number.isFinite(value) && (value > 0 || !isLog) ? value : null);
    return uPlot.join(
      this.series.map((series) => [
        series.points.map((point) => point[0]),
        ...this.columns.filter((column) => column.series === series).map(({ points, place }) => points.map((point) => number(point[place]))),
      ]),
    );
  }

  options(isLog) {
    const look = ({ kind, series: { color, thick } }) =>
      ({ line: { stroke: color, width: thick ? 2.4 : 1.3 }, raw: { stroke: `${color}4d`, width: 1 } })[kind] ?? { width: 0 };
    const last = (plot) => wide(whole(plot.scales.x.max ?? 0));
    return {
      padding: [null, (plot) => Math.max(24, last(plot) / 2), null, null],
      scales: {
        x: { time: false, range: (_, low, high) => (low < high ? [low, high] : [low - 0.5, high + 0.5]) },
        y: { distr: isLog ? 3 : 1 },
      },
      axes: [
        { ...AXIS, size: 20, incrs: WHOLE, space: (plot) => last(plot) + 16, values: (_, steps) => steps.map(whole) },
        {
          ...AXIS,
          size: (_, labels) => 12 + Math.max(24, ...(labels ?? []).map(wide)),
          values: (_, ticks) => ticks.map(label),
          grid: { ...AXIS.grid, filter: (plot, ...ticks) => plot.axes[1].filter(plot, ...ticks) }, // lines where labels are
        },
        { ...AXIS, ...this.epochs(), side: 0, scale: "x", size: 16, gap: 2, grid: { stroke: GREY, width: 1, dash: [2, 3] } },
      ],
      series: [
        { label: "", value: (_plot, _step, _series, place) => (place === null ? "" : this.where(place)) },
        ...this.columns.map((column) => ({
          ...look(column),
          class: column.kind,
          pxAlign: 0,
          label: column.series.label || this.chart.name,
          points: { fill: column.series.color, ...(column.kind === "line" ? {} : { show: false }) },
          value: (plot, _value, index, place) => (place === null ? "" : this.reading(this.columns[index - 1].series, plot.data[0][place])),
        })),
      ],
      bands: this.columns.flatMap(({ kind, series }, i) => (kind === "high" ? [{ series: [i + 1, i], fill: `${series.color}2e` }] : [])),
      cursor: { y: false },
      legend: { markers: { width: 0, fill: (_, index) => this.columns[index - 1].series.color }, mount: (_, table) => this.tip.replaceChildren(table) },
      hooks: { draw: [(plot) => this.marks(plot)], setCursor: [(plot) => this.showTip(plot)] },
    };
  }

  // Return the part of an axis that marks the beginning of epochs by their numbers, from 1 on, where there is room.
  epochs() {
    return {
      splits: (plot, _axis, low, high) => {
        const apart = (60 / plot.width) * (high - low);
        const shown = [];
        for (const [step] of this.chart.epochs)
          if (low < step && step < high && !(step - shown.at(-1) < apart)) shown.push(step);
        return shown;
      },
      values: (_, steps) => steps.map((step, i) => (i ? "" : "epoch ") + (new Map(this.chart.epochs).get(step) + 1)),
    };
  }

  // Draw a cross at the foot for each nan or infinite value, and a triangle at the top where values exploded.
  marks(plot) {
    const { ctx, bbox } = plot;
    const [foot, size] = [bbox.top + bbox.height - 3, 14 * uPlot.pxRatio];
    const bad = this.series.flatMap(({ points }) => points.filter((point) => !Number.isFinite(point[1])));
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    Object.assign(ctx, { fillStyle: RED, font: `${size}px system-ui,sans-serif`, textAlign: "center" });
    for (const [step] of bad) ctx.fillText("×", plot.valToPos(step, "x", true), foot);
    for (const step of this.chart.exploded) ctx.fillText("▲", plot.valToPos(step, "x", true), bbox.top + size);
    ctx.restore();
  }

  // -- reading values ---------------------------------------------------------------------------------------------------

  key(event) {
    const steps = this.plot.data[0];
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (move === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const from = this.plot.cursor.idx ?? steps.length;
    this.choose(steps[Math.max(0, Math.min(steps.length - 1, from + move))]);
  }

  choose(step) {
    this.step = step;
    this.plot?.setCursor(step === null ? { left: -10, top: -10 } : { left: this.plot.valToPos(step, "x"), top: 0 });
  }

  // Place the tip beside the pointer, in the half that the pointer is not in.
  showTip({ cursor: { left, top, idx }, over }) {
    this.tip.hidden = left < 0 || idx === null || idx === undefined;
    if (this.tip.hidden) return;
    const x = over.offsetLeft + left;
    const side = x + 12 + this.tip.offsetWidth < this.place.clientWidth ? x + 12 : Math.max(0, x - 12 - this.tip.offsetWidth);
    const height = top < over.clientHeight / 2 ? over.clientHeight / 2 : 0;
    Object.assign(this.tip.style, { left: `${side}px`, top: `${over.offsetTop + height}px` });
  }

  where(place) {
    const steps = this.plot.data[0];
    const [at, before] = [steps[place], place ? steps[place - 1] + 1 : steps[place]];
    const words = before < at && this.series[0].width > 1 ? `steps ${whole(before)} to ${whole(at)}` : `step ${whole(at)}`;
    const epoch = this.chart.epochs.filter(([step]) => step < at).at(-1);
    return words + (epoch ? ` · epoch ${epoch[1] + 1}` : "");
  }

  // Return a series' latest value at a step. A point of several replicas or values has the range, too.
  reading({ points, members }, step) {
    const point = points[placeAt(points, step)];
    if (!point) return "";
    const [, value, low, high] = point;
    const [least, greatest] = members.length > 1 ? this.whose(members, step) : ["", ""];
    return short(value) + (low < high ? ` (${short(low)}${least} to ${short(high)}${greatest})` : "");
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
  let isRestored = false;
  const lines = new Lines();
  const views = new Set(); // the redraw function of each view of the widget
  return {
    initialize({ model }) {
      isRestored = model.get("above") !== "";
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
        written.hidden = !(isRestored && model.get("written"));
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
        if (model.get("ended") && !isRestored) model.send({ replaced: true });
        size.disconnect();
        charts.forEach((chart) => chart.plot.destroy());
        views.delete(changed);
        model.off("change:above", changed);
        model.off("change:below", changed);
        model.off("comm_live_update", onKernelEnded);
      };
    },
  };
};
