// The live view in the browser. It keeps the points itself: the kernel sends only what is new, as custom messages,
// and now and then a snapshot of everything, which heals whatever was missed.

const COLORS = ["#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#ca8a04", "#06b6d4", "#ec4899"];
const MOST_POINTS = 600;
const [WIDTH, HEIGHT] = [280, 180];
const [LEFT, RIGHT, TOP, BOTTOM] = [48, 10, 26, 22];
const SVG = "http://www.w3.org/2000/svg";

const STYLE = `
.distnb-live{font:13px/1.5 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--jp-ui-font-color1,inherit);padding:4px 0}
.distnb-live .status{display:flex;gap:8px;align-items:center}
.distnb-live .dot{width:9px;height:9px;border-radius:50%;background:#10b981;flex:none}
.distnb-live .dot.starting,.distnb-live .dot.stopping,.distnb-live .dot.interrupted{background:#eab308}
.distnb-live .dot.ended{background:#808080}
.distnb-live .dot.failed,.distnb-live .dot.died{background:#ef4444}
.distnb-live .dot.running{animation:distnb-pulse 1.4s ease-in-out infinite}
@keyframes distnb-pulse{50%{opacity:.35}}
.distnb-live .charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(240px,1fr));gap:4px 8px}
.distnb-live svg{font-size:11px;width:100%;max-width:340px}
.distnb-live svg text{fill:var(--jp-ui-font-color2,#808080)}
.distnb-live svg .name{font-weight:600;fill:var(--jp-ui-font-color1,#808080)}
.distnb-live svg .grid{stroke:var(--jp-border-color2,#80808040)}
.distnb-live table{border-collapse:collapse;font-size:12px;margin:2px 0}
.distnb-live th{font-weight:normal;color:var(--jp-ui-font-color2,#808080)}
.distnb-live th,.distnb-live td{padding:1px 14px 1px 0;text-align:left;white-space:nowrap;border:none;background:none;
  font-variant-numeric:tabular-nums}
.distnb-live .number{text-align:right}
`;

// The least and greatest of numbers that may be null (nan or infinite on the kernel's side; a value itself is then a word).
const least = (a, b) => (a === null || (b !== null && b < a) ? b : a);
const greatest = (a, b) => (a === null || (b !== null && b > a) ? b : a);
// One point for two: what is nan or infinite (a word) is not hidden by what follows.
const joined = (a, b) => [b[0], typeof a[1] === "string" ? a[1] : b[1], least(a[2], b[2]), greatest(a[3], b[3])];

class Line {
  constructor(points = [], width = 1) {
    this.points = points;
    this.width = width;
    this.count = width;
  }
  add(point) {
    const last = this.points[this.points.length - 1];
    if (last && this.count < this.width) {
      this.points[this.points.length - 1] = joined(last, point);
      this.count += 1;
      return;
    }
    if (this.points.length >= MOST_POINTS) {
      const halved = [];
      for (let i = 0; i < this.points.length; i += 2) {
        halved.push(joined(this.points[i], this.points[i + 1] ?? this.points[i]));
      }
      this.points = halved;
      this.width *= 2;
    }
    this.points.push(point);
    this.count = 1;
  }
}

class Store {
  constructor() {
    this.curves = new Map();
    this.head = { state: "starting", text: "" };
    this.table = { header: [], rows: [], numeric: [] };
    this.written = "";
    this.restored = false;
    this.views = new Set();
    this.sequence = -1;
  }
  load(snapshot) {
    if (!snapshot || snapshot.sequence === undefined || snapshot.sequence < this.sequence) return;
    this.sequence = snapshot.sequence;
    this.curves = new Map(
      Object.entries(snapshot.curves).map(([name, curve]) => [
        name,
        {
          differs: curve.differs,
          lines: new Map(Object.entries(curve.lines).map(([r, l]) => [Number(r), new Line(l.points, l.width)])),
        },
      ]),
    );
    this.head = snapshot.head;
    this.table = snapshot.table;
    this.written = snapshot.written ?? "";
    this.redraw();
  }
  append(message) {
    if (message.sequence <= this.sequence) return;
    this.sequence = message.sequence;
    for (const [name, lines] of Object.entries(message.points)) {
      if (!this.curves.has(name)) this.curves.set(name, { differs: false, lines: new Map() });
      const curve = this.curves.get(name);
      curve.differs = message.differs.includes(name);
      for (const [replica, points] of Object.entries(lines)) {
        const key = Number(replica);
        if (!curve.lines.has(key)) curve.lines.set(key, new Line());
        for (const point of points) curve.lines.get(key).add(point);
      }
    }
    this.head = message.head;
    this.table = message.table;
    this.redraw();
  }
  // The kernel ended, or was restarted: nothing will come any more.
  orphan() {
    if (!["starting", "running"].includes(this.head.state)) return;
    this.head = { ...this.head, state: "died", text: this.head.text.replace(this.head.state, "the kernel ended") };
    this.redraw();
  }
  redraw() {
    for (const view of this.views) view.schedule();
  }
}

