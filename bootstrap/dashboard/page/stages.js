// The map: a band for each stage, its members in it, who sends to whom, who averaged with whom.

import { amount, called, drawn, sync, text } from "./live.js";

const NAMED = 14; // members in a stage that get a name of their own
const HEAD = 54;
const STEP = 66;
const LEAST = 128; // pixels that a stage takes

export class StageMap {
  constructor(parent, choose) {
    this.parent = parent;
    this.choose = choose;
    this.svg = drawn("svg", { role: "img", "aria-label": "The stages" });
    this.layers = ["bands", "flows", "pairs", "members", "words"].map((name) => drawn("g", { class: name }));
    this.svg.append(...this.layers);
    parent.append(this.svg);
    new ResizeObserver(() => this.last && this.draw(...this.last)).observe(parent);
  }

  draw(stages, rows, chosen) {
    this.last = [stages, rows, chosen];
    const columns = Array.from({ length: stages }, () => []);
    for (const row of rows) if (row.stage < stages) columns[row.stage].push(row);
    const most = Math.max(1, ...columns.map((column) => column.length));
    const small = most <= NAMED;
    this.upright = this.parent.clientWidth < 560; // a phone: stages one below another
    const places = this.upright ? this.below(columns, small) : this.beside(columns, small, most);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", this.height);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    const answering = rows.filter((row) => row.silent === null).length;
    this.svg.setAttribute("aria-label", `${stages} stages, ${answering} of ${rows.length} members answer. The table of members says the same.`);
    this.drawBands(columns);
    this.drawFlows(rows, places, small);
    this.drawPairs(rows, places, small, chosen);
    this.drawMembers(rows, places, small, chosen);
  }

  beside(columns, small, most) {
    const room = Math.max(LEAST, this.parent.clientWidth - 4);
    const wide = Math.max(LEAST, Math.floor(room / columns.length));
    this.width = Math.max(room, wide * columns.length);
    const gap = small ? 16 : 56;
    const inner = Math.min(wide - gap - 20, 300);
    const across = small ? 1 : Math.max(4, Math.floor(inner / 15));
    const deep = small ? most * STEP : Math.ceil(most / across) * 15 + 20;
    this.height = HEAD + deep + 14;
    this.bands = columns.map((_, i) => ({ x: i * wide + gap / 2, y: 2, width: wide - gap, height: this.height - 4 }));
    return this.place(columns, small, (band, index, count) => small
      ? [band.x + band.width / 2, HEAD + (index + 0.5) * (deep / count)]
      : [band.x + band.width / 2 + ((index % across) - (across - 1) / 2) * 15, HEAD + 12 + Math.floor(index / across) * 15]);
  }

  below(columns, small) {
    this.width = Math.max(LEAST, this.parent.clientWidth - 4);
    const pitch = small ? 62 : 15;
    const across = Math.max(1, Math.floor((this.width - 24) / pitch));
    let y = 2;
    this.bands = columns.map((column) => {
      const lines = Math.max(1, Math.ceil(column.length / across));
      const band = { x: 2, y, width: this.width - 4, height: HEAD + lines * (small ? STEP : 15) + 8 };
      y += band.height + 26;
      return band;
    });
    this.height = y - 20;
    return this.place(columns, small, (band, index, count) => {
      const inLine = Math.min(across, count - Math.floor(index / across) * across);
      return [band.x + band.width / 2 + ((index % across) - (inLine - 1) / 2) * pitch,
        band.y + HEAD + (small ? 26 : 8) + Math.floor(index / across) * (small ? STEP : 15)];
    });
  }

  place(columns, small, where) {
    const places = new Map();
    columns.forEach((column, stage) => column.forEach((row, index) => {
      places.set(row.id, where(this.bands[stage], index, column.length));
    }));
    return places;
  }

  drawBands(columns) {
    const items = columns.map((column, stage) => ({ stage, band: this.bands[stage], column }));
    sync(this.layers[0], items, (item) => item.stage, () => {
      const group = drawn("g");
      group.append(drawn("rect", { rx: 12 }), drawn("text", { class: "title" }), drawn("text", { class: "sub" }));
      return group;
    }, (group, { stage, band, column }) => {
      const [box, title, sub] = group.children;
      const well = column.filter((row) => row.silent === null && row.state !== "joining");
      group.setAttribute("class", well.length === 0 ? "bad" : well.length === 1 ? "warning" : "");
      for (const [key, value] of Object.entries(band)) box.setAttribute(key, value);
      title.setAttribute("x", band.x + 14);
      title.setAttribute("y", band.y + 23);
      sub.setAttribute("x", band.x + 14);
      sub.setAttribute("y", band.y + 41);
      text(title, `Stage ${stage}`);
      const rate = well.reduce((sum, row) => sum + row.rate, 0);
      const short = band.width < 190 ? "" : ` · ${amount(rate)} tok/s`;
      text(sub, well.length ? `${well.length} replica${well.length === 1 ? "" : "s"}${short}` : "nobody serves it");
    });
  }

