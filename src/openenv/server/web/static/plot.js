/**
 * The plot of rewards: cumulated above, per step below. Two panels with scales of their own, and few elements however
 * long the episode is.
 */

import { el, fill, svg } from "./element.js";
import { formatNumber, formatReward } from "./values.js";

const TOTAL = { top: 10, height: 84 };
const STEPS = { top: 118, height: 52 };
const HEIGHT = 178;
const LEFT = 50;
const RIGHT = 10;

/** @typedef {{step: number, reward: number, total: number}} Point */

/** Rewards of an episode, drawn. */
export class Plot {
  constructor() {
    /** @type {Point[]} */
    this.points = [];
    this.width = 0;
    this.drawing = svg("svg", { class: "plot", height: HEIGHT, role: "img" });
    this.readout = el("p.readout", {});
    this.empty = el("p.hint", {}, "Rewards appear here, step by step.");
    this.node = el("div.plot-box", {}, this.empty, this.drawing, this.readout);
    this.drawing.addEventListener("pointermove", (event) => this.#point(event));
    this.drawing.addEventListener("pointerleave", () => this.#leave());
    new ResizeObserver(() => this.#resize()).observe(this.node);
  }

  /**
   * @param {import("./episode.js").StepEntry[]} steps
   * @param {number} total - Of all rewards, also of steps that are no longer in the list.
   */
  show(steps, total) {
    const sum = steps.reduce((sum, entry) => sum + Number(entry.reward ?? 0), 0);
    let running = total - sum;
    this.points = steps.map((entry) => {
      running += Number(entry.reward ?? 0);
      return { step: entry.step_count, reward: Number(entry.reward ?? 0), total: running };
    });
    this.hasRewards = steps.some((entry) => entry.reward !== null && entry.reward !== undefined);
    this.#draw();
  }

  #resize() {
    const width = Math.floor(this.node.clientWidth);
    if (width === this.width || width === 0) return;
    this.width = width;
    this.#draw();
  }

  #draw() {
    const isEmpty = this.points.length === 0 || !this.hasRewards;
    this.empty.hidden = !isEmpty;
    this.empty.textContent = this.points.length ? "No reward so far." : "Rewards appear here, step by step.";
    this.drawing.toggleAttribute("hidden", isEmpty);
    this.readout.hidden = isEmpty;
    if (isEmpty || this.width === 0) return;
    const last = this.points[this.points.length - 1];
    const total = `Total reward ${formatNumber(last.total)} after step ${last.step}`;
    this.drawing.setAttribute("aria-label", `${total}; the last step gave ${formatReward(last.reward)}`);
    this.drawing.setAttribute("width", String(this.width));
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.totals = scaleOf(
      this.points.map((point) => point.total),
      TOTAL,
    );
    this.rewards = scaleOf(
      this.points.map((point) => point.reward),
      STEPS,
    );
    this.cursor = svg("line", {
      class: "plot-cursor",
      y1: TOTAL.top,
      y2: STEPS.top + STEPS.height,
      visibility: "hidden",
    });
    this.drawing.replaceChildren(
      ...axis(this.totals, TOTAL, this.width, "total"),
      ...axis(this.rewards, STEPS, this.width, "step"),
      this.#bars(1),
      this.#bars(-1),
      ...this.#line(),
      this.cursor,
    );
    this.#say(last);
  }

  /** @param {number} index */
  #x(index) {
    const room = this.width - LEFT - RIGHT;
    return LEFT + (room * (index + 0.5)) / Math.max(this.points.length, 10);
  }

  #line() {
    const { y } = /** @type {Scale} */ (this.totals);
    const at = this.points.map((point, index) => `${this.#x(index).toFixed(1)},${y(point.total).toFixed(1)}`);
    const end = this.points.length - 1;
    return [
      svg("path", { class: "plot-line", d: `M${at.join("L")}` }),
      svg("circle", { class: "plot-dot", cx: this.#x(end), cy: y(this.points[end].total), r: 3.5 }),
    ];
  }

  /** @param {1 | -1} sign */
  #bars(sign) {
    const { y } = /** @type {Scale} */ (this.rewards);
    const room = (this.width - LEFT - RIGHT) / Math.max(this.points.length, 10);
    const half = Math.min(Math.max(room * 0.35, 0.5), 7);
    const zero = y(0).toFixed(1);
    const bars = this.points.map(({ reward }, index) => {
      if (Math.sign(reward) !== sign) return "";
      const x = this.#x(index);
      return `M${(x - half).toFixed(1)},${zero}V${y(reward).toFixed(1)}H${(x + half).toFixed(1)}V${zero}Z`;
    });
    return svg("path", { class: sign > 0 ? "plot-bar" : "plot-bar is-negative", d: bars.join("") });
  }

  /** @param {PointerEvent} event */
  #point(event) {
    if (!this.points.length || !this.cursor) return;
    const x = event.clientX - this.drawing.getBoundingClientRect().left;
    const room = this.width - LEFT - RIGHT;
    const found = Math.round(((x - LEFT) / room) * Math.max(this.points.length, 10) - 0.5);
    const index = Math.min(Math.max(found, 0), this.points.length - 1);
    this.cursor.setAttribute("x1", String(this.#x(index)));
    this.cursor.setAttribute("x2", String(this.#x(index)));
    this.cursor.setAttribute("visibility", "visible");
    this.#say(this.points[index]);
  }

  #leave() {
    this.cursor?.setAttribute("visibility", "hidden");
    if (this.points.length) this.#say(this.points[this.points.length - 1]);
  }

  /** @param {Point} point */
  #say(point) {
    const parts = [`Step ${point.step}`, formatReward(point.reward), `total ${formatNumber(point.total)}`];
    fill(
      this.readout,
      parts.map((part) => el("span", {}, part)),
    );
  }
}

/** @typedef {{low: number, high: number, y: (value: number) => number}} Scale */

/** @param {number[]} values @param {{top: number, height: number}} panel @returns {Scale} */
function scaleOf(values, { top, height }) {
  let low = 0;
  let high = 0;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low === high) high = low + 1;
  return { low, high, y: (value) => top + height * (1 - (value - low) / (high - low)) };
}

/** @param {Scale} scale @param {{top: number, height: number}} panel @param {number} width @param {string} name */
function axis(scale, { top, height }, width, name) {
  const zero = svg("line", { class: "plot-axis", x1: LEFT, x2: width - RIGHT, y1: scale.y(0), y2: scale.y(0) });
  const label = (/** @type {number} */ value) =>
    svg(
      "text",
      { class: "plot-text", x: LEFT - 8, y: scale.y(value) + 3.5, "text-anchor": "end" },
      formatNumber(Number(value.toPrecision(3))),
    );
  const labels = [scale.low, scale.high]
    .filter((value) => value !== 0 || scale.low === 0 || scale.high === 0)
    .map(label);
  const title = svg("text", { class: "plot-text", x: 0, y: top + height / 2 + 3.5 }, name);
  return [zero, ...labels, title];
}
