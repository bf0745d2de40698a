"use strict";
// Reads /overview again and again, and shows it. Whatever comes from there enters the page by textContent or as an
// attribute, never as markup; class names are made from the words below alone.

const EVERY_MS = 1000;
const LONGEST_MS = 15000;
const TIMEOUT_MS = 5000;
const STALE_S = 2; // a request that takes longer is told
const SLOW_S = 2; // what takes longer says how far it is
const MOST_BARS = 6; // of one name in one sync; more are drawn as one
const MOST_CHARS = 400; // of one name or error; the rest is in /status
const TOKEN_KEY = "weightsync-token";
const STATES = ["evicted", "suspect", "joining", "live"];
const LEVEL_WORDS = { wrong: "LOOK", busy: "BUSY", ok: "OK" };

const at = (id) => document.getElementById(id);
let last = null; // the last answer
let lastAt = null; // when it came, by performance.now()
const began = performance.now();
let failure = null; // why the last request gave none
let waitMs = EVERY_MS;
let timer = null;
let asking = null;
let askedAt = 0;

// --- asking ---

async function ask() {
  clearTimeout(timer);
  if (asking !== null) asking.abort();
  const mine = (asking = new AbortController());
  askedAt = performance.now();
  const cut = setTimeout(() => mine.abort(), TIMEOUT_MS);
  let again = true;
  try {
    const token = sessionStorage.getItem(TOKEN_KEY);
    const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
    const answer = await fetch("overview", { headers, signal: mine.signal, cache: "no-store" });
    if (answer.status === 401) {
      wantToken(token !== null);
      again = false;
    } else {
      if (!answer.ok) throw new Error(`it answered with status ${answer.status}`);
      took(await answer.json());
    }
  } catch (error) {
    if (asking !== mine) return; // another request has taken over
    const unreachable = error.name === "TypeError" ? "it can't be reached" : String(error.message || error);
    failure = error.name === "AbortError" ? `nothing within ${TIMEOUT_MS / 1000} s` : unreachable;
    waitMs = Math.min(2 * waitMs, LONGEST_MS);
  } finally {
    clearTimeout(cut);
  }
  if (asking !== mine) return;
  asking = null;
  head();
  if (again) timer = setTimeout(ask, document.hidden ? LONGEST_MS : waitMs);
}

function took(got) {
  last = got;
  lastAt = performance.now();
  failure = null;
  waitMs = EVERY_MS;
  at("token-form").hidden = true;
  try {
    show(got);
  } catch (error) {
    failure = `it answered what this page can't show: ${error.message}`;
  }
}

function wantToken(hadOne) {
  sessionStorage.removeItem(TOKEN_KEY);
  last = null;
  failure = null;
  at("main").hidden = true;
  at("token-form").hidden = false;
  put(at("token-said"), hadOne ? "That is not this controller's token." : "");
}

at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, at("token").value.trim());
  at("token").value = "";
  ask();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && at("token-form").hidden) ask();
});

// --- small tools ---

function put(element, text) {
  if (element.textContent !== text) element.textContent = text; // a selection lives on, and nothing is read out twice
}

function made(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

// One child for each item, kept while its key is there: focus and selection survive a refresh.
function keyed(parent, items, keyOf, make, update) {
  const there = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  const kept = new Set();
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = there.get(key);
    if (child === undefined || kept.has(child)) {
      child = make(item);
      child.dataset.key = key;
    }
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    kept.add(child);
    update(child, item);
  }
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
}

const own = (object, key) => (Object.hasOwn(object, key) ? object[key] : null);
const clipped = (text) => (text.length > MOST_CHARS ? `${text.slice(0, MOST_CHARS)}…` : text);
const seconds = (value) => (!Number.isFinite(value) ? "?" : Math.abs(value) < 9.95 ? value.toFixed(1) : String(Math.round(value)));
const clock = (since) => new Date(since * 1000).toLocaleTimeString([], { hour12: false });
const number = (text) => ({ text: String(text), className: "number" });
const long = (text, more = "") => ({ text: text || "", className: `long ${more}` });
const short = (text, more = "") => ({ text: text || "", className: `short ${more}` });

