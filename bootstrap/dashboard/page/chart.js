// One chart: lines over time or tokens, a band, a crosshair for the pointer and for the arrow keys.

import { amount, clock, drawn, duration, element, sync, text } from "./live.js";

const HEIGHT = 210;
const MARGIN = { left: 52, right: 14, top: 12, bottom: 26 };

export function niceTicks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || power;
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

const TIMES = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];

function timeTicks(low, high, most) {
  const step = TIMES.find((s) => (high - low) / s <= most) || 604800 * 4;
  const shift = new Date(low * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let t = Math.ceil((low - shift) / step) * step + shift; t <= high; t += step) ticks.push(t);
  return ticks;
}

// A mean over some eightieth of the points to either side: forwards, then backwards, so that it lags behind nothing.
function smoothed(values) {
  const keep = 1 - 1 / Math.max(1, values.length / 80);
  const forwards = forgetting(values, keep);
  return forgetting(forwards.reverse(), keep).reverse();
}

function forgetting(values, keep) {
  let mean = null;
  return values.map((value) => {
    if (value !== null) mean = mean === null ? value : keep * mean + (1 - keep) * value;
    return value === null ? null : mean;
  });
}

export class Chart {
  // `lines`: [{ key, label, style }]; `band(point)`: [low, high] or null; `value(point, key)`; `format(value)`;
  // `beside()`: { points: [{ time, tokens, value }], held_out, bigram } that were measured apart, or null
  constructor(parent, settings) {
    Object.assign(this, { band: null, beside: () => null, value: (point, key) => point[key], format: (v) => amount(v), log: false }, settings);
    this.points = [];
    this.apart = [];
    this.bigram = null;
    this.at = null;
    const heading = element("h3");
    this.latest = element("p", { class: "latest" });
    heading.append(settings.title);
    this.svg = drawn("svg", { role: "slider", tabindex: "0", "aria-label": `${settings.title}, move with the arrow keys` });
    this.tip = element("p", { class: "tip", hidden: "" });
    this.legend = element("ul", { class: "legend" });
    const head = element("div", { class: "head" }, heading, this.latest);
    const figure = element("figure", { class: "card" }, head, element("p", { class: "quiet" }, settings.about), this.svg, this.tip, this.legend);
    this.figure = figure;
    parent.append(figure);
    new ResizeObserver(() => this.draw()).observe(figure);
    this.listen();
  }

