"use strict";
// Plots over versions, and the zoom of these and of the timeline. The small tools are page.js's.

const BOX = { width: 460, height: 170, left: 52, right: 12, top: 12, bottom: 24 };
const MOST_SERIES = 6; // colours that can be told apart
const LEAST_DRAG_PX = 6;
const WIDE = 30; // from so many times the least on, an axis goes in powers of ten
const PLOTS = [
  { id: "plot-behind", unit: "versions", title: "Versions behind", of: (point) => point.behind },
  { id: "plot-seconds", unit: "s", title: "Sync time", of: (point) => point.seconds },
  { id: "plot-bytes", unit: "MB", title: "Bytes an instance fetched", of: (point) => (point.nbytes ? point.nbytes / 1e6 : null) },
  { id: "plot-rate", unit: "GB/s", title: "Rate of the slowest instance", of: (point) => (point.slowest_bytes_s ? point.slowest_bytes_s / 1e9 : null) },
];

// What part of a range is looked at; all of it where nobody has zoomed in. `redraw` shows it.
class Zoom {
  constructor(redraw) {
    this.part = null;
    this.full = [0, 1];
    this.redraw = redraw;
  }

  of(from, to) {
    this.full = [from, to];
    if (this.part === null) return this.full;
    const [low, high] = [Math.max(from, this.part[0]), Math.min(to, this.part[1])];
    return low < high ? [low, high] : this.full;
  }

  show(from, to) {
    const all = from <= this.full[0] && to >= this.full[1];
    this.part = all ? null : [Math.max(this.full[0], from), Math.min(this.full[1], to)];
    this.redraw();
  }

  by(factor) {
    const [from, to] = this.of(...this.full);
    const [middle, half] = [(from + to) / 2, (factor * (to - from)) / 2];
    this.show(middle - half, middle + half);
  }

  move(share) {
    const [from, to] = this.of(...this.full);
    const step = Math.max(this.full[0] - from, Math.min(this.full[1] - to, share * (to - from)));
    if (this.part !== null) this.show(from + step, to + step);
  }

  // Buttons and keys: closer, further, all of it, to the left and to the right.
  controls(parent, what) {
    const buttons = [["+", "Closer", () => this.by(0.5)], ["−", "Further", () => this.by(2)], ["‹", "To the left", () => this.move(-0.5)],
      ["›", "To the right", () => this.move(0.5)], ["all", "All of it", () => this.by(Infinity)]];
    for (const [text, says, act] of buttons) {
      const button = made("button", "zoom", text);
      button.type = "button";
      button.title = `${says}: ${what}`;
      button.setAttribute("aria-label", button.title);
      button.addEventListener("click", act);
      parent.append(button);
    }
  }

  // Dragging over an element looks at that part, a double click at all. valueAt(x of the window) is in the range's own unit.
  dragging(element, valueAt) {
    let began = null;
    const mark = element.appendChild(made("div", "drag"));
    const show = (x) => {
      const left = element.getBoundingClientRect().left;
      mark.style.left = `${Math.min(began, x) - left}px`;
      mark.style.width = `${Math.abs(x - began)}px`;
    };
    element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      began = event.clientX;
      element.setPointerCapture(event.pointerId);
    });
    element.addEventListener("pointermove", (event) => {
      if (began !== null && Math.abs(event.clientX - began) > LEAST_DRAG_PX) show(event.clientX);
    });
    const end = (event) => {
      if (began === null) return;
      const [from, to] = [Math.min(began, event.clientX), Math.max(began, event.clientX)];
      began = null;
      mark.style.width = "0";
      if (event.type === "pointerup" && to - from > LEAST_DRAG_PX) this.show(valueAt(from), valueAt(to));
    };
    element.addEventListener("pointerup", end);
    element.addEventListener("pointercancel", end);
    element.addEventListener("dblclick", () => this.by(Infinity));
  }
}

