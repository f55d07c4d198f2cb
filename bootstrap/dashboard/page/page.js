// Wires the page: what changed is drawn, what was pressed is done.

import { Chart } from "./chart.js";
import { drawContributions, drawHappenings, drawLinks, drawMembers, drawSamples } from "./lists.js";
import { amount, begin, called, clock, duration, element, fixed, lookBack, shown, state, sync, text } from "./live.js";
import { StageMap } from "./stages.js";

const $ = (id) => document.getElementById(id);
const LINK_SECONDS = 10;
const PLAY_SECONDS = 40; // for all that is kept
const PLAY_STEPS = 100;

let chosen = null;
let links = null;
let playing = null;

const picked = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const choose = (id) => { chosen = chosen === id ? null : id; draw(); };
const map = new StageMap($("stages"), choose);

const perplexity = (point) => (point.loss === null ? null : Math.exp(Math.min(point.loss, 60)));
const charts = [
  new Chart($("charts"), {
    title: "Loss, nats per token",
    about: "How well the model predicts the next token of what it trains on; lower is better.",
    lines: [{ key: "loss", label: "training", style: "first", smooth: true }],
    beside: () => state.measured,
    format: (v) => fixed(v, 3),
  }),
  new Chart($("charts"), { title: "Perplexity", about: "The loss as the number of tokens among which the model is undecided; lower is better.", lines: [{ key: "loss", label: "perplexity", style: "first", smooth: true }], value: perplexity, log: true }),
  new Chart($("charts"), { title: "Tokens per second", about: "Text that the whole run trains on, by what the members of the first stage say of themselves.", lines: [{ key: "rate", label: "tokens/s", style: "second", smooth: true }], fromZero: true }),
  new Chart($("charts"), {
    title: "Spread of the replicas",
    about: "How far the weights of one stage's replicas are apart, beside the theory's prediction.",
    lines: [{ key: "spread", label: "measured", style: "first" }, { key: "expected", label: "predicted", style: "third" }],
    band: (point) => (point.expected === null ? null : state.run.band.map((times) => times * point.expected)),
    bandLabel: "usual: a third to three times of it",
    format: (v) => (v === 0 ? "0" : v.toExponential(1)),
    fromZero: true,
  }),
];

const TILES = [
  ["Loss", (now) => fixed(now.loss, 3), () => "nats per token"],
  ["Held-out loss", () => fixed(heldOut()?.value, 3), () => (heldOut() ? `nats, ${clock(heldOut().time)}` : ""), () => heldOut()],
  ["Perplexity", (now) => amount(perplexity(now)), () => "per token"],
  ["Tokens", (now) => amount(now.tokens), () => "trained on", () => state.run.tokens_per_step],
  ["Speed", (now) => amount(now.rate), () => "tokens per second", () => state.run.tokens_per_step],
  ["Step", (_, rows) => amount(furthest(rows)), (_, rows) => whole(furthest(rows))],
  ["Time left", (_, __, left) => duration(left), () => "at this speed", (left) => left !== null],
  ["Members", (now) => String(now.members), (_, rows) => `${rows.filter((row) => row.silent !== null).length} silent`],
];
const furthest = (rows) => Math.max(0, ...rows.filter((row) => row.silent === null).map((row) => row.step));
const whole = (step) => (state.run.steps ? `of ${amount(state.run.steps)}, ${Math.min(100, Math.round(100 * step / state.run.steps))} %` : "inner steps");

// The last point on text that nobody trains on, up to the moment that is shown.
const heldOut = () => (state.measured?.held_out ? state.measured.points.filter((point) => !state.past || point.time <= state.past.time).pop() : undefined);

function drawTiles(now, rows, left) {
  const known = TILES.filter(([, , , isKnown]) => !isKnown || isKnown(left));
  sync($("tiles"), known, ([name]) => name, ([name]) => {
    const tile = element("div", {}, element("dt", {}, name), element("dd"), element("dd", { class: "quiet" }));
    return tile;
  }, (tile, [, value, unit]) => {
    text(tile.children[1], value(now, rows, left));
    text(tile.children[2], unit(now, rows));
  });
}

function drawRemarks(remarks) {
  const WORD = { alarm: "Alarm", warning: "Warning", fine: "Fine" };
  sync($("remarks"), remarks, (remark) => `${remark.level} ${remark.text}`, (remark) => {
    const level = remark.level in WORD ? remark.level : "warning";
    return element("li", { class: level }, element("strong", {}, WORD[level]), ` ${remark.text} `, element("time", { title: "when the page first found it; it may be older" }));
  }, (item, remark) => text(item.lastChild, `· seen since ${clock(remark.since)}`));
}

function drawCurves() {
  const span = Number(picked("span"));
  const latest = state.past ? state.past.time : state.now.time;
  const since = span ? latest - span : 0;
  const points = state.points.filter((point) => !span || (point.time >= since && point.time <= latest));
  for (const chart of charts) chart.show(points, picked("across"), state.past ? state.past.time : null, since);
}

function draw() {
  const { rows, remarks, now, left } = shown();
  if (!now) return;
  drawRemarks(remarks);
  drawTiles(now, rows, left);
  map.draw(state.run.stages, rows, chosen);
  const row = rows.find((each) => each.id === chosen);
  text($("chosen"), row ? describe(row) : "Choose a member, here or in the table below, to see whom it works with.");
  drawCurves();
  $("chosen").title = row ? row.id : "";
  drawContributions($("given"), $("given-note"), rows, state.past || state.run.replay ? null : state.givers);
  if (!state.run.replay) drawSamples($("samples"), $("samples-note"), state.samples, state.past ? state.past.time : null);
  drawHappenings($("happenings"), state.happenings, state.past ? state.past.time : null);
  drawMembers($("members"), $("members-note"), rows, $("find").value, chosen, choose, now.time);
  drawMoment(now.time);
}