  drawFlows(rows, places, small) {
    const stageOf = new Map(rows.map((row) => [row.id, row.stage]));
    const flows = small
      ? rows.flatMap((row) => row.silent !== null ? [] : Object.entries(row.to).filter(([to]) => places.has(to)).map(([to, rate]) => ({ key: `${row.id}>${to}`, from: places.get(row.id), to: places.get(to), rate })))
      : this.ribbons(rows, stageOf);
    const most = Math.max(...flows.map((flow) => flow.rate), 1e-9);
    sync(this.layers[1], flows, (flow) => flow.key, () => drawn("path"), (path, flow) => {
      path.setAttribute("class", "flow");
      path.setAttribute("d", this.curve(flow.from, flow.to, small ? 19 : 3));
      path.setAttribute("stroke-width", (small ? 1 + 3 * flow.rate / most : 3 + 7 * flow.rate / most).toFixed(2));
    });
    // between whole stages a number says how much; one line between two members is one of many
    sync(this.layers[4], small ? [] : flows, (flow) => flow.key, () => drawn("text", { class: "sub", "text-anchor": "middle" }), (label, flow) => {
      label.setAttribute("x", (flow.from[0] + flow.to[0]) / 2 + (this.upright ? 26 : 0));
      label.setAttribute("y", (flow.from[1] + flow.to[1]) / 2 + (this.upright ? 4 : -12));
      text(label, `${amount(flow.rate, 2)}/s`);
    });
  }

  ribbons(rows, stageOf) {
    const sums = new Map();
    for (const row of rows) {
      if (row.silent !== null) continue;
      for (const [to, rate] of Object.entries(row.to)) {
        if (!stageOf.has(to)) continue;
        const key = `${row.stage}>${stageOf.get(to)}`;
        sums.set(key, (sums.get(key) || 0) + rate);
      }
    }
    return [...sums].map(([key, rate]) => {
      const [from, to] = key.split(">").map((stage) => this.bands[stage]);
      const ends = this.upright
        ? [[from.x + from.width / 2, from.y + from.height], [to.x + to.width / 2, to.y]]
        : [[from.x + from.width, from.y + from.height / 2], [to.x, to.y + to.height / 2]];
      return { key, from: ends[0], to: ends[1], rate };
    });
  }

  curve([x, y], [u, v], gap) {
    if (this.upright) {
      const bend = (v - y) / 2;
      return `M${x} ${y + gap}C${x} ${y + bend} ${u} ${v - bend} ${u} ${v - gap}`;
    }
    const side = u > x ? 1 : -1;
    const bend = (u - x) / 2;
    return `M${x + side * gap} ${y}C${x + bend} ${y} ${u - bend} ${v} ${u - side * gap} ${v}`;
  }

  drawPairs(rows, places, small, chosen) {
    const pairs = new Map();
    const partnerOf = new Map(rows.map((row) => [row.id, row.partner]));
    for (const row of rows) {
      if (!row.partner || row.silent !== null || !places.has(row.partner)) continue;
      if (partnerOf.get(row.partner) !== row.id) continue; // one of the two has met somebody else since
      if (!small && row.id !== chosen && row.partner !== chosen) continue;
      const key = [row.id, row.partner].sort().join("=");
      pairs.set(key, { key, from: places.get(row.id), to: places.get(row.partner) });
    }
    sync(this.layers[2], [...pairs.values()], (pair) => pair.key, () => drawn("path"), (path, { from, to }) => {
      const far = Math.hypot(to[0] - from[0], to[1] - from[1]);
      const bulge = 14 + far * 0.22;
      const middle = [(from[0] + to[0]) / 2, (from[1] + to[1]) / 2];
      const control = this.upright ? [middle[0], middle[1] - bulge] : [middle[0] - bulge, middle[1]];
      path.setAttribute("d", `M${from[0]} ${from[1]}Q${control[0]} ${control[1]} ${to[0]} ${to[1]}`);
    });
  }

  drawMembers(rows, places, small, chosen) {
    const size = small ? 17 : 5;
    const round = 2 * Math.PI * (size - 2);
    sync(this.layers[3], rows.filter((row) => places.has(row.id)), (row) => row.id, (row) => {
      const group = drawn("g");
      group.append(drawn("circle", { class: "disc" }), drawn("circle", { class: "busy" }), drawn("text"), drawn("title"));
      group.addEventListener("click", () => this.choose(row.id));
      return group;
    }, (group, row) => {
      const [disc, busy, label, title] = group.children;
      const [x, y] = places.get(row.id);
      group.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
      group.setAttribute("class", [small ? "" : "tiny", row.silent === null ? row.state : "silent", row.id === chosen ? "chosen" : ""].join(" "));
      disc.setAttribute("r", size);
      disc.setAttribute("fill-opacity", small || row.silent !== null ? 1 : 0.12 + 0.88 * (row.busy || 0));
      busy.setAttribute("r", size - 2);
      busy.setAttribute("stroke-dasharray", `${round * (small && row.silent === null ? row.busy || 0 : 0)} ${round}`);
      busy.setAttribute("transform", "rotate(-90)");
      label.setAttribute("y", size + 13);
      text(label, small ? called(row.id) : "");
      text(title, `${called(row.id)}, ${row.id}: ${row.silent === null ? row.state : "does not answer"}, step ${row.step}, round ${row.round}`);
    });
  }
}
