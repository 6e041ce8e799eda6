/**
 * When what happened: phases as bars on a line of time, events, and what the agent printed.
 */

import { rolloutApi } from "./api.js";
import { el, fill } from "./element.js";
import { codeBlock, outputOf, visible } from "./texts.js";
import { formatSeconds } from "./values.js";

const PHASES = {
  sandbox: "a sandbox starts",
  setup: "files and setup",
  agent: "the agent works",
  collect: "the work tree is collected",
  verify: "checks run",
  store: "kept on disk",
};

/** Phases and events; those of a running rollout grow. */
export class Timeline {
  constructor() {
    /** @type {any[]} */
    this.events = [];
    this.bars = el("ol.phases");
    this.list = el("ol.events");
    this.node = el("div.timeline", {}, this.bars, this.list);
  }

  /**
   * @param {any[]} events
   * @param {Record<string, number>} spent - Seconds by phase, of a rollout whose events do not have all of them.
   * @param {boolean} [isRunning]
   */
  show(events, spent, isRunning = false) {
    this.events = events;
    const begun = phasesOf(events, isRunning);
    const phases = Object.keys(spent).length > begun.length ? inOrder(spent) : begun;
    const end = Math.max(0.001, ...phases.map((phase) => phase.to));
    fill(
      this.bars,
      phases.map((phase) => barNode(phase, end)),
    );
    fill(
      this.list,
      events.map((event) =>
        el(
          "li",
          {},
          el("time", {}, formatSeconds(event.elapsed_s)),
          el("span.phase-name", {}, event.phase),
          el("span", {}, visible(event.message ?? "")),
        ),
      ),
    );
    this.list.hidden = events.length === 0;
  }
}

/** @typedef {{name: string, from: number, to: number, isOpen: boolean}} PhaseBar */

/** @param {any[]} events @param {boolean} isRunning @returns {PhaseBar[]} */
function phasesOf(events, isRunning) {
  /** @type {PhaseBar[]} */
  const bars = [];
  for (const event of events) {
    const last = bars[bars.length - 1];
    if (last) last.to = event.elapsed_s;
    if (event.phase === "done") break;
    if (!last || last.name !== event.phase)
      bars.push({ name: event.phase, from: event.elapsed_s, to: event.elapsed_s, isOpen: false });
  }
  const last = bars[bars.length - 1];
  if (last && isRunning) {
    const { at, elapsed_s: elapsed } = events[events.length - 1];
    last.isOpen = true;
    last.to = Math.max(last.to, elapsed + Math.max(0, Date.now() / 1000 - at));
  }
  return bars;
}

/** @param {Record<string, number>} spent @returns {PhaseBar[]} */
function inOrder(spent) {
  let at = 0;
  return Object.entries(spent).map(([name, seconds]) => {
    const bar = { name, from: at, to: at + seconds, isOpen: false };
    at += seconds;
    return bar;
  });
}

/** @param {PhaseBar} phase @param {number} end */
function barNode(phase, end) {
  const bar = el("span.phase-bar", { data: { phase: phase.name } });
  bar.style.left = `${((phase.from / end) * 100).toFixed(2)}%`;
  bar.style.width = `${Math.max(0.4, ((phase.to - phase.from) / end) * 100).toFixed(2)}%`;
  bar.classList.toggle("is-open", phase.isOpen);
  const about = Object.hasOwn(PHASES, phase.name) ? PHASES[/** @type {keyof typeof PHASES} */ (phase.name)] : "";
  return el(
    "li.phase",
    { title: about },
    el("span.phase-name", {}, phase.name),
    el("span.phase-track", {}, bar),
    el("span.phase-time", {}, formatSeconds(phase.to - phase.from)),
  );
}

/** What the agent printed, from its start; a running one goes on. */
export class AgentOutput {
  /** @param {string} id */
  constructor(id) {
    this.id = id;
    this.end = 0;
    this.size = 0;
    this.text = "";
    this.place = el("div", {}, el("p.hint", {}, "Nothing yet."));
    this.more = el("button.small", { type: "button", hidden: true, on: { click: () => this.load() } }, "Show more");
    this.node = el("section", {}, el("h3", {}, "Output of the agent"), this.place, this.more);
  }

  async load() {
    try {
      this.take(await rolloutApi.one(this.id, "log", new URLSearchParams({ start: String(this.end) })));
    } catch (error) {
      fill(this.place, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message));
    }
  }

  /** @param {{start: number, end: number, size: number, text: string}} part */
  take({ start, end, size, text }) {
    this.size = size;
    this.more.hidden = end >= size;
    if (start !== this.end || text === "") return;
    this.end = end;
    this.text += text;
    fill(this.place, codeBlock(outputOf(this.text), { label: "Output of the agent" }));
  }
}
