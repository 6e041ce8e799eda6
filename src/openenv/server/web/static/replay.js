/**
 * One recorded episode: a scrubber over its steps, with the environment's own picture of each, and what went wrong.
 */

import { el, fill, icon } from "./element.js";
import { ObservationView } from "./observation.js";
import { outcomeBadge, outcomeKind } from "./outcome.js";
import { Plot } from "./plot.js";
import { briefAction, formatDuration, formatNumber, formatReward, formatTime, shortJson } from "./values.js";
import { resultNode, treeOf } from "./view.js";

const FRAME_MS = 600;
const MOST_ROWS = 400;

/**
 * @typedef {object} ReplayFrame
 * @property {"reset" | "step" | "call"} kind
 * @property {number} n
 * @property {any} row
 * @property {string | null} html
 * @property {number} total
 */

/**
 * Put the rows of a file together: a picture belongs to the step before it.
 * @param {any[]} rows
 * @returns {ReplayFrame[]}
 */
export function framesOf(rows) {
  /** @type {ReplayFrame[]} */
  const frames = [];
  let total = 0;
  for (const row of rows) {
    if (row.kind === "picture") {
      const last = frames.findLast((frame) => frame.kind !== "call");
      if (last && typeof row.html === "string") last.html = row.html;
    } else if (row.kind === "reset" || row.kind === "step" || row.kind === "call") {
      total += typeof row.reward === "number" ? row.reward : 0;
      frames.push({ kind: row.kind, n: row.n ?? 0, row, html: null, total });
    }
  }
  return frames;
}

/** Badges about an episode, from its figures. @param {any} summary */
export function summaryBadges(summary) {
  const { done, truncated, terminated, last_reward: reward, errors, is_running: isRunning } = summary;
  const kind = outcomeKind({ done, truncated, terminated, reward });
  const reason = summary.reason === "reset" ? "reset before its end" : (summary.reason ?? "not ended");
  const cut = kind === "open" && !isRunning ? outcomeBadge("open", { text: reason }) : null;
  return [
    cut ?? outcomeBadge(kind === "open" ? "running" : kind, { reward }),
    errors > 0 && outcomeBadge("failed", { text: `${errors} failed` }),
    !summary.is_whole && el("span.badge", { title: "Some rows could not be written" }, "incomplete"),
  ];
}

/** The episode at one of its steps. */
export class Replay {
  /**
   * @param {any[]} rows
   * @param {object} [options]
   * @param {number} [options.step] - Where to begin; by default at the end.
   * @param {(index: number) => void} [options.onMove]
   * @param {boolean} [options.isCompact] - Beside another one.
   */
  constructor(rows, { step, onMove, isCompact = false } = {}) {
    this.frames = framesOf(rows);
    this.onMove = onMove;
    this.timer = 0;
    this.at = -1;
    this.view = new ObservationView();
    this.title = el("h3", {});
    this.action = el("div.replay-action");
    this.error = el("div");
    this.readout = el("p.replay-readout", { role: "status" });
    const last = Math.max(this.frames.length - 1, 0);
    this.range = el("input.scrubber", {
      type: "range",
      min: 0,
      max: last,
      step: 1,
      "aria-label": "Step of the episode",
      on: { input: () => this.#scrub() },
    });
    this.playButton = this.#button("play", "Play", () => this.#play());
    const controls = el(
      "div.replay-controls",
      {},
      this.#button("first", "To the start", () => this.go(0)),
      this.#button("back", "One step back", () => this.go(this.at - 1)),
      this.playButton,
      this.#button("forward", "One step on", () => this.go(this.at + 1)),
      this.range,
      this.readout,
    );
    this.rows = el("ol.replay-steps", { "aria-label": "Steps" });
    const shown = el("section.card.replay-shown", {}, controls, this.error, this.action, this.view.node);
    shown.prepend(el("div.card-head", {}, this.title, this.view.toggle));
    this.node = isCompact
      ? shown
      : el("div.replay", {}, shown, el("section.card", {}, el("h3", {}, "Steps"), this.rows));
    this.#drawRows();
    this.go(step ?? last, { isFirst: true });
  }

  /** Show a frame. @param {number} index @param {{isFirst?: boolean}} [options] */
  go(index, { isFirst = false } = {}) {
    const at = Math.min(Math.max(index, 0), this.frames.length - 1);
    if (at === this.at || this.frames.length === 0) return;
    this.at = at;
    this.range.value = String(at);
    this.#draw(this.frames[at]);
    if (!isFirst) this.onMove?.(at);
  }

  /** Stop what runs by itself. */
  close() {
    clearInterval(this.timer);
    this.timer = 0;
    fill(this.playButton, icon("play"));
    this.playButton.setAttribute("aria-label", "Play");
  }

  #scrub() {
    this.close();
    this.go(Number(this.range.value));
  }

