// Wires the page: what changed is drawn, what was pressed is done.

import { Chart } from "./chart.js";
import { drawContributions, drawGivers, drawHappenings, drawLinks, drawMembers, drawSamples } from "./lists.js";
import { amount, begin, clock, duration, element, end, fixed, lookBack, shown, state, sync, text } from "./live.js";
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
  new Chart($("charts"), { title: "Loss, nats per token", lines: [{ key: "loss", label: "loss", style: "first", smooth: true }], format: (v) => fixed(v, 3) }),
  new Chart($("charts"), { title: "Perplexity", lines: [{ key: "loss", label: "perplexity", style: "first", smooth: true }], value: perplexity, log: true }),
  new Chart($("charts"), { title: "Tokens per second", lines: [{ key: "rate", label: "tokens/s", style: "second", smooth: true }], fromZero: true }),
  new Chart($("charts"), {
    title: "Spread of the replicas",
    lines: [{ key: "spread", label: "measured", style: "first" }, { key: "expected", label: "predicted", style: "third" }],
    band: (point) => (point.expected === null ? null : state.run.band.map((times) => times * point.expected)),
    bandLabel: "usual: a third to three times of it",
    format: (v) => (v === 0 ? "0" : v.toExponential(1)),
    fromZero: true,
  }),
];

const TILES = [
  ["Loss", (now) => fixed(now.loss, 3), () => "nats per token"],
  ["Perplexity", (now) => amount(perplexity(now)), () => "per token"],
  ["Tokens", (now) => amount(now.tokens), () => "trained on"],
  ["Speed", (now) => amount(now.rate), () => "tokens per second"],
  ["Step", (_, rows) => amount(furthest(rows)), (_, rows) => whole(furthest(rows))],
  ["Members", (now) => String(now.members), (_, rows) => `${rows.filter((row) => row.silent !== null).length} silent`],
];
const furthest = (rows) => Math.max(0, ...rows.filter((row) => row.silent === null).map((row) => row.step));
const whole = (step) => (state.run.steps ? `of ${amount(state.run.steps)}, ${Math.min(100, Math.round(100 * step / state.run.steps))} %` : "inner steps");

function drawTiles(now, rows) {
  sync($("tiles"), TILES, ([name]) => name, ([name]) => {
    const tile = element("div", {}, element("dt", {}, name), element("dd"), element("dd", { class: "quiet" }));
    return tile;
  }, (tile, [, value, unit]) => {
    text(tile.children[1], value(now, rows));
    text(tile.children[2], unit(now, rows));
  });
}

function drawRemarks(remarks) {
  const WORD = { alarm: "Alarm", warning: "Warning", fine: "Fine" };
  sync($("remarks"), remarks, (remark) => `${remark.level} ${remark.text}`, (remark) => {
    const level = remark.level in WORD ? remark.level : "warning";
    return element("li", { class: level }, element("strong", {}, WORD[level]), ` ${remark.text}`);
  }, () => {});
}

function drawCurves() {
  const span = Number(picked("span"));
  const latest = state.past ? state.past.time : state.now.time;
  const points = state.points.filter((point) => !span || (point.time >= latest - span && point.time <= latest));
  for (const chart of charts) chart.show(points, picked("across"), state.past ? state.past.time : null);
}

function draw() {
  const { rows, remarks, now } = shown();
  if (!now) return;
  drawRemarks(remarks);
  drawTiles(now, rows);
  map.draw(state.run.stages, rows, chosen);
  const row = rows.find((each) => each.id === chosen);
  text($("chosen"), row ? describe(row) : "Choose a member, here or in the table below, to see whom it works with.");
  drawCurves();
  drawContributions($("given"), rows);
  if (!state.run.replay) {
    drawSamples($("samples"), $("samples-note"), state.samples, state.past ? state.past.time : null);
    drawGivers($("givers"), $("givers-note"), state.givers);
  }
  drawHappenings($("happenings"), state.happenings, state.past ? state.past.time : null);
  drawMembers($("members"), $("members-note"), rows, $("find").value, chosen, choose, now.time);
  drawMoment(now.time);
}

function describe(row) {
  const to = Object.entries(row.to).map(([peer, rate]) => `${end(peer)} (${amount(rate, 2)}/s)`).join(", ");
  return `${row.id}, stage ${row.stage}, up ${duration(row.uptime)}` + (to ? `; sends microbatches to ${to}` : "")
    + (row.partner ? `; averaged with ${end(row.partner)} last` : "");
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
  text($("facts"), `run ${run.id.slice(0, 8)}… · ${run.stages} stage${run.stages === 1 ? "" : "s"} · a round every ${run.inner_steps} steps`);
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
  if (state.run.replay) return ["links", "samples", "givers"].forEach((id) => $(id).closest("section").remove()); // events tell nothing of them
  await readLinks();
  setInterval(readLinks, 1000 * LINK_SECONDS);
}

start();