const element = (tag, className, parent) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  parent?.appendChild(made);
  return made;
};
const drawn = (tag, attributes, parent, text) => {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
};
const shortNumber = (value) => {
  if (typeof value !== "number") return value ?? "";
  if (value !== 0 && Math.abs(value) >= 1e5) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
};
// A name in little room: its end tells as much as its beginning.
const shortName = (name, room) => {
  const most = Math.max(Math.floor(room / 7.3), 8);
  const kept = most - 1;
  return name.length <= most ? name : `${name.slice(0, Math.ceil(kept / 2))}…${name.slice(-Math.floor(kept / 2))}`;
};
const niceTicks = (low, high, about = 4) => {
  const raw = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && ticks.length < 12; i++) ticks.push(i * step);
  return ticks;
};
const span = (values) => {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (high > low) return [low, high];
  const half = Math.abs(low) * 0.05 || 0.5;
  return [low - half, high + half];
};

class View {
  constructor(store, root) {
    this.store = store;
    this.root = element("div", "distnb-live", root);
    element("style", "", this.root).textContent = STYLE;
    this.status = element("div", "status", this.root);
    this.dot = element("span", "dot", this.status);
    this.head = element("span", "head", this.status);
    this.charts = element("div", "charts", this.root);
    this.table = element("table", "", this.root);
    this.written = element("details", "written", this.root);
    this.written.hidden = true;
    element("summary", "", this.written).textContent = "The page was reloaded while the cell ran; the end of what it wrote";
    this.text = element("pre", "", this.written);
    this.pending = false;
    this.schedule();
  }
  schedule() {
    if (this.pending) return;
    this.pending = true;
    // A hidden tab draws no frames; it draws once when it is looked at.
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }
  draw() {
    const { head, table, curves } = this.store;
    this.dot.className = `dot ${head.state}`;
    this.head.textContent = head.text;
    this.charts.replaceChildren(...[...curves].map(([name, curve]) => this.chart(name, curve)));
    this.drawTable(table);
    const missed = this.store.restored && this.store.written;
    this.written.hidden = !missed;
    if (missed) this.text.textContent = this.store.written;
  }
  drawTable(table) {
    this.table.replaceChildren();
    if (!table.rows.length) return;
    const row = (tag, values) => {
      const line = element("tr", "", this.table);
      values.forEach((value, i) => {
        element(tag, table.numeric.includes(i) ? "number" : "", line).textContent = value;
      });
    };
    row("th", table.header);
    for (const values of table.rows) row("td", values);
  }
  chart(name, curve) {
    const total = this.store.head.total;
    let lines = [...curve.lines].sort((a, b) => a[0] - b[0]).map(([replica, line]) => [[replica], line]);
    if (!curve.differs && lines.length > 1) {
      const end = (line) => line.points[line.points.length - 1][0];
      const furthest = lines.reduce((best, each) => (end(each[1]) > end(best[1]) ? each : best));
      lines = [[lines.map(([replicas]) => replicas[0]), furthest[1]]];
    }
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.dataset.name = name;
    const points = lines.flatMap(([, line]) => line.points);
    const [xLow, xHigh] = span(points.map((point) => point[0]));
    let [yLow, yHigh] = span(points.flatMap((point) => [point[2], point[3]]));
    const pad = (yHigh - yLow) * 0.05;
    [yLow, yHigh] = [yLow - pad, yHigh + pad];
    const x = (step) => LEFT + ((step - xLow) / (xHigh - xLow)) * (WIDTH - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - ((value - yLow) / (yHigh - yLow)) * (HEIGHT - TOP - BOTTOM);
    const told = lines.slice(0, 8).map(([replicas, line]) => {
      const who = total > 1 ? ` [${replicas.length > 1 ? `${replicas[0]}-${replicas[replicas.length - 1]}` : replicas[0]}]` : "";
      // With many lines the title says which is which; the table has their values.
      const value = lines.length <= 2 ? shortNumber(line.points[line.points.length - 1]?.[1]) : "";
      return [(value + who).trim(), COLORS[replicas[0] % COLORS.length]];
    });
    const room = WIDTH - LEFT - told.reduce((taken, [words]) => taken + 6 + 6.5 * words.length, 0);
    const title = drawn("text", { x: LEFT, y: 16 }, svg);
    drawn("title", {}, title, name);
    drawn("tspan", { class: "name" }, title, shortName(name, room));
    for (const [words, color] of told) drawn("tspan", { dx: 6, style: `fill:${color}` }, title, words);
    for (const tick of niceTicks(yLow, yHigh)) {
      drawn("path", { class: "grid", d: `M${LEFT} ${y(tick)}H${WIDTH - RIGHT}` }, svg);
      drawn("text", { x: LEFT - 5, y: y(tick) + 3.5, "text-anchor": "end" }, svg, shortNumber(tick));
    }
    for (const tick of niceTicks(xLow, xHigh))
      drawn("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, svg, shortNumber(tick));
    for (const [replicas, line] of lines) this.line(svg, line, x, y, COLORS[replicas[0] % COLORS.length], replicas.length > 1 || total === 1);
    this.marks(svg, points.filter((point) => typeof point[1] !== "number").map((point) => [x(point[0]), point[1]]));
    return svg;
  }
  // A cross at the foot for each value that is nan or infinite; the first says which of them it is.
  marks(svg, places) {
    if (!places.length) return;
    const foot = HEIGHT - BOTTOM - 4;
    const crosses = places.map(([at]) => `M${(at - 3).toFixed(1)} ${foot - 3}l6 6m0 -6l-6 6`).join("");
    drawn("path", { class: "mark", d: crosses, fill: "none", stroke: "#ef4444", "stroke-width": 1.5 }, svg);
    const [first, word] = places.reduce((best, each) => (each[0] < best[0] ? each : best));
    const left = first < WIDTH - 50;
    drawn("text", { x: first + (left ? 6 : -6), y: foot + 3, "text-anchor": left ? "start" : "end", style: "fill:#ef4444" }, svg, word);
  }
  line(svg, line, x, y, color, thick) {
    const runs = [[]]; // where a value was nan or infinite the line is broken
    for (const point of line.points) {
      if (typeof point[1] === "number") runs[runs.length - 1].push(point);
      else if (runs[runs.length - 1].length) runs.push([]);
    }
    const at = (point, i) => `${x(point[0]).toFixed(1)} ${y(point[i]).toFixed(1)}`;
    let path = "";
    for (const points of runs) {
      if (!points.length) continue;
      if (points.some((point) => point[2] !== point[3])) {
        const up = points.map((point) => at(point, 3)).join("L");
        const down = [...points].reverse().map((point) => at(point, 2)).join("L");
        drawn("path", { class: "band", d: `M${up}L${down}Z`, fill: color, "fill-opacity": 0.18 }, svg);
      }
      path += `M${points.map((point) => at(point, 1)).join("L")}${points.length === 1 ? "h0" : ""}`;
    }
    if (!path) return;
    const width = line.points.length === 1 ? 5 : thick ? 2.6 : 1.3;
    drawn("path", { class: "line", d: path, fill: "none", stroke: color, "stroke-width": width, "stroke-linejoin": "round", "stroke-linecap": "round" }, svg);
  }
}

// initialize and render are given different proxies of the model: what they share lives in this closure.
export default () => {
  const store = new Store();
  return {
    initialize({ model }) {
      const snapshot = model.get("snapshot");
      store.load(snapshot);
      // A new widget has drawn nothing yet; this one was drawn in a page that is gone.
      store.restored = (snapshot?.sequence ?? 0) > 0;
      if (store.restored) model.send({ restored: true });
      model.on("change:snapshot", () => store.load(model.get("snapshot")));
      model.on("comm_live_update", () => store.orphan());
      model.on("msg:custom", (message) => store.append(message));
    },
    render({ el }) {
      const view = new View(store, el);
      store.views.add(view);
      return () => store.views.delete(view);
    },
  };
};
