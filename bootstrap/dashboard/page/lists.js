// The tables and lists of the page.

import { amount, called, clock, duration, element, fixed, state, sync, text } from "./live.js";

const MOST_GIVERS = 100;
const MOST_SHOWN = 100;
const MOST_TOLD = 60;

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

// One line for each that has trained or for which others signed; `givers` is null for a moment of which that is not known.
export function drawContributions(target, note, rows, givers) {
  const headings = ["member", "stage", "signed for", "share", "rounds", "signed by", "own claim"];
  const body = table(target, "Members by what others have signed for", headings, [0, 3]);
  const entries = new Map(rows.map((row) => [row.id, { id: row.id, row, signed: null }]));
  for (const giver of givers || []) entries.set(giver.peer, { id: giver.peer, row: entries.get(giver.peer)?.row, signed: giver });
  const worth = ({ signed, row }) => [signed ? signed.tokens : 0, row ? row.tokens : 0];
  const order = (a, b) => worth(b)[0] - worth(a)[0] || worth(b)[1] - worth(a)[1];
  text(note, givers === null ? "What others have signed is not kept for moments of the past: these are the members' own claims."
    : givers.length ? "Tokens that others signed for having had from each member, in all its lives; beside them those that it says it has trained on."
      : "Nobody has signed yet: receipts are there a minute after training has begun. Until then each member's own claim is all there is.");
  sync(body, [...entries.values()].sort(order).slice(0, MOST_GIVERS), (entry) => entry.id, () => {
    const line = lineOf(headings.length, [3]);
    line.cells[3].append(element("meter", { min: 0, max: 1, "aria-label": "share of all that is signed for" }));
    return line;
  }, (line, { id, row, signed }) => {
    line.cells[0].title = id;
    line.cells[3].firstChild.value = signed ? signed.share : 0;
    const claim = row && state.run.tokens_per_step ? amount(row.tokens) : "–";
    const values = signed ? [`${amount(signed.tokens)}, ${Math.round(100 * signed.share)} %`, amount(signed.rounds), String(signed.signers)] : ["–", "–", "–"];
    for (const [i, value] of [called(id), row ? String(row.stage) : "gone", values[0], null, values[1], values[2], claim].entries())
      if (value !== null) text(line.cells[i], value);
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
    const item = element("li", { "data-kind": h.kind in SENTENCES ? h.kind : "", title: h.peer });
    item.append(element("time", {}, clock(h.time)), " ", element("span"));
    return item;
  }, (item, h) => {
    const sentence = SENTENCES[h.kind] || ((who) => `${who}: ${h.kind}`);
    text(item.lastChild, sentence(called(h.peer), h.stage));
  });
}

export function drawSamples(target, note, samples, moment) {
  const written = samples.filter((sample) => moment === null || sample.time <= moment).reverse();
  text(note, written.length ? "Texts by the weights of the time, one a minute and those that readers asked for, the latest first. The first words of each were given." : "None yet: it takes a replica of each stage, and up to a minute.");
  sync(target, written, (sample) => `${sample.time} ${sample.step}`, (sample) => {
    const of = `step ${amount(sample.step)}, round ${amount(sample.round)}${sample.loss === null ? "" : `, loss ${fixed(sample.loss, 3)}`}`;
    return element("li", {}, element("p", { class: "quiet" }, element("time", {}, clock(sample.time)), ` ${of}`), element("blockquote", {}, sample.words));
  }, () => {});
}

function matches(row, wanted) {
  const stage = /^stage\s*(\d+)$/.exec(wanted);
  if (stage) return row.stage === Number(stage[1]);
  return `${called(row.id)} ${row.name} ${row.id}`.toLowerCase().includes(wanted) || (row.silent === null ? row.state : "silent").includes(wanted);
}

export function drawMembers(target, note, rows, wanted, chosen, choose, now) {
  const headings = ["member", "stage", "state", "step", "round", "loss", "tok/s", "busy", "waiting", "partner", "resent"];
  const left = [0, 2, 9];
  const body = table(target, "All members", headings, left);
  const found = rows.filter((row) => matches(row, wanted.trim().toLowerCase()));
  text(note, found.length > MOST_SHOWN ? `the first ${MOST_SHOWN} of ${found.length}` : `${found.length} of ${rows.length}`);
  sync(body, found.slice(0, MOST_SHOWN), (row) => row.id, (row) => {
    const line = lineOf(headings.length, left);
    const button = element("button", { type: "button", title: row.id });
    button.addEventListener("click", () => choose(row.id));
    line.cells[0].append(button);
    return line;
  }, (line, row) => {
    const silent = row.silent !== null;
    line.className = silent ? "silent" : "";
    line.cells[0].firstChild.setAttribute("aria-pressed", row.id === chosen);
    text(line.cells[0].firstChild, called(row.id));
    line.cells[9].title = row.partner;
    const values = [String(row.stage), silent ? `silent ${duration(Math.max(0, now - row.silent))}` : row.state, amount(row.step), amount(row.round),
      fixed(row.loss, 3), amount(row.rate), row.busy === null ? "–" : `${Math.round(100 * row.busy)} %`, String(row.queue),
      row.partner ? called(row.partner) : row.round ? "alone" : "–", amount(row.resends)];
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
  const label = (name) => (links.by === "stage" ? `stage ${name.stage}` : called(name.id));
  const known = values.flat().filter((v) => v !== null).sort((a, b) => a - b);
  text(note, known.length ? `How fast messages go ${links.by === "stage" ? "between stages, in medians, " : ""}from the row's to the column's, as members measured them; darker is slower.`
    : "Nobody has measured a link yet; it takes a minute or two.");
  target.replaceChildren(element("caption", { class: "unseen" }, kind === "ms" ? "Latency one way in milliseconds" : "Bandwidth in Mbit per second"));
  if (!known.length) return;
  const head = element("tr", {}, element("td"));
  for (const name of links.names) head.append(element("th", { scope: "col", title: name.id || "" }, label(name)));
  target.append(element("thead", {}, head));
  const body = element("tbody");
  links.names.forEach((name, i) => {
    const line = element("tr", {}, element("th", { scope: "row", class: "left", title: name.id || "" }, label(name)));
    values[i].forEach((value, j) => {
      const own = links.by !== "stage" && i === j;
      line.append(element("td", { class: own ? "own" : heat(value, known, kind === "mbit") }, own ? "" : value === null ? "·" : amount(value, 2)));
    });
    body.append(line);
  });
  target.append(body);
}
