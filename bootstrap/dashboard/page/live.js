// What the page knows of the run, and how it hears of changes. Everything in it was written by strangers.

const MOST_POINTS = 2000;
const MOST_HAPPENINGS = 300;
const MOST_SAMPLES = 20;
const MOST_LETTERS = 14;

export const state = {
  run: { name: "", id: "", stages: 0, steps: 0, replay: false },
  rows: new Map(),
  remarks: [],
  now: null,
  points: [],
  happenings: [],
  samples: [],
  givers: [],
  measured: null,
  left: null,
  pictures: [0, 0, 0],
  cursor: "",
  past: null, // the picture that is shown instead of the present
};

const POINT = ["time", "tokens", "loss", "rate", "spread", "expected", "members"];
const named = (values) => Object.fromEntries(POINT.map((name, i) => [name, values[i]]));

export function apply(change) {
  if (change.whole) {
    state.rows.clear();
    state.points = [];
    state.happenings = [];
    state.samples = [];
    state.givers = [];
    state.measured = null;
  }
  for (const id of change.gone) state.rows.delete(id);
  for (const row of change.rows) state.rows.set(row.id, row);
  state.points.push(...change.points.map(named));
  state.points.sort((a, b) => a.time - b.time);
  while (state.points.length > MOST_POINTS) state.points = state.points.filter((_, i) => i % 2 === 0);
  for (const [time, kind, peer, stage, name] of change.happenings) state.happenings.push({ time, kind, peer, stage, name });
  state.happenings.sort((a, b) => a.time - b.time);
  state.happenings.splice(0, Math.max(0, state.happenings.length - MOST_HAPPENINGS));
  for (const [time, step, round, loss, words] of change.samples) state.samples.push({ time, step, round, loss, words });
  state.samples.splice(0, Math.max(0, state.samples.length - MOST_SAMPLES));
  if (change.givers) state.givers = change.givers.map(([name, peer, tokens, share, rounds, signers]) => ({ name, peer, tokens, share, rounds, signers }));
  if (change.measured) state.measured = { ...change.measured, points: change.measured.points.map(([time, tokens, value]) => ({ time, tokens, value })) };
  state.remarks = remarked(change.remarks);
  state.now = named(change.now);
  state.left = change.left;
  state.pictures = change.pictures;
  nameAll();
}

const remarked = (remarks) => remarks.map(([level, text, since]) => ({ level, text, since }));

// The members, the numbers and the verdict of the moment that is shown.
export function shown() {
  if (state.past) return state.past;
  return { rows: [...state.rows.values()].sort(byStage), remarks: state.remarks, now: state.now, left: state.left };
}

const byStage = (a, b) => a.stage - b.stage || (a.id < b.id ? -1 : 1);

export async function begin(changed, connection) {
  const answer = await fetch("state");
  const whole = await answer.json();
  state.run = whole.run;
  state.cursor = whole.cursor;
  apply(whole);
  changed();
  if (state.run.replay) return connection("replay");
  listen(changed, connection);
}

// The browser comes back by itself, with the last event's id, unless it was answered with an error.
function listen(changed, connection) {
  const source = new EventSource(`live?since=${state.cursor}`);
  source.onopen = () => connection("live");
  source.onerror = () => {
    connection("lost");
    if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(changed, connection), 2000);
  };
  source.onmessage = (message) => {
    state.cursor = message.lastEventId;
    apply(JSON.parse(message.data));
    connection("live");
    changed();
  };
}

export async function lookBack(time) {
  const answer = await fetch(`picture?time=${time}`);
  if (!answer.ok) return;
  const picture = await answer.json();
  state.past = {
    time: picture.time,
    rows: picture.rows.sort(byStage),
    remarks: remarked(picture.remarks),
    now: named(picture.now),
    left: picture.left,
  };
  nameAll();
}

// --- words and numbers ---------------------------------------------------------------------------

let names = new Map(); // by key, of members that have left, too

// The end of the key, which nobody else can have, follows a name that is long, that two have, or that looks like this.
function nameAll() {
  const given = new Map();
  for (const { peer, name } of [...state.givers, ...state.happenings]) if (name) given.set(peer, name);
  for (const { id, name } of [...(state.past ? state.past.rows : []), ...state.rows.values()]) if (name) given.set(id, name);
  const times = new Map();
  for (const name of given.values()) times.set(name, (times.get(name) || 0) + 1);
  const isClear = (name) => name.length <= MOST_LETTERS && times.get(name) === 1 && !name.includes("…");
  names = new Map([...given].map(([id, name]) => [id, isClear(name) ? name : `${[...name].slice(0, 7).join("")}${ending(id)}`]));
}

const ending = (id) => `…${id.slice(-6)}`;

// What a member is called: its volunteer's word for it, else the end of its key.
export const called = (id) => names.get(id) || ending(id);

export function amount(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, factor] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]])
    if (size >= factor) return `${(value / (unit === "k" ? 1e3 : factor)).toPrecision(digits)} ${unit}`;
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return Number.isInteger(value) ? String(value) : value.toPrecision(digits);
}

export const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

export function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

export function clock(time, span = 0) {
  const options = span > 86400 ? { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" }
    : { hour: "2-digit", minute: "2-digit", second: span < 1200 ? "2-digit" : undefined };
  return new Date(time * 1000).toLocaleString("en-GB", options);
}

// Make the children of `parent` those of `items`, and keep the elements of those that stay.
export function sync(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let element = old.get(name);
    old.delete(name);
    if (!element) {
      element = create(item);
      element.dataset.key = name;
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update(element, item);
  }
  for (const element of old.values()) element.remove();
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function drawn(name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export const text = (node, words) => {
  if (node.textContent !== words) node.textContent = words;
};