function describe(row) {
  const to = Object.entries(row.to).map(([peer, rate]) => `${called(peer)} (${amount(rate, 2)}/s)`).join(", ");
  return `${called(row.id)}, stage ${row.stage}, up ${duration(row.uptime)}` + (to ? `; sends microbatches to ${to}` : "")
    + (row.partner ? `; averaged with ${called(row.partner)} last` : "")
    + (row.passed_on ? `; has passed on ${amount(row.passed_on)}B between others that cannot dial each other` : "");
}

// --- the time ------------------------------------------------------------------------------------

const slider = $("when");

function drawMoment(time) {
  const [count, first, last] = state.pictures;
  slider.disabled = count < 2;
  $("play").disabled = count < 2;
  $("now").disabled = !state.past;
  document.body.classList.toggle("past", Boolean(state.past));
  if (!state.past) slider.value = slider.max;
  const ago = last - time;
  const words = state.past ? `${clock(time, last - first)}, ${duration(Math.max(0, ago))} before ${state.run.replay ? "the end" : "now"}`
    : state.run.replay ? `the end, ${clock(time, last - first)}` : "now";
  text($("moment"), words);
  slider.setAttribute("aria-valuetext", words);
}

async function show(place) {
  const [, first, last] = state.pictures;
  if (place >= Number(slider.max)) state.past = null;
  else await lookBack(first + (last - first) * place / Number(slider.max));
  draw();
}

function play(on) {
  clearInterval(playing);
  playing = null;
  $("play").setAttribute("aria-pressed", on);
  text($("play"), on ? "Pause" : "Play");
  if (!on) return;
  if (Number(slider.value) >= Number(slider.max)) slider.value = 0;
  playing = setInterval(() => {
    slider.value = Number(slider.value) + Number(slider.max) / PLAY_STEPS;
    show(Number(slider.value));
    if (Number(slider.value) >= Number(slider.max)) play(false);
  }, (1000 * PLAY_SECONDS) / PLAY_STEPS);
}

slider.addEventListener("input", () => { play(false); show(Number(slider.value)); });
$("play").addEventListener("click", () => play(!playing));
$("now").addEventListener("click", () => { play(false); state.past = null; draw(); });
$("find").addEventListener("input", draw);
for (const input of document.querySelectorAll("input[type=radio]")) input.addEventListener("change", () => { draw(); drawAllLinks(); });

// --- what is there -------------------------------------------------------------------------------

function drawAllLinks() {
  if (links) drawLinks($("links"), $("links-note"), links, picked("link"));
}

async function readLinks() {
  try {
    const answer = await fetch("links");
    if (answer.ok) links = await answer.json();
  } catch {
    return; // it is asked again
  }
  drawAllLinks();
}

function connection(kind) {
  const since = state.now ? `: what is shown is of ${new Date(1000 * state.now.time).toLocaleTimeString()}` : "";
  const words = { live: "live", lost: `connection lost${since}; trying again`, replay: "replay", waiting: "connecting" };
  $("connection").dataset.state = kind;
  document.body.dataset.connection = kind;
  text($("connection"), words[kind]);
}

function introduce() {
  const run = state.run;
  document.title = `${run.name} · noloco`;
  text($("run"), run.name);
  $("facts").title = run.id;
  const facts = [run.id && `run ${run.id.slice(0, 8)}…`, `${run.stages} stage${run.stages === 1 ? "" : "s"}`, run.inner_steps && `a round every ${run.inner_steps} steps`];
  text($("facts"), facts.filter(Boolean).join(" · "));
  $("ask").hidden = !run.asks;
  $("orders").hidden = !run.orders;
  $("join-card").hidden = !run.join;
  if (!run.join) return;
  text($("join"), run.join.line);
  text($("join-note"), `A volunteer takes part with this line, from ${run.join.reach}.${run.private ? " The run is private: --token with a token from its owner is needed, too." : ""}`);
}

async function copy() {
  getSelection().selectAllChildren($("join"));
  try {
    await navigator.clipboard.writeText($("join").textContent);
    text($("copy"), "Copied");
  } catch {
    text($("copy"), "Press Ctrl-C"); // only a page by https or of this machine may write there
  }
}

$("copy").addEventListener("click", copy);

// Ask the server for something; its answer, or why not, is a sentence.
async function ask(path, body, note) {
  text(note, "…");
  try {
    const secret = document.querySelector("meta[name=noloco-secret]").content;
    const answer = await fetch(path, { method: "POST", body, headers: { "x-noloco-secret": secret } });
    text(note, await answer.text());
  } catch {
    text(note, "The page's server does not answer.");
  }
}

$("ask").addEventListener("submit", (event) => { event.preventDefault(); ask("write", $("prompt").value, $("ask-note")); });
for (const button of document.querySelectorAll("#orders button")) {
  button.addEventListener("click", () => {
    if (button.value !== "finish" || confirm("The node leaves the run, and this page ends with it.")) ask("order", button.value, $("orders-note"));
  });
}

async function start() {
  try {
    await begin(() => { introduce(); draw(); }, connection);
  } catch {
    connection("lost");
    setTimeout(start, 2000);
    return;
  }
  document.body.dataset.ready = "yes";
  if (!state.run.tokens_per_step) { // the manifest is not there
    charts[2].figure.hidden = true;
    document.querySelector("input[value=tokens]").closest("fieldset").hidden = true;
  }
  if (state.run.replay) return ["links", "samples"].forEach((id) => $(id).closest("section").remove()); // events tell nothing of them
  await readLinks();
  setInterval(readLinks, 1000 * LINK_SECONDS);
}

start();
