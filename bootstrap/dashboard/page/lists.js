// The tables and lists of the page.

import { amount, clock, duration, element, end, fixed, sync, text } from "./live.js";

const MOST_GIVERS = 20;
const MOST_SHOWN = 100;
const MOST_TOLD = 60;

const cells = (row, values) => values.forEach((value, i) => text(row.cells[i], value));

function table(target, caption, headings, left) {
  if (target.tHead) return target.tBodies[0];
  target.append(element("caption", { class: "unseen" }, caption));
  const line = element("tr");
  headings.forEach((heading, i) => line.append(element("th", { scope: "col", class: left.includes(i) ? "left" : "" }, heading)));
  target.append(element("thead", {}, line), element("tbody"));
  return target.tBodies[0];
}

function lineOf(count, left) {
  const line = element("tr");
  line.append(element("th", { scope: "row", class: "left" }));
  for (let i = 1; i < count; i++) line.append(element("td", { class: left.includes(i) ? "left" : "" }));
  return line;
}

export function drawContributions(target, rows) {
  const body = table(target, "Members by the tokens that they have trained on", ["member", "stage", "tokens", "share", "rounds shared"], [0, 3]);
  const givers = [...rows].sort((a, b) => b.tokens - a.tokens).slice(0, MOST_GIVERS);
  const most = Math.max(1, ...givers.map((row) => row.tokens));
  sync(body, givers, (row) => row.id, () => {
    const line = lineOf(5, [3]);
    line.cells[3].append(element("meter", { min: 0, "aria-label": "tokens, of the most that one has" }));
    return line;
  }, (line, row) => {
    cells(line, [end(row.id), String(row.stage), amount(row.tokens)]);
    line.cells[0].title = row.id;
    const meter = line.cells[3].firstChild;
    meter.max = most;
    meter.value = row.tokens;
    text(line.cells[4], amount(row.pairs));
  });
}

const SENTENCES = {
  joined: (who, stage) => `${who} joined stage ${stage}`,
  left: (who, stage) => `${who} is gone from stage ${stage}`,
  silent: (who, stage) => `${who} of stage ${stage} does not answer`,
  back: (who, stage) => `${who} of stage ${stage} answers again`,
  moved: (who, stage) => `${who} moved to stage ${stage}`,
};

export function drawHappenings(target, happenings, moment) {
  const told = happenings.filter((h) => moment === null || h.time <= moment).slice(-MOST_TOLD).reverse();
  sync(target, told, (h) => `${h.time} ${h.kind} ${h.peer}`, (h) => {
    const item = element("li", { "data-kind": h.kind in SENTENCES ? h.kind : "" });
    const sentence = SENTENCES[h.kind] || ((who) => `${who}: ${h.kind}`);
    item.append(element("time", {}, clock(h.time)), ` ${sentence(end(h.peer), h.stage)}`);
    return item;
  }, () => {});
}

export function drawSamples(target, note, samples, moment) {
  const written = samples.filter((sample) => moment === null || sample.time <= moment).reverse();
  text(note, written.length ? "What the weights wrote, a minute apart, the latest first; the first words are given." : "None yet: it takes a replica of each stage, and up to a minute.");
  sync(target, written, (sample) => `${sample.time} ${sample.step}`, (sample) => {
    const of = `step ${amount(sample.step)}, round ${amount(sample.round)}${sample.loss === null ? "" : `, loss ${fixed(sample.loss, 3)}`}`;
    return element("li", {}, element("p", { class: "quiet" }, element("time", {}, clock(sample.time)), ` ${of}`), element("blockquote", {}, sample.words));
  }, () => {});
}

