/**
 * Learning curves: pass rate or mean reward over time, or by version of the policy; a line for each task, environment,
 * group, agent or model.
 */

import { rolloutApi } from "./api.js";
import { el, fill, svg } from "./element.js";
import { FoldRequest, nameOf } from "./rollout_stats.js";
import { formatCount, formatMoment, formatShare, visible } from "./texts.js";

const BY = ["", "task", "environment", "group", "agent", "model"];
const OVER = { time: "over time", policy_version: "by policy version" };
const MEASURES = { pass: "Pass rate", mean: "Mean reward" };
const HEIGHT = 240;
const LEFT = 52;
const RIGHT = 14;
const TOP = 12;
const BOTTOM = 26;
const TICK_WIDTH = 96;

/** @typedef {{name: string, at: number | string, scored: number, passed: number, mean: number, interval: [number, number]}} CurvePoint */

/** Curves, asked for while they are open. */
export class LearningCurves {
  /** @param {object} options @param {(error: any) => void} options.failed */
  constructor({ failed }) {
    this.width = 0;
    /** @type {CurvePoint[]} */
    this.points = [];
    const load = { change: () => this.asking.load() };
    const names = BY.map((name) => el("option", { value: name }, name ? `by ${nameOf(name)}` : "all together"));
    this.by = el("select", { "aria-label": "Lines", on: load }, names);
    this.over = el("select", { "aria-label": "Axis", on: load }, options(OVER));
    this.measure = el("select", { "aria-label": "Measure", on: { change: () => this.#draw() } }, options(MEASURES));
    this.drawing = svg("svg", { class: "plot", height: HEIGHT, role: "img" });
    this.legend = el("ul.legend");
    this.readout = el("p.readout", {});
    this.table = el("div.scroll", { tabindex: 0, role: "group", "aria-label": "Points of the curves" });
    this.empty = el("p.hint");
    const values = el("details.fold", {}, el("summary", {}, "Values"), this.table);
    this.box = el("div.plot-box", {}, this.drawing, this.readout, this.legend, values);
    this.node = el(
      "details.card.fold.is-tight.curves",
      {},
      el("summary", {}, "Learning curves"),
      el("div.toolbar", {}, this.measure, this.by, this.over),
      this.empty,
      this.box,
    );
    this.asking = new FoldRequest({
      fold: this.node,
      ask: (query) => {
        query.set("by", this.by.value);
        query.set("over", this.over.value);
        return rolloutApi.curve(query);
      },
      draw: ({ points }) => {
        // Rollouts without a version have no place on an axis of versions.
        this.points = this.#isTime ? points : points.filter((/** @type {CurvePoint} */ { at }) => at !== "");
        this.#resize();
        this.#draw();
      },
      failed,
    });
    this.drawing.addEventListener("pointermove", (event) => this.#point(event));
    new ResizeObserver(() => this.#resize()).observe(this.node);
  }

  /** @param {URLSearchParams} request - What the list is asked for. */
  show(request) {
    this.asking.show(request);
  }

  #resize() {
    const width = Math.floor(this.node.clientWidth - 34);
    if (width === this.width || width <= 0) return;
    this.width = width;
    this.#draw();
  }

  get #isTime() {
    return this.over.value === "time";
  }

  /** @param {CurvePoint} point */
  #value(point) {
    return this.measure.value === "pass" ? point.passed / point.scored : point.mean;
  }

  /** @param {number} value */
  #format(value) {
    return this.measure.value === "pass" ? formatShare(value) : value.toFixed(3);
  }

  /** @param {number | string} at */
  #place(at) {
    return this.#isTime ? formatMoment(Number(at)) : `version ${at}`;
  }