function drawn(parent, tag, attributes, text = "") {
  const element = parent.appendChild(document.createElementNS(at(PLOTS[0].id).namespaceURI, tag));
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

const figure = (value) => (Math.abs(value) >= 99.5 ? String(Math.round(value)) : String(Number(value.toPrecision(3))));
let pointsNow = [];
const versions = new Zoom(() => plots(pointsNow));

function plots(points) {
  pointsNow = points;
  const shown = PLOTS.filter((plot) => points.some((point) => plot.of(point) !== null));
  at("plots-part").hidden = points.length < 2 || shown.length === 0;
  if (at("plots-part").hidden) return;
  const numbers = points.map((point) => point.version);
  const [from, to] = versions.of(Math.min(...numbers) - 0.5, Math.max(...numbers) + 0.5);
  const tags = [...new Set(points.map((point) => point.model_tag))];
  keyed(at("plots-legend"), tags.length > 1 ? tags : [], (tag) => tag, () => made("li"), (li, tag) => {
    if (!li.children.length) li.append(made("i", `series-${tags.indexOf(tag) % MOST_SERIES}`), made("span", "", clipped(tag)));
  });
  for (const plot of PLOTS) {
    at(plot.id).parentElement.hidden = !shown.includes(plot);
    if (shown.includes(plot)) drawPlot(plot, points.filter((point) => point.version >= from && point.version <= to), tags, from, to);
  }
}

function drawPlot(plot, points, tags, from, to) {
  const svg = at(plot.id);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${BOX.width} ${BOX.height}`);
  const seen = points.filter((point) => plot.of(point) !== null);
  const counts = plot.unit === "versions";
  const most = Math.max(...seen.map(plot.of), counts ? 1 : 0) || 1;
  const least = Math.min(...seen.map(plot.of).filter((value) => value > 0));
  const powers = !counts && most / least > WIDE; // deltas beside fulls: both can be read in powers of ten alone
  const floor = powers ? Math.floor(Math.log10(least)) : 0;
  const x = (version) => BOX.left + ((version - from) / (to - from)) * (BOX.width - BOX.left - BOX.right);
  const share = (value) => (powers ? (Math.log10(Math.max(value, 10 ** floor)) - floor) / (Math.log10(most) - floor) : value / most);
  const y = (value) => BOX.height - BOX.bottom - share(value) * (BOX.height - BOX.top - BOX.bottom);
  const ticks = (low, high, count, finest) => {
    const step = Math.max(finest, niceStep((high - low) / count));
    const found = [];
    for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + 1e-9; tick++) found.push(tick * step);
    return found;
  };
  const marks = powers ? ticks(floor, Math.log10(most), 4, 1).map((power) => 10 ** power) : ticks(0, most, 4, counts ? 1 : 0);
  for (const value of marks) {
    drawn(svg, "line", { x1: BOX.left, x2: BOX.width - BOX.right, y1: y(value), y2: y(value), class: "grid" });
    drawn(svg, "text", { x: BOX.left - 6, y: y(value) + 4, class: "tick end" }, figure(value));
  }
  for (const version of ticks(from, to, 6, 1)) drawn(svg, "text", { x: x(version), y: BOX.height - 6, class: "tick middle" }, String(version));
  tags.forEach((tag, index) => {
    const own = seen.filter((point) => point.model_tag === tag);
    const series = `series-${index % MOST_SERIES}`;
    drawn(svg, "polyline", { class: series, points: own.map((point) => `${x(point.version)},${y(plot.of(point))}`).join(" ") });
    for (const point of own) {
      const wrong = point.outcome === "failed" && plot.id === "plot-seconds";
      const dot = drawn(svg, "circle", { class: `${series}${wrong ? " failed" : ""}`, cx: x(point.version), cy: y(plot.of(point)), r: wrong ? 5 : 3 });
      const said = `${clipped(tag)} ${point.version}: ${figure(plot.of(point))} ${plot.unit}${wrong ? ", failed" : ""}`;
      drawn(dot, "title", {}, said);
    }
  });
  const last = seen[seen.length - 1];
  const values = seen.map(plot.of);
  svg.setAttribute("aria-label", last === undefined ? `${plot.title}: nothing in this part` :
    `${plot.title}, ${plot.unit}: ${figure(plot.of(last))} at version ${last.version}, ${figure(Math.min(...values))} to ${figure(Math.max(...values))} over ${seen.length} versions`);
}

function versionAt(plot) {
  return (clientX) => {
    const box = at(plot.id).getBoundingClientRect();
    const inside = ((clientX - box.left) / box.width) * BOX.width;
    const share = (inside - BOX.left) / (BOX.width - BOX.left - BOX.right);
    const [from, to] = versions.of(...versions.full);
    return from + Math.min(1, Math.max(0, share)) * (to - from);
  };
}

for (const plot of PLOTS) versions.dragging(at(plot.id).parentElement, versionAt(plot));
versions.controls(at("plots-zoom"), "the versions that are plotted");

const timelineZoom = new Zoom(() => {
  if (last !== null) syncs(last.status, last.spans);
});
timelineZoom.controls(at("syncs-zoom"), "the seconds of the last syncs");
timelineZoom.dragging(at("timeline-box"), (clientX) => {
  const box = at("timeline").querySelector(".lanes").getBoundingClientRect();
  const [from, to] = timelineZoom.of(...timelineZoom.full);
  return from + Math.min(1, Math.max(0, (clientX - box.left) / box.width)) * (to - from);
});