export function drawGivers(target, note, givers) {
  text(note, givers.length ? "What members have signed for each other, in all lives of their nodes." : "Nobody has signed yet: receipts are there a minute after training has begun.");
  const body = table(target, "Members by what others have signed for", ["name", "member", "tokens", "share", "rounds", "signed by"], [0, 1]);
  sync(body, givers, (giver) => giver.peer, () => lineOf(6, [0, 1]), (line, giver) => {
    line.cells[1].title = giver.peer;
    cells(line, [giver.name || "–", end(giver.peer), amount(giver.tokens), `${Math.round(100 * giver.share)} %`, amount(giver.rounds), String(giver.signers)]);
  });
}

function matches(row, wanted) {
  const stage = /^stage\s*(\d+)$/.exec(wanted);
  if (stage) return row.stage === Number(stage[1]);
  return row.id.toLowerCase().includes(wanted) || (row.silent === null ? row.state : "silent").includes(wanted);
}

export function drawMembers(target, note, rows, wanted, chosen, choose, now) {
  const headings = ["member", "stage", "state", "step", "round", "loss", "tok/s", "busy", "waiting", "partner", "resent"];
  const left = [0, 2, 9];
  const body = table(target, "All members", headings, left);
  const found = rows.filter((row) => matches(row, wanted.trim().toLowerCase()));
  text(note, found.length > MOST_SHOWN ? `the first ${MOST_SHOWN} of ${found.length}` : `${found.length} of ${rows.length}`);
  sync(body, found.slice(0, MOST_SHOWN), (row) => row.id, (row) => {
    const line = lineOf(headings.length, left);
    const button = element("button", { type: "button" }, end(row.id));
    button.addEventListener("click", () => choose(row.id));
    line.cells[0].append(button);
    return line;
  }, (line, row) => {
    const silent = row.silent !== null;
    line.className = silent ? "silent" : "";
    line.cells[0].firstChild.setAttribute("aria-pressed", row.id === chosen);
    line.cells[0].firstChild.title = row.id;
    const values = [String(row.stage), silent ? `silent ${duration(Math.max(0, now - row.silent))}` : row.state, amount(row.step), amount(row.round),
      fixed(row.loss, 3), amount(row.rate), row.busy === null ? "–" : `${Math.round(100 * row.busy)} %`, String(row.queue),
      row.partner ? end(row.partner) : row.round ? "alone" : "–", amount(row.resends)];
    values.forEach((value, i) => text(line.cells[i + 1], value));
  });
}

// Darker is slower, in both: a link's place among the measured ones.
function heat(value, sorted, fewIsBad) {
  if (value === null || sorted.length < 2) return "";
  const place = sorted.filter((v) => v < value).length / (sorted.length - 1);
  return `heat${Math.min(4, Math.floor(5 * (fewIsBad ? 1 - place : place)))}`;
}

export function drawLinks(target, note, links, kind) {
  const values = links[kind];
  const label = (name) => (links.by === "stage" ? `stage ${name.stage}` : end(name.id));
  const known = values.flat().filter((v) => v !== null).sort((a, b) => a - b);
  text(note, known.length ? `${links.by === "stage" ? "medians between stages, " : ""}from the row's to the column's; darker is slower`
    : "Nobody has measured a link yet; it takes a minute or two.");
  target.replaceChildren(element("caption", { class: "unseen" }, kind === "ms" ? "Latency one way in milliseconds" : "Bandwidth in Mbit per second"));
  if (!known.length) return;
  const head = element("tr", {}, element("td"));
  for (const name of links.names) head.append(element("th", { scope: "col", title: name.id || "" }, label(name)));
  target.append(element("thead", {}, head));
  const body = element("tbody");
  links.names.forEach((name, i) => {
    const line = element("tr", {}, element("th", { scope: "row", class: "left" }, label(name)));
    values[i].forEach((value, j) => {
      const own = links.by !== "stage" && i === j;
      line.append(element("td", { class: own ? "own" : heat(value, known, kind === "mbit") }, own ? "" : value === null ? "·" : amount(value, 2)));
    });
    body.append(line);
  });
  target.append(body);
}
