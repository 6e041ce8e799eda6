/**
 * The curve over finished episodes: the return of each, oldest first, the mean of the last ten, and the mean of all.
 *
 * Episodes that still run, or were cut off by a reset, have a return so far. Among the others it would look like
 * learning.
 */

import { el, fill, svg } from "./element.js";
import { formatNumber } from "./values.js";

const HEIGHT = 150;
const LEFT = 50;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 14;
const WINDOW = 10;
const MOST = 400;

/** Returns, drawn. */
export class Curve {
  /** @param {(id: string) => void} choose - Called with the episode that is clicked. */
  constructor(choose) {
    this.choose = choose;
    this.width = 0;
    /** @type {any[]} */
    this.episodes = [];
    this.drawing = svg("svg", { class: "plot", height: HEIGHT, role: "img" });
    this.readout = el("p.readout", {});
    this.summary = el("p.hint.curve-summary", { role: "status" });
    this.empty = el("p.hint", {}, "Each point is a finished episode; none has finished yet.");
    this.node = el("div.plot-box", {}, this.summary, this.empty, this.drawing, this.readout);
    this.drawing.addEventListener("pointermove", (event) => this.#say(this.#nearest(event)));
    this.drawing.addEventListener("click", (event) => {
      const episode = this.#nearest(event);
      if (episode) this.choose(episode.id);
    });
    new ResizeObserver(() => this.#resize()).observe(this.node);
  }

  /** @param {any[]} episodes - Newest first. */
  show(episodes) {
    this.episodes = episodes.filter(({ done }) => done).slice(0, MOST).reverse();
    this.unfinished = episodes.length - this.episodes.length;
    this.#draw();
  }

  #resize() {
    const width = Math.floor(this.node.clientWidth);
    if (width === this.width || width === 0) return;
    this.width = width;
    this.#draw();
  }

  #draw() {
    const values = this.episodes.map((episode) => Number(episode.return) || 0);
    const isEmpty = values.length === 0;
    this.empty.hidden = !isEmpty;
    this.summary.hidden = isEmpty;
    this.drawing.toggleAttribute("hidden", isEmpty);
    this.readout.hidden = isEmpty;
    if (isEmpty || this.width === 0) return;
    const low = Math.min(0, ...values);
    const high = Math.max(...values, low + 1e-9, 0);
    const span = high - low || 1;
    const y = (/** @type {number} */ value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low) / span);
    const means = values.map((_, at) => mean(values.slice(Math.max(0, at - WINDOW + 1), at + 1)));
    const all = mean(values);
    const left = this.unfinished ? `; ${this.unfinished} unfinished not counted` : "";
    const count = `${values.length} finished ${values.length === 1 ? "episode" : "episodes"}`;
    this.summary.textContent = `${count}, mean return ${shortNumber(all)}${left}`;
    const label = (/** @type {number} */ value) =>
      svg(
        "text",
        { class: "plot-text", x: LEFT - 8, y: y(value) + 3.5, "text-anchor": "end" },
        shortNumber(value),
      );
    const line = means.map((value, at) => `${this.#x(at).toFixed(1)},${y(value).toFixed(1)}`).join("L");
    this.drawing.setAttribute("width", String(this.width));
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.drawing.setAttribute(
      "aria-label",
      `Return of ${values.length} finished episodes; the last ${formatNumber(values.at(-1))}, the mean of all ${shortNumber(all)}`,
    );
    this.drawing.replaceChildren(
      svg("line", { class: "plot-axis", x1: LEFT, x2: this.width - RIGHT, y1: y(0), y2: y(0) }),
      label(low),
      ...(high > low ? [label(high)] : []),
      ...values.map((value, at) =>
        svg("circle", {
          class: this.episodes[at].errors ? "curve-dot is-negative" : "curve-dot",
          cx: this.#x(at),
          cy: y(value),
          r: 3,
        }),
      ),
      svg("line", { class: "curve-mean", x1: LEFT, x2: this.width - RIGHT, y1: y(all), y2: y(all) }),
      svg("path", { class: "plot-line", d: `M${line}` }),
    );
    this.#say(this.episodes.at(-1));
  }

  /** @param {number} at */
  #x(at) {
    return LEFT + ((this.width - LEFT - RIGHT) * (at + 0.5)) / Math.max(this.episodes.length, 10);
  }

  /** @param {MouseEvent} event */
  #nearest(event) {
    const x = event.clientX - this.drawing.getBoundingClientRect().left;
    const share = (x - LEFT) / (this.width - LEFT - RIGHT);
    const at = Math.round(share * Math.max(this.episodes.length, 10) - 0.5);
    return this.episodes[Math.min(Math.max(at, 0), this.episodes.length - 1)];
  }

  /** @param {any} episode */
  #say(episode) {
    if (!episode) return;
    const number = this.episodes.indexOf(episode) + 1;
    const parts = [`Finished episode ${number}`, `return ${formatNumber(episode.return)}`, `${episode.steps} steps`];
    fill(
      this.readout,
      parts.map((part) => el("span", {}, part)),
      el("span", {}, `line: mean of the last ${Math.min(WINDOW, this.episodes.length)}; dashes: mean of all`),
    );
  }
}

/** @param {number} value */
function shortNumber(value) {
  return formatNumber(Number(value.toPrecision(3)));
}

/** @param {number[]} values */
function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / Math.max(values.length, 1);
}