// heads: texts. rows: {key, className, cells: [{text, whole, more, className, title}]}; "more" is a muted remark.
function table(id, heads, rows) {
  const [head, body] = [at(id).tHead, at(id).tBodies[0]];
  keyed(head, [heads], () => "heads", () => made("tr"), (tr) => cells(tr, heads.map((text) => ({ text })), "th"));
  keyed(body, rows, (each) => each.key, () => made("tr"), (tr, each) => {
    tr.className = each.className || "";
    cells(tr, each.cells, "td", heads);
  });
}

function cells(tr, wanted, tag, heads) {
  tr.setAttribute("role", "row");
  while (tr.children.length > wanted.length) tr.lastElementChild.remove();
  wanted.forEach((cell, index) => {
    let td = tr.children[index];
    if (td === undefined) {
      const first = index === 0 && tag === "td";
      td = tr.appendChild(made(first ? "th" : tag));
      td.scope = tag === "th" ? "col" : first ? "row" : "";
      if (!td.scope) td.removeAttribute("scope");
      td.setAttribute("role", tag === "th" ? "columnheader" : first ? "rowheader" : "cell");
      td.append(made("span"), made("small", "quiet"));
    }
    td.className = `${cell.className || ""}${cell.text || cell.more ? "" : " empty"}`.trim();
    if (heads) td.dataset.head = heads[index];
    if (cell.title) td.title = cell.title;
    else td.removeAttribute("title");
    put(td.firstElementChild, cell.whole ? cell.text : clipped(cell.text || ""));
    put(td.lastElementChild, cell.more ? ` ${cell.more}` : "");
  });
}

// --- the head ---

function head() {
  const ago = (performance.now() - (lastAt === null ? began : lastAt)) / 1000;
  let facts = last === null ? [] : last.facts;
  const silent = failure !== null || (asking !== null && performance.now() - askedAt > 1000 * STALE_S);
  if (!at("token-form").hidden) {
    facts = [{ level: "busy", word: "TOKEN", text: "This controller wants its token", detail: "" }];
  } else if (silent) {
    const why = failure === null ? "" : failure;
    const gone = { level: "wrong", text: "No answer from the controller", detail: `since ${seconds(ago)} s${why ? `: ${why}` : ""}` };
    facts = [gone, ...facts.map((fact) => ({ ...fact, text: `Before that: ${fact.text}` }))];
  }
  const [first, ...rest] = facts.length ? facts : [{ level: "busy", text: "Asking the controller", detail: "" }];
  const level = first.level in LEVEL_WORDS ? first.level : "busy";
  at("head").className = `level-${level}`;
  put(at("level"), first.word || LEVEL_WORDS[level]);
  put(at("headline"), first.text);
  put(at("detail"), first.detail);
  keyed(at("facts"), rest.map((fact, index) => ({ ...fact, index })), (fact) => String(fact.index), () => made("li"), (li, fact) => {
    li.className = fact.level in LEVEL_WORDS ? `fact-${fact.level}` : "";
    put(li, fact.detail ? `${fact.text} (${fact.detail})` : fact.text);
  });
  at("main").classList.toggle("stale", silent && at("token-form").hidden);
  const wrong = facts.filter((fact) => fact.level === "wrong").length;
  const title = `${wrong ? `(${wrong}) ` : ""}${first.text} - weightsync`;
  if (document.title !== title) document.title = title;
  put(at("answered"), last === null ? "" : `As of ${clock(last.status.now_s)}, the controller's clock.`);
}

// --- the tables ---

function show(got) {
  const status = got.status;
  at("main").hidden = false;
  models(status);
  fleet(status);
  barriers(status);
  plots(got.versions);
  syncs(status, got.spans);
}