  listen() {
    const leave = () => { this.at = null; this.mark(); };
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.points.length) return;
      const x = event.clientX - this.svg.getBoundingClientRect().left;
      this.at = this.nearest(x);
      this.mark();
    });
    this.svg.addEventListener("pointerleave", leave);
    this.svg.addEventListener("blur", leave);
    this.svg.addEventListener("keydown", (event) => {
      const far = Math.max(1, Math.round(this.points.length / 20));
      const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -far, PageUp: far, Home: -1e9, End: 1e9 };
      if (!(event.key in moves) || !this.points.length) return;
      event.preventDefault();
      const from = this.at === null ? this.points.length - 1 : this.at;
      this.at = Math.min(this.points.length - 1, Math.max(0, from + moves[event.key]));
      this.mark();
    });
  }

  nearest(pixel) {
    let best = 0;
    this.points.forEach((point, i) => {
      if (Math.abs(this.x(point[this.across]) - pixel) < Math.abs(this.x(this.points[best][this.across]) - pixel)) best = i;
    });
    return best;
  }

  // Measurements from `since` on are drawn, points all.
  show(points, across, moment, since) {
    this.points = points.filter((p) => this.lines.some((l) => this.known(this.value(p, l.key))));
    this.across = across;
    this.moment = moment;
    const measured = this.beside();
    this.apart = measured ? measured.points.filter((p) => p.time >= since) : [];
    this.apartLabel = measured && measured.held_out ? "held-out text" : "text of the training, measured apart";
    this.bigram = measured ? measured.bigram : null;
    this.explain();
    if (this.at !== null) this.at = Math.min(this.at, this.points.length - 1);
    this.draw();
  }

  explain() {
    const entries = [...this.lines.map((line) => [line.style, line.label])];
    if (this.band) entries.push(["band", this.bandLabel]);
    if (this.apart.length) entries.push(["second", this.apartLabel]);
    if (this.bigram !== null) entries.push(["third", `bigram of that text, ${this.format(this.bigram)}: a model that sees one token`]);
    sync(this.legend, entries.length > 1 ? entries : [], ([, label]) => label, ([key, label]) => element("li", { "data-kind": key }, label), () => {});
  }

  known(value) {
    return value !== null && value !== undefined && Number.isFinite(value) && (!this.log || value > 0);
  }

  // The scales: this.x and this.y from values to pixels.
  scale() {
    const xs = [...this.points, ...this.apart].map((p) => p[this.across]);
    const ys = [...this.points.flatMap((p) => [...this.lines.map((l) => this.value(p, l.key)), ...((this.band && this.band(p)) || [])]),
      ...this.apart.map((p) => p.value), this.bigram].filter((v) => this.known(v));
    const bend = this.log ? Math.log10 : (v) => v;
    let [low, high] = [Math.min(...ys), Math.max(...ys)];
    if (this.fromZero) low = 0;
    const room = (bend(high) - bend(low)) * 0.07 || Math.abs(bend(high)) * 0.1 || 1;
    this.bottom = this.fromZero ? 0 : bend(low) - room;
    this.top = bend(high) + room;
    this.first = Math.min(...xs);
    this.last = Math.max(...xs);
    const [width, height] = [this.width - MARGIN.left - MARGIN.right, HEIGHT - MARGIN.top - MARGIN.bottom];
    this.x = (v) => MARGIN.left + (width * (v - this.first)) / (this.last - this.first || 1);
    this.y = (v) => MARGIN.top + height * (1 - (bend(v) - this.bottom) / (this.top - this.bottom));
  }

  draw() {
    this.width = Math.max(220, this.figure.clientWidth - 24);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("height", HEIGHT);
    this.svg.replaceChildren();
    if (this.points.length < 2) {
      const note = drawn("text", { x: this.width / 2, y: HEIGHT / 2, class: "axis", "text-anchor": "middle" });
      note.textContent = "nothing measured yet";
      this.svg.append(note);
      text(this.latest, "");
      this.say();
      return;
    }
    this.scale();
    this.drawAxes();
    if (this.band) this.svg.append(drawn("path", { class: "band", d: this.bandPath() }));
    for (const line of this.lines) {
      const raw = (point) => this.value(point, line.key);
      if (line.smooth) this.svg.append(drawn("path", { class: `line raw ${line.style}`, d: this.path(raw) }));
      const smooth = line.smooth && smoothed(this.points.map(raw));
      this.svg.append(drawn("path", { class: `line ${line.style}`, d: this.path(smooth ? (_, i) => smooth[i] : raw) }));
    }
    if (this.bigram !== null) this.svg.append(drawn("path", { class: "line third", d: `M${MARGIN.left} ${this.y(this.bigram)}H${this.width - MARGIN.right}` }));
    const corners = this.apart.map((p) => `${this.x(p[this.across]).toFixed(1)} ${this.y(p.value).toFixed(1)}`);
    if (corners.length) this.svg.append(drawn("path", { class: "line second", d: `M${corners.join("L")}` }));
    for (const p of this.apart) this.svg.append(drawn("circle", { class: "dot second", cx: this.x(p[this.across]), cy: this.y(p.value), r: 3.5 }));
    this.cross = drawn("g", { class: "cross" });
    this.svg.append(this.cross);
    const last = this.points[this.points.length - 1];
    text(this.latest, this.known(this.value(last, this.lines[0].key)) ? this.format(this.value(last, this.lines[0].key)) : "–");
    this.mark();
  }

  drawAxes() {
    const most = Math.max(2, Math.floor(this.width / 110));
    const isTime = this.across === "time";
    for (const tick of (isTime ? timeTicks : niceTicks)(this.first, this.last, most)) {
      const label = drawn("text", { x: this.x(tick), y: HEIGHT - 8, class: "axis", "text-anchor": "middle" });
      label.textContent = isTime ? clock(tick, this.last - this.first) : amount(tick);
      if (this.x(tick) > MARGIN.left + 8 && this.x(tick) < this.width - 24) this.svg.append(label);
    }
    const values = this.log ? niceTicks(this.bottom, this.top, 4).map((v) => 10 ** v) : niceTicks(this.bottom, this.top, 4);
    for (const tick of values) {
      const label = drawn("text", { x: MARGIN.left - 8, y: this.y(tick) + 4, class: "axis", "text-anchor": "end" });
      label.textContent = this.format(tick);
      this.svg.append(drawn("path", { class: "grid", d: `M${MARGIN.left} ${this.y(tick)}H${this.width - MARGIN.right}` }), label);
    }
  }

  path(value_of) {
    let d = "";
    let pen = "M";
    for (const [i, point] of this.points.entries()) {
      const value = value_of(point, i);
      if (this.known(value)) {
        d += `${pen}${this.x(point[this.across]).toFixed(1)} ${this.y(value).toFixed(1)}`;
        pen = "L";
      } else pen = "M";
    }
    return d;
  }

  bandPath() {
    const spans = this.points.map((p) => [p[this.across], this.band(p)]).filter(([, span]) => span && span.every((v) => this.known(v)));
    if (!spans.length) return "";
    const edge = (i) => spans.map(([x, span]) => `${this.x(x).toFixed(1)} ${this.y(span[i]).toFixed(1)}`);
    return `M${edge(1).join("L")}L${edge(0).reverse().join("L")}Z`;
  }

  // The crosshair at this.at, else at the moment that the page shows.
  mark() {
    if (!this.cross || this.points.length < 2) return;
    this.cross.replaceChildren();
    const at = this.at;
    if (at === null && this.moment !== null) {
      const past = this.points.filter((p) => p.time <= this.moment).pop() || this.points[0];
      this.cross.append(drawn("path", { class: "moment", d: `M${this.x(past[this.across])} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}` }));
    }
    this.tip.hidden = at === null;
    if (at !== null) {
      const point = this.points[at];
      const x = this.x(point[this.across]);
      this.cross.append(drawn("path", { class: "moment", d: `M${x} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}` }));
      for (const line of this.lines) {
        const value = this.value(point, line.key);
        if (this.known(value)) this.cross.append(drawn("circle", { class: `dot ${line.style}`, cx: x, cy: this.y(value), r: 4 }));
      }
      text(this.tip, this.words(point));
      this.tip.style.left = `${Math.min(Math.max(x, 90), this.width - 90)}px`;
    }
    this.say();
  }

  words(point) {
    const parts = this.lines.map((line) => {
      const value = this.value(point, line.key);
      return `${line.label} ${this.known(value) ? this.format(value) : "–"}`;
    });
    const apart = this.apart.filter((p) => p.time <= point.time).pop();
    if (apart) parts.push(`${this.apartLabel} ${this.format(apart.value)}`);
    return `${clock(point.time)} · ${amount(point.tokens)} tokens · ${parts.join(" · ")}`;
  }

  say() {
    const last = this.points.length - 1;
    const at = this.at === null ? Math.max(0, last) : this.at;
    this.svg.setAttribute("aria-valuemin", 0);
    this.svg.setAttribute("aria-valuemax", Math.max(0, last));
    this.svg.setAttribute("aria-valuenow", at);
    const span = last > 0 ? `, ${last + 1} points over ${duration(this.points[last].time - this.points[0].time)}` : "";
    this.svg.setAttribute("aria-valuetext", last >= 0 ? this.words(this.points[at]) + span : "nothing measured yet");
  }
}
