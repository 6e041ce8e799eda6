/**
 * Pass rates and rewards with their spread, by task, environment, group, agent or model.
 */

import { rolloutApi } from "./api.js";
import { el, fill, svg } from "./element.js";
import { formatCount, formatShare, visible } from "./texts.js";
import { formatSeconds } from "./values.js";

const BY = ["task", "environment", "group", "policy_version", "agent", "model", "status", "verdict"];
const MOST = 200;

/** Asks for the figures of a list while their fold is open. An answer that a newer request overtook is dropped. */
export class FoldRequest {
  /**
   * @param {object} options
   * @param {HTMLElement} options.fold
   * @param {(query: URLSearchParams) => Promise<any>} options.ask
   * @param {(answer: any) => void} options.draw
   * @param {(error: any) => void} options.failed
   */
  constructor({ fold, ask, draw, failed }) {
    this.fold = fold;
    this.ask = ask;
    this.draw = draw;
    this.failed = failed;
    this.request = new URLSearchParams();
    this.version = 0;
    fold.addEventListener("toggle", () => this.load());
  }

  /** @param {URLSearchParams} request - What the list is asked for. */
  show(request) {
    this.request = request;
    this.load();
  }

  async load() {
    if (!this.fold.open) return;
    this.version += 1;
    const { version } = this;
    const query = new URLSearchParams(this.request);
    query.delete("order");
    try {
      const answer = await this.ask(query);
      if (version === this.version) this.draw(answer);
    } catch (error) {
      this.failed(error);
    }
  }
}

/** A table of figures, asked for while it is open. */
export class RolloutStatsTable {
  /**
   * @param {object} options
   * @param {(column: string, value: string) => void} options.narrow - Set a filter.
   * @param {(error: any) => void} options.failed
   */
  constructor({ narrow, failed }) {
    this.narrow = narrow;
    this.by = el(
      "select.by",
      { "aria-label": "Figures by", on: { change: () => this.asking.load() } },
      BY.map((name) => el("option", { value: name }, `by ${nameOf(name)}`)),
    );
    this.summary = el("p.hint", { role: "status" });
    this.rows = el("tbody");
    const titles = ["", "Rollouts", "Pass rate", "95 % interval", "Reward", "Spread", "Turns", "Tokens", "Time"];
    this.table = el(
      "table.log.stats",
      {},
      el("caption.unseen", {}, "Pass rates and rewards"),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          titles.map((title, index) => el(index ? "th.number" : "th", { scope: "col" }, title || "Name")),
        ),
      ),
      this.rows,
    );
    const box = el("div.scroll", { tabindex: 0, role: "group", "aria-label": "Figures" }, this.table);
    this.node = el(
      "details.card.fold.is-tight",
      {},
      el("summary", {}, "Pass rates"),
      el("div.toolbar", {}, this.by, this.summary),
      box,
    );
    this.asking = new FoldRequest({
      fold: this.node,
      ask: (query) => {
        query.set("by", this.by.value);
        query.set("limit", String(MOST));
        return rolloutApi.stats(query);
      },
      draw: (answer) => this.#draw(answer),
      failed,
    });
  }

  /** @param {URLSearchParams} request - What the list is asked for. */
  show(request) {
    this.asking.show(request);
  }

  /** @param {any} answer */
  #draw({ by, rows, all }) {
    const most = rows.length >= MOST ? `, the ${MOST} largest` : "";
    const noun = by === "status" ? "statuses" : `${nameOf(by)}s`;
    this.summary.textContent = rows.length ? `${formatCount(rows.length)} ${noun}${most}` : "No rollouts.";
    const lines = all && rows.length > 1 ? [...rows, { ...all, name: null }] : rows;
    fill(
      this.rows,
      lines.map((/** @type {any} */ row) => this.#row(by, row)),
    );
  }

  /** @param {string} by @param {any} row */
  #row(by, row) {
    const missing = row.rollouts - row.scored;
    const name =
      row.name === null
        ? el("strong", {}, "all")
        : el(
            "button.link",
            { type: "button", title: "Show only these", on: { click: () => this.narrow(by, row.name) } },
            row.name === "" ? "–" : visible(row.name),
          );
    const number = (/** @type {string} */ text) => el("td.number", {}, text);
    return el(
      "tr",
      {},
      el("td", {}, name),
      el(
        "td.number",
        { title: missing ? `${missing} without a reward` : null },
        formatCount(row.rollouts),
        missing ? "*" : "",
      ),
      number(formatShare(row.pass_rate)),
      el("td", {}, row.interval && whisker(row.pass_rate, row.interval)),
      number(row.mean === null ? "–" : row.mean.toFixed(3)),
      number(row.deviation === null ? "–" : `±${row.deviation.toFixed(3)}`),
      number(row.turns.toFixed(1)),
      number(formatCount(row.tokens)),
      number(formatSeconds(row.wall_s)),
    );
  }
}

/** A share and its interval on a line from 0 to 1. @param {number} rate @param {[number, number]} interval */
function whisker(rate, [low, high]) {
  const at = (/** @type {number} */ value) => 4 + value * 112;
  const label = `${formatShare(low)} to ${formatShare(high)}`;
  return svg(
    "svg",
    { class: "whisker", width: 120, height: 16, viewBox: "0 0 120 16", role: "img", "aria-label": label },
    svg("title", {}, label),
    svg("line", { class: "whisker-axis", x1: 4, x2: 116, y1: 8, y2: 8 }),
    svg("rect", { class: "whisker-range", x: at(low), y: 5, width: Math.max(1, at(high) - at(low)), height: 6, rx: 3 }),
    svg("circle", { class: "whisker-dot", cx: at(rate), cy: 8, r: 4 }),
  );
}

/** A column's name in words. @param {string} column */
export function nameOf(column) {
  return column.replace("_", " ");
}