function models(status) {
  const heads = ["model", "mode", "run", "trained", "served", "behind", "state", "rollout", "validation", "last error"];
  table("models", heads, Object.entries(status.models).map(([tag, model]) => {
    const validates = model.waiting_for_validation;
    const none = model.rollout_model_version < 0; // nothing of this run: no difference says how far behind
    const [served, behind] = none ? ["none", "all"] : [model.rollout_model_version, model.staleness];
    const failed = model.num_failed ? `failed ${model.num_failed} in a row` : "";
    const pool = model.pool_locked && !model.blocked ? "pool locked" : "";
    const words = { need_sync: "sync is due", syncing: "syncing", running: "running" };
    const silent = model.num_answering === 0;
    const rollout = silent ? "nobody answers" : model.blocked ? "waits" : "goes on";
    const state = model.overdue ? "overdue" : words[model.state] || "";
    return {
      key: tag,
      cells: [
        { text: tag }, short(own(status.sync_mode, tag)), long(model.run_id === null ? "none" : model.run_id),
        number(model.train_model_version), number(served), number(behind),
        { ...short(state, model.overdue || failed ? "wrong" : model.state === "running" ? "" : "busy"), more: failed },
        { ...short(rollout, silent ? "wrong" : model.blocked ? "busy" : ""), more: pool },
        short(validates ? `of ${validates.version}` : "", "busy"), long(model.last_error),
      ],
    };
  }));
}

function fleet(status) {
  const tags = Object.keys(status.models);
  const all = status.instances;
  at("fleet-part").hidden = all.length === 0;
  const counts = STATES.map((state) => [all.filter((instance) => instance.state === state).length, state]);
  put(at("fleet-count"), counts.filter(([number]) => number).map(([number, state]) => `${number} ${state}`).join(", "));
  const moves = all.map(progress);
  const moving = moves.some((text) => text); // a column that is there while somebody needs it
  const heads = ["instance", "state", ...tags, ...(moving ? ["transfer"] : []), "heartbeat", "lease left", "why"];
  table("fleet", heads, all.map((instance, index) => ({
    key: instance.instance_id,
    className: STATES.includes(instance.state) ? `is-${instance.state}` : "",
    cells: [
      { ...long(instance.instance_id), title: instance.url }, short(instance.state, "state"),
      ...tags.map((tag) => version(instance, tag, own(status.models, tag))),
      ...(moving ? [short(moves[index], "number busy")] : []),
      number(`${seconds(instance.heartbeat_age_s)} s`),
      number(instance.lease_left_s > 0 ? `${seconds(instance.lease_left_s)} s` : "none"), long(instance.why),
    ],
  })));
}

// Of transfers that take longer than two seconds: how far, how fast, how long yet; as of the last heartbeat.
function progress(instance) {
  return Object.entries(instance.progress).filter(([, moved]) => moved.seconds >= SLOW_S).map(([tag, moved]) => {
    const rate = moved.done_bytes / moved.seconds;
    const left = rate > 0 ? `, ${seconds((moved.total_bytes - moved.done_bytes) / rate)} s to go` : "";
    const share = Math.round((100 * moved.done_bytes) / (moved.total_bytes || 1));
    return `${clipped(tag)} ${share} % of ${figure(moved.total_bytes / 1e6)} MB, ${figure(rate / 1e6)} MB/s${left}`;
  }).join("; ");
}

function version(instance, tag, model) {
  const text = own(instance.models, tag);
  if (text === null) return { text: "none", className: "version" };
  const cut = text.lastIndexOf("/");
  const current = text.slice(0, cut) === model.run_id;
  const lag = own(instance.lag, tag);
  const late = current ? (lag > 0 ? `${lag} behind` : "") : "other run";
  const adapter = own(instance.adapters, tag); // its rank, and the base's version
  const more = [late, adapter === null ? "" : clipped(adapter)].filter((part) => part).join(", ");
  const title = adapter === null ? text : `${text}: ${adapter}`;
  return { text: current ? text.slice(cut + 1) : text, more, className: `version ${late ? "lags" : ""}`, title };
}

