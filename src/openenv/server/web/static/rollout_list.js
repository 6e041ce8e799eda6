/**
 * The list of rollouts: those that run now, filters, figures, and as many rows as there are.
 */

import { rolloutApi } from "./api.js";
import { rewardBadge, statusBadge } from "./badges.js";
import { el, fill, icon } from "./element.js";
import { LearningCurves } from "./learning_curves.js";
import { listAddress, pairAddress, rolloutAddress } from "./rollout_address.js";
import { RolloutFilters } from "./rollout_filters.js";
import { RolloutStatsTable } from "./rollout_stats.js";
import { firstLine, formatAge, formatCount, formatMoment, formatShare, visible } from "./texts.js";
import { formatSeconds } from "./values.js";
import { VirtualList } from "./virtual_list.js";

const EVERY_MS = 3000;
const COLUMNS = ["", "Reward", "Task", "Status", "Agent and model", "Trust", "Turns", "Tokens", "Time", "Age"];

/** Everything about many rollouts. */
export class RolloutList {
  /**
   * @param {object} options
   * @param {(error: any) => boolean} options.refused - Takes errors that concern the visitor.
   */
  constructor({ refused }) {
    this.refused = refused;
    this.timer = 0;
    this.isShown = false;
    this.key = "";
    /** @type {string[]} - The rollouts to compare. */
    this.marked = [];
    this.filters = new RolloutFilters((query) => this.#filtered(query));
    this.stats = new RolloutStatsTable({
      narrow: (column, value) => this.#narrow(column, value),
      failed: (error) => this.#failed(error),
    });
    this.curves = new LearningCurves({ failed: (error) => this.#failed(error) });
    this.list = new VirtualList({
      label: "Rollouts",
      load: (offset, limit) => this.#load(offset, limit),
      cells: (row) => this.#cells(row),
      open: (row) => (location.hash = rolloutAddress(row.rollout_id, "", this.#verdict)),
      mark: (row) => this.#mark(row.rollout_id),
      failed: (error) => this.#failed(error),
      head: el(
        "div.virtual-row.virtual-head",
        { role: "row", "aria-rowindex": 1 },
        COLUMNS.map((title, index) =>
          el("span", { role: "columnheader", class: `c-${index}` }, title || el("span.unseen", {}, "Compare")),
        ),
      ),
    });
    this.count = el("p.hint", { role: "status" });
    this.figures = el("p.figures");
    this.problem = el("p.problem", { role: "alert", hidden: true });
    this.running = el("section.running", { "aria-label": "Running now" });
    this.compare = el(
      "button.small",
      { type: "button", disabled: true, on: { click: () => this.#compare() } },
      "Compare two",
    );
    this.exports = ["jsonl", "parquet"].map((format) =>
      el("a.button.small", { download: "" }, icon("save"), format === "jsonl" ? "JSONL" : "Parquet"),
    );
    this.empty = el("div.empty", { hidden: true });
    const bar = el("div.toolbar", {}, this.count, this.compare, el("span.export", {}, "Export", this.exports));
    this.node = el(
      "div.stack.is-tight",
      {},
      el("h2.unseen", {}, "List of rollouts"),
      this.running,
      el("section.card.is-tight", {}, this.filters.node),
      this.stats.node,
      this.curves.node,
      el("section.card.is-tight", {}, this.figures, bar, this.problem, this.empty, this.list.node),
    );
  }

  /** @param {boolean} isShown @param {URLSearchParams} [query] */
  show(isShown, query) {
    if (this.isShown && !isShown) this.list.keepPlace();
    this.isShown = isShown;
    clearTimeout(this.timer);
    if (!isShown) return;
    this.list.restorePlace();
    if (query) this.filters.query = query;
    this.#refresh(true);
  }

  get #verdict() {
    return this.filters.query.get("verdict") ?? "";
  }

  /** @param {URLSearchParams} query */
  #filtered(query) {
    history.replaceState(null, "", listAddress(query));
    this.#refresh(true);
  }

  /** @param {string} column @param {string} value */
  #narrow(column, value) {
    const { query } = this.filters;
    if (value === "") query.delete(column);
    else query.set(column, value);
    this.filters.query = query;
    this.#filtered(query);
  }

  /** @param {boolean} isAsked - Whether the visitor waits for it. */
  async #refresh(isAsked) {
    clearTimeout(this.timer);
    const key = String(this.filters.query);
    try {
      if (isAsked) this.#address();
      // While rows are read, the list must not move: it is only brought up to date at its top.
      if (isAsked || this.list.node.scrollTop === 0) await this.list.reload(key !== this.key);
      else await this.#load(0, 1);
      if (isAsked) {
        this.#offer();
        this.stats.show(this.filters.request);
        this.curves.show(this.filters.request);
      }
      this.key = key;
      this.problem.hidden = true;
    } catch (error) {
      this.#failed(error);
    }
    if (this.isShown)
      this.timer = window.setTimeout(() => (document.hidden ? this.#later() : this.#refresh(false)), EVERY_MS);
  }

  #later() {
    this.timer = window.setTimeout(() => this.#refresh(false), EVERY_MS);
  }

  async #offer() {
    const { store } = Object.fromEntries(this.filters.request);
    try {
      this.filters.offer(await rolloutApi.names(new URLSearchParams(store ? { store } : {})));
    } catch (error) {
      this.#failed(error);
    }
  }

  /** @param {number} offset @param {number} limit */
  async #load(offset, limit) {
    const query = this.filters.request;
    query.set("offset", String(offset));
    query.set("limit", String(limit));
    const answer = await rolloutApi.list(query);
    this.count.textContent = `${formatCount(answer.total)} ${answer.total === 1 ? "rollout" : "rollouts"}`;
    fill(this.figures, figuresOf(answer.all));
    this.#drawEmpty(answer.total === 0);
    this.list.node.hidden = answer.total === 0;
    this.#drawRunning(answer.running);
    return answer;
  }

  /** @param {boolean} isEmpty */
  #drawEmpty(isEmpty) {
    this.empty.hidden = !isEmpty;
    if (!isEmpty) return;
    const { query } = this.filters;
    query.delete("store");
    query.delete("order");
    const isFiltered = String(query) !== "";
    if (this.empty.dataset.filtered === String(isFiltered)) return;
    this.empty.dataset.filtered = String(isFiltered);
    const clear = el("button", { type: "button", on: { click: () => this.filters.reset() } }, "Clear the filters");
    if (isFiltered) fill(this.empty, el("h3", {}, "No rollouts match the filters"), clear);
    else
      fill(
        this.empty,
        el("h3", {}, "No rollouts yet"),
        el("p", {}, "They appear here as soon as they start. To run some:"),
        el("pre.text", { tabindex: 0 }, "openenv rollouts run sudoku --tasks 20 --agent oracle"),
      );
  }

  #address() {
    ["jsonl", "parquet"].forEach((format, index) => {
      const query = this.filters.request;
      query.delete("order");
      query.set("format", format);
      this.exports[index].setAttribute("href", rolloutApi.exportAddress(query));
    });
  }

  /** @param {any} row */
  #cells(row) {
    const id = row.rollout_id;
    const mark = el("input", {
      type: "checkbox",
      tabindex: -1,
      "aria-label": `Compare ${id}`,
      checked: this.marked.includes(id),
      on: { change: () => this.#mark(id) },
    });
    const who = [row.agent, row.model].filter(Boolean).join(" · ");
    const instruction = (row.instruction ?? "").slice(0, 500).replace(/\s+/g, " ");
    const version = row.policy_version && `version ${row.policy_version}`;
    const where = [row.environment, version].filter(Boolean).join(" · ");
    const cell = (/** @type {number} */ column, /** @type {any[]} */ ...children) =>
      el("span", { role: "gridcell", class: `c-${column}` }, children);
    return [
      cell(0, mark),
      cell(1, rewardBadge(row.reward)),
      cell(
        2,
        el(
          "a",
          { href: rolloutAddress(id, "", this.#verdict), tabindex: -1 },
          row.task_id ? visible(firstLine(row.task_id, 80)) : id,
        ),
        el("span.row-id.mono", {}, id.slice(0, 8)),
        row.parent && el("span.row-id", {}, `branch of ${row.parent.slice(0, 8)} at ${row.parent_call}`),
        instruction && el("span.row-instruction", { title: instruction, dir: "auto" }, visible(instruction.slice(0, 160))),
      ),
      cell(3, statusBadge(row.status, row.reason)),
      cell(
        4,
        el("span", { title: who }, visible(firstLine(who, 60))),
        where && el("span.row-instruction", { title: where }, visible(firstLine(where, 80))),
      ),
      cell(5, row.trust ?? "–"),
      cell(6, row.turns),
      cell(7, formatCount(row.tokens)),
      cell(8, formatSeconds(row.wall_s)),
      cell(9, el("time", { title: formatMoment(row.stored_at) }, formatAge(Date.now() / 1000 - row.stored_at))),
    ];
  }

  /** @param {any[]} running */
  #drawRunning(running) {
    this.running.hidden = running.length === 0;
    fill(
      this.running,
      running
        .slice(0, 20)
        .map((each) =>
          el(
            "a.card.running-one",
            { href: rolloutAddress(each.rollout_id) },
            el(
              "span.chip",
              { data: { state: each.is_running ? "busy" : "lost" } },
              each.is_running ? "running" : "interrupted",
            ),
            el("strong", {}, visible(each.task_id || each.rollout_id)),
            el("span.hint", {}, [each.agent, each.model].filter(Boolean).join(" · ")),
            el("span.hint", {}, formatAge(Date.now() / 1000 - each.began_at)),
          ),
        ),
      running.length > 20 && el("p.hint", {}, `${running.length - 20} more`),
    );
  }

  /** @param {string} id */
  #mark(id) {
    this.marked = this.marked.includes(id) ? this.marked.filter((each) => each !== id) : [...this.marked, id].slice(-2);
    this.compare.disabled = this.marked.length < 2;
    this.compare.textContent = this.marked.length === 1 ? "Compare: choose one more" : "Compare two";
    this.list.redraw();
  }

  #compare() {
    if (this.marked.length === 2) location.hash = pairAddress(this.marked[0], this.marked[1]);
  }

  /** @param {any} error */
  #failed(error) {
    if (this.refused(error)) return;
    this.problem.textContent = error.message;
    this.problem.hidden = false;
  }
}

/** The total pass rate and the mean reward of all rollouts of the list. @param {any} all */
function figuresOf(all) {
  if (!all || all.scored === 0) return [];
  const missing = all.rollouts - all.scored;
  const [low, high] = all.interval;
  return [
    el("strong", {}, `Pass rate ${formatShare(all.pass_rate)}`),
    el("span.hint", {}, `${formatCount(all.passed)} of ${formatCount(all.scored)}; 95 % interval ${formatShare(low)} to ${formatShare(high)}`),
    el("span.hint", {}, `mean reward ${all.mean.toFixed(3)}`),
    missing > 0 && el("span.hint", {}, `${formatCount(missing)} without a reward`),
  ];
}