  #draw() {
    const { points } = this;
    const places = [...new Set(points.map(({ at }) => at))].sort(inOrder);
    const isEmpty = points.length === 0;
    this.empty.hidden = !isEmpty;
    this.box.hidden = isEmpty;
    this.empty.textContent = this.#isTime
      ? "No rollout with a reward is in this list."
      : "No rollout with a reward and a policy version is in this list.";
    if (isEmpty || this.width === 0) return;
    /** @type {Map<string, CurvePoint[]>} */
    const lines = new Map();
    for (const point of points) lines.set(point.name, [...(lines.get(point.name) ?? []), point]);
    for (const line of lines.values()) line.sort((one, other) => inOrder(one.at, other.at));
    this.lines = [...lines];
    const values = points.map((point) => this.#value(point));
    const low = Math.min(0, ...values);
    const high = this.measure.value === "pass" ? 1 : Math.max(...values, low + 1e-9, 0);
    const y = (/** @type {number} */ value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / (high - low));
    const first = Number(places[0]);
    const span = Number(places.at(-1)) - first;
    const isNumeric = places.every((at) => Number.isFinite(Number(at)));
    const share = (/** @type {number | string} */ at) => {
      if (isNumeric && span > 0) return (Number(at) - first) / span;
      return places.length > 1 ? places.indexOf(at) / (places.length - 1) : 0.5;
    };
    this.x = (/** @type {number | string} */ at) => LEFT + (this.width - LEFT - RIGHT) * share(at);
    const { x } = this;
    const tick = (/** @type {number} */ value) => [
      svg("line", { class: "curve-grid", x1: LEFT, x2: this.width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "plot-text", x: LEFT - 8, y: y(value) + 3.5, "text-anchor": "end" }, this.#format(value)),
    ];
    let right = -Infinity;
    const marks = places.filter((at) => {
      const isFree = x(at) - right >= TICK_WIDTH;
      if (isFree) right = x(at);
      return isFree;
    });
    const anchor = (/** @type {number} */ at) => (at < LEFT + 40 ? "start" : at > this.width - 60 ? "end" : "middle");
    const below = (/** @type {number | string} */ at) =>
      svg(
        "text",
        { class: "plot-text", x: x(at), y: HEIGHT - 8, "text-anchor": anchor(x(at)) },
        this.#isTime ? clock(Number(at), span) : String(at),
      );
    this.drawing.setAttribute("width", String(this.width));
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.drawing.setAttribute("aria-label", this.#summary());
    this.drawing.replaceChildren(
      ...[low, (low + high) / 2, high].flatMap(tick),
      ...marks.map(below),
      ...this.lines.flatMap(([, line], index) => this.#line(line, index, y)),
    );
    fill(
      this.legend,
      this.lines.map(([name, line], index) => {
        const last = line[line.length - 1];
        const label = name || (this.by.value ? "–" : "all");
        return el("li", { data: { line: index } }, el("strong", {}, visible(label)), ` ${this.#format(this.#value(last))}`);
      }),
    );
    this.#say(points[points.length - 1]);
    fill(this.table, this.#values());
  }

  /** @param {CurvePoint[]} line @param {number} index @param {(value: number) => number} y */
  #line(line, index, y) {
    const x = /** @type {(at: number | string) => number} */ (this.x);
    const spots = line.map((point) => `${x(point.at).toFixed(1)},${y(this.#value(point)).toFixed(1)}`);
    const isShare = this.measure.value === "pass";
    const area = [
      ...line.map(({ at, interval }) => `${x(at).toFixed(1)},${y(interval[1]).toFixed(1)}`),
      ...[...line].reverse().map(({ at, interval }) => `${x(at).toFixed(1)},${y(interval[0]).toFixed(1)}`),
    ];
    const isAlone = this.lines?.length === 1;
    return [
      ...(isShare && isAlone ? [svg("path", { class: "curve-area", "data-line": index, d: `M${area.join("L")}Z` })] : []),
      svg("path", { class: "curve-line", "data-line": index, d: `M${spots.join("L")}` }),
      ...line.map((point) =>
        svg("circle", { class: "curve-spot", "data-line": index, cx: x(point.at), cy: y(this.#value(point)), r: 3 }),
      ),
    ];
  }

  #summary() {
    const each = (this.lines ?? []).map(([name, line]) => {
      const ends = [line[0], line[line.length - 1]].map((point) => this.#format(this.#value(point)));
      return `${name || "all"}: from ${ends[0]} to ${ends[1]}`;
    });
    const measure = MEASURES[/** @type {keyof typeof MEASURES} */ (this.measure.value)];
    return `${measure} ${OVER[/** @type {keyof typeof OVER} */ (this.over.value)]}. ${each.join("; ")}`;
  }

  /** @param {PointerEvent} event */
  #point(event) {
    const left = event.clientX - this.drawing.getBoundingClientRect().left;
    const { x } = this;
    if (!x || this.points.length === 0) return;
    const top = event.clientY - this.drawing.getBoundingClientRect().top;
    const spots = [...this.drawing.querySelectorAll("circle")];
    const away = spots.map((spot) => Math.hypot(Number(spot.getAttribute("cx")) - left, Number(spot.getAttribute("cy")) - top));
    const ordered = (this.lines ?? []).flatMap(([, line]) => line);
    this.#say(ordered[away.indexOf(Math.min(...away))]);
  }

  /** @param {CurvePoint | undefined} point */
  #say(point) {
    if (!point) return;
    const [low, high] = point.interval;
    const parts = [
      point.name || "all",
      this.#place(point.at),
      `pass rate ${formatShare(point.passed / point.scored)} (${formatShare(low)} to ${formatShare(high)})`,
      `mean reward ${point.mean.toFixed(3)}`,
      `${formatCount(point.scored)} ${point.scored === 1 ? "rollout" : "rollouts"}`,
    ];
    fill(
      this.readout,
      parts.map((part) => el("span", {}, visible(part))),
    );
  }

  #values() {
    const titles = ["Line", this.#isTime ? "Time" : "Version", "Rollouts", "Pass rate", "Mean reward"];
    const row = (/** @type {CurvePoint} */ point) =>
      el(
        "tr",
        {},
        el("td", {}, visible(point.name || "all")),
        el("td", {}, this.#isTime ? this.#place(point.at) : point.at),
        el("td.number", {}, formatCount(point.scored)),
        el("td.number", {}, formatShare(point.passed / point.scored)),
        el("td.number", {}, point.mean.toFixed(3)),
      );
    const head = titles.map((title, index) => el(index > 1 ? "th.number" : "th", { scope: "col" }, title));
    const rows = (this.lines ?? []).flatMap(([, line]) => line).map(row);
    return el("table.log.stats", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows));
  }
}

/** @param {Record<string, string>} names */
function options(names) {
  return Object.entries(names).map(([value, text]) => el("option", { value }, text));
}

/** Order moments, and versions: by number where they are numbers. @param {number | string} one @param {number | string} other */
function inOrder(one, other) {
  if (Number.isFinite(Number(one)) && Number.isFinite(Number(other))) {
    return Number(one) - Number(other);
  }
  return String(one).localeCompare(String(other), undefined, { numeric: true });
}

/** A moment below the axis, as exact as its span allows. @param {number} seconds @param {number} span */
function clock(seconds, span) {
  const date = new Date(seconds * 1000);
  if (span > 2 * 86_400) return date.toLocaleDateString([], { month: "short", day: "numeric" });
  const second = span < 600 ? "2-digit" : undefined;
  return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second, hour12: false });
}