function barriers(status) {
  at("barriers-part").hidden = status.barriers.length === 0;
  const heads = ["set", "has to reach", "missing", "published", "waited", "at most"];
  table("barriers", heads, status.barriers.map((barrier) => {
    const published = Object.entries(barrier.versions).map(([tag, number]) => `${tag} ${number === null ? "none" : number}`);
    const late = barrier.waited_s >= barrier.timeout_s;
    const cells = [
      long(Object.keys(barrier.versions).join(", ")), number(barrier.version), long(barrier.waits_for.join(", "), "busy"),
      long(published.join(", ")), short(`${seconds(barrier.waited_s)} s`, late ? "wrong" : ""),
      number(`${seconds(barrier.timeout_s)} s`),
    ];
    return { key: cells[0].text, cells };
  }));
}

// --- the timeline ---

const syncKey = (sync) => `${sync.model_tag}\n${sync.run_id}\n${sync.version}\n${sync.started_s}`;
const syncName = (sync) => clipped(`${sync.model_tag} ${sync.version}`);
const outcome = (sync) => `${sync.outcome === "running" ? "is running" : sync.outcome}, ${seconds(sync.seconds)} s`;

// Of a transfer that has ended: how much came, and how fast.
function moved(span) {
  return span.nbytes > 0 && span.seconds > 0 ? `; ${figure(span.nbytes / 1e6)} MB, ${figure(span.nbytes / 1e9 / span.seconds)} GB/s` : "";
}

// What is drawn of a sync: a few bars of one name each for itself, many as one that tells the slowest.
function bars(sync, names) {
  const found = [];
  for (const name of new Set(sync.spans.map((span) => span.name))) {
    const those = sync.spans.filter((span) => span.name === name);
    const index = names.indexOf(name);
    const add = (start, end, who, more = "") => found.push({
      name, start, end, className: index < 0 ? "span-other" : `span-${index}`,
      said: `${name}${who}: ${seconds(end - start)} s, from ${seconds(start)} s${more}`,
    });
    if (those.length <= MOST_BARS) {
      for (const span of those) {
        add(span.start_s, span.start_s + span.seconds, span.who === null ? "" : `, ${span.who}`, moved(span));
      }
      continue;
    }
    const slowest = those.reduce((most, span) => (span.seconds > most.seconds ? span : most));
    add(
      Math.min(...those.map((span) => span.start_s)), Math.max(...those.map((span) => span.start_s + span.seconds)),
      `, ${those.length} of them`, `; the longest: ${slowest.who || "nobody in particular"}, ${seconds(slowest.seconds)} s${moved(slowest)}`,
    );
  }
  found.sort((a, b) => a.start - b.start || b.end - a.end);
  const lanes = []; // end of the last bar in each; no bar hides another
  for (const bar of found) {
    let lane = lanes.findIndex((end) => end <= bar.start + 1e-6);
    if (lane < 0) lane = lanes.push(0) - 1;
    lanes[lane] = bar.end;
    bar.lane = lane;
  }
  return { list: found, lanes: Math.max(1, lanes.length) };
}