  #play() {
    if (this.timer) return this.close();
    if (this.at >= this.frames.length - 1) this.go(0);
    fill(this.playButton, icon("stop"));
    this.playButton.setAttribute("aria-label", "Pause");
    this.timer = window.setInterval(() => {
      if (this.at >= this.frames.length - 1 || !this.node.isConnected) this.close();
      else this.go(this.at + 1);
    }, FRAME_MS);
  }

  /** @param {any} name @param {string} label @param {() => void} act */
  #button(name, label, act) {
    return el("button.small", { type: "button", "aria-label": label, title: label, on: { click: act } }, icon(name));
  }

  /** @param {ReplayFrame} frame */
  #draw({ kind, n, row, html, total }) {
    this.title.textContent = kind === "reset" ? "Reset" : kind === "call" ? `Tool ${row.name}` : `Step ${n}`;
    const parts = [
      `${this.at + 1} of ${this.frames.length}`,
      kind === "step" && row.reward !== undefined && `reward ${formatReward(row.reward)}`,
      `total ${formatNumber(total)}`,
      formatDuration(row.ms),
    ];
    this.readout.textContent = parts.filter(Boolean).join(" · ");
    this.range.setAttribute("aria-valuetext", `${this.title.textContent}, total ${formatNumber(total)}`);
    const subject = kind === "reset" ? row.arguments : kind === "call" ? row.arguments : row.action;
    fill(
      this.action,
      el("span.replay-label", {}, kind === "reset" ? "Arguments" : kind === "call" ? "Arguments" : "Action"),
      subject && Object.keys(subject).length > 3 ? treeOf(subject) : el("code", {}, briefAction(subject ?? {})),
      kind === "step" && row.done && outcomeBadge(outcomeKind({ ...row.observation, ...row }), { reward: row.reward }),
    );
    fill(this.error, row.error && errorNode(row.error));
    const hasView = kind !== "call" && "observation" in row;
    this.view.node.hidden = this.view.toggle.hidden = !hasView && kind !== "call";
    if (hasView) this.view.show(row.observation, html);
    else if (kind === "call" && "result" in row) fill(this.error, resultNode(row.result));
    for (const item of this.rows.children) {
      const isHere = Number(/** @type {HTMLElement} */ (item).dataset.at) === this.at;
      item.firstElementChild?.setAttribute("aria-current", isHere ? "step" : "false");
      if (isHere && this.timer) item.scrollIntoView({ block: "nearest" });
    }
  }

  #drawRows() {
    const rows = this.frames.slice(0, MOST_ROWS).map((frame, index) => {
      const { kind, row, n } = frame;
      const what = kind === "reset" ? `reset(${shortJson(row.arguments ?? {}, 40)})` : kind === "call" ? row.name : "";
      const label = what || briefAction(row.action);
      const outcome = row.error
        ? outcomeBadge("failed")
        : el("span.number", {}, kind === "step" ? formatReward(row.reward) : "");
      const button = el(
        "button.link.replay-step",
        { type: "button", on: { click: () => this.go(index) } },
        el("span.number", {}, kind === "step" ? n : ""),
        el("span.what", {}, label),
        outcome,
      );
      return el("li", { data: { at: index } }, button);
    });
    const left = this.frames.length - rows.length;
    fill(this.rows, rows, left > 0 && el("li.hint", {}, `and ${left} more; the slider reaches them`));
  }
}

/** The curve of an episode's rewards. @param {ReplayFrame[]} frames */
export function rewardPlot(frames) {
  const plot = new Plot();
  const steps = frames.filter(({ kind, row }) => kind === "step" && !row.error);
  const entries = steps.map(({ n, row }) => ({ step_count: n, reward: row.reward ?? null }));
  plot.show(/** @type {any} */ (entries), frames.at(-1)?.total ?? 0);
  return plot.node;
}

/** What a step raised; its traceback unfolds where the server has sent it. @param {any} error */
export function errorNode(error) {
  return el(
    "div.notice.is-error",
    {},
    el("p", {}, el("strong", {}, String(error.type ?? "Error")), ": ", el("span.pre", {}, String(error.message ?? ""))),
    typeof error.traceback === "string" &&
      el("details.fold", {}, el("summary", {}, "Traceback"), el("pre.text.traceback", {}, error.traceback)),
  );
}

/** @param {any} summary */
export function summaryFacts(summary) {
  const facts = [
    ["Return", formatNumber(summary.return)],
    ["Steps", String(summary.steps)],
    ["Seed", summary.seed === null || summary.seed === undefined ? "none" : String(summary.seed)],
    ["Reset", shortJson(summary.arguments ?? "not recorded", 80)],
    ["Began", formatTime(summary.began_at)],
    ["Played by", summary.opened_by],
  ];
  return el(
    "dl.facts",
    {},
    facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}