function syncs(status, names) {
  at("syncs-part").hidden = status.syncs.length === 0;
  const rows = status.syncs.map((sync) => ({ sync, ...bars(sync, names) }));
  const all = rows.flatMap((each) => each.list);
  const ends = rows.map((each) => Math.max(each.sync.seconds, ...each.list.map((bar) => bar.end)));
  const whole = [Math.min(0, ...all.map((bar) => bar.start)), Math.max(0.01, ...ends)];
  const [from, to] = timelineZoom.of(...whole);
  const inside = (bar) => bar.end >= from && bar.start <= to;
  const place = (value) => (100 * (Math.min(to, Math.max(from, value)) - from)) / (to - from);
  const known = [...names.map((name, index) => [name, `span-${index}`]), ["other", "span-other"]];
  const used = known.filter(([, className]) => all.some((bar) => bar.className === className));
  keyed(at("legend"), used, ([name]) => name, () => made("li"), (li, [name, className]) => {
    if (!li.children.length) li.append(made("i", className), made("span", "", name));
  });
  const step = niceStep((to - from) / 6);
  const ticks = [];
  for (let tick = Math.ceil(from / step - 1e-9); tick * step <= to + 1e-9; tick++) ticks.push(tick * step);
  keyed(at("axis"), ticks, (tick) => tick.toFixed(6), () => made("span"), (span, tick) => {
    span.style.left = `${place(tick)}%`;
    put(span, `${Number(tick.toFixed(6))} s`);
  });
  keyed(at("timeline"), rows, (each) => syncKey(each.sync), () => {
    const line = made("div", "sync");
    line.append(made("span", "sync-name"), made("span", "sync-outcome"), made("div", "lanes"));
    return line;
  }, (line, each) => {
    const [name, ended, lanes] = line.children;
    const sync = each.sync;
    put(name, syncName(sync));
    name.title = `${sync.run_id === null ? "" : `${sync.run_id}/`}${sync.version}, began at ${clock(sync.started_s)}`;
    put(ended, outcome(sync));
    ended.className = `sync-outcome ${sync.outcome === "failed" ? "wrong" : sync.outcome === "running" ? "busy" : ""}`;
    ended.title = sync.error || "";
    lanes.style.height = `${each.lanes * 10 + 4}px`;
    lanes.style.setProperty("--zero", `${place(0)}%`);
    lanes.classList.toggle("cut", each.list.some((bar) => bar.end > to + 1e-6));
    lanes.classList.toggle("cut-before", each.list.some((bar) => bar.start < from - 1e-6));
    const said = (bar) => `${syncName(sync)}: ${bar.said}`;
    keyed(lanes, each.list.map((bar, index) => ({ ...bar, index })), (bar) => `${bar.index} ${bar.name}`, () => {
      const bar = made("span");
      bar.tabIndex = -1;
      bar.setAttribute("role", "img");
      return bar;
    }, (element, bar) => {
      element.className = `bar ${bar.className}`;
      element.hidden = !inside(bar);
      element.style.left = `${place(bar.start)}%`;
      element.style.width = `max(2px, ${place(bar.end) - place(bar.start)}%)`;
      element.style.top = `${bar.lane * 10 + 2}px`;
      element.title = said(bar);
      element.setAttribute("aria-label", said(bar));
      if (document.activeElement === element) put(at("said"), said(bar));
    });
  });
  const every = at("timeline").querySelectorAll(".bar:not([hidden])");
  if (every.length && at("timeline").querySelector('.bar[tabindex="0"]') === null) every[0].tabIndex = 0;
  table("words", ["sync", "began", "ended", "waited for", "error"], rows.map(({ sync, list }) => ({
    key: syncKey(sync),
    cells: [
      { text: syncName(sync) }, number(clock(sync.started_s)),
      short(outcome(sync), sync.outcome === "failed" ? "wrong" : ""),
      { ...long(list.map((bar) => clipped(bar.said)).join("; ")), whole: true }, long(sync.error),
    ],
  })));
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].find((factor) => factor * power >= least) * power;
}

function point(event) {
  if (!event.target.classList.contains("bar")) return;
  put(at("said"), event.target.getAttribute("aria-label"));
  if (event.type !== "focusin") return;
  for (const bar of at("timeline").querySelectorAll('.bar[tabindex="0"]')) bar.tabIndex = -1;
  event.target.tabIndex = 0; // Tab comes back to where one was
}

for (const kind of ["mouseover", "focusin"]) at("timeline").addEventListener(kind, point);
at("timeline").addEventListener("keydown", (event) => {
  const every = Array.from(at("timeline").querySelectorAll(".bar:not([hidden])"));
  const now = every.indexOf(document.activeElement);
  const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: every.length - 1 }[event.key];
  if (next === undefined || every[next] === undefined) return;
  event.preventDefault();
  every[next].focus();
});

document.addEventListener("DOMContentLoaded", () => { // plots.js is there
  setInterval(head, 1000);
  ask();
});
