/**
 * Watching a session: what it observed last, what it has earned, how fast it goes. Asked for every second.
 */

import { api } from "./api.js";
import { el, fill } from "./element.js";
import { ObservationView } from "./observation.js";
import { outcomeBadge, outcomeKind } from "./outcome.js";
import { pageAddress } from "./places.js";
import { errorNode } from "./replay.js";
import { briefAction, formatNumber, formatReward, formatSeconds } from "./values.js";

const EVERY_MS = 1000;

/** A card about one session that runs. */
export class Watch {
  /** @param {object} options @param {(error: any) => boolean} options.refused */
  constructor({ refused }) {
    this.refused = refused;
    /** @type {string | null} */
    this.id = null;
    this.timer = 0;
    /** @type {{at: number, steps: number} | null} */
    this.before = null;
    this.view = new ObservationView();
    this.title = el("h2", {});
    this.badges = el("div.marks");
    this.facts = el("dl.facts");
    this.last = el("div.replay-action");
    this.note = el("p.hint", { role: "status" });
    this.node = el("section.card.watch", { hidden: true, "aria-label": "Watched session" });
  }

  #assemble() {
    const back = el("a.button.small", { href: pageAddress("sessions") }, "Stop watching");
    fill(
      this.node,
      el("div.card-head", {}, this.title, this.badges, this.view.toggle, back),
      this.facts,
      this.note,
      this.last,
      this.view.node,
    );
  }

  /** @param {string | null} id - None ends it. */
  show(id) {
    if (id === this.id) return;
    this.id = id;
    this.before = null;
    clearTimeout(this.timer);
    this.node.hidden = id === null;
    if (id === null) return fill(this.node);
    this.#assemble();
    this.title.textContent = `Session ${id.slice(0, 13)}${id.length > 13 ? "…" : ""}`;
    this.title.title = id;
    fill(this.facts);
    fill(this.badges);
    fill(this.last);
    this.view.node.hidden = this.view.toggle.hidden = true;
    this.note.textContent = "Looking…";
    scrollTo(0, 0);
    this.#refresh(id);
  }

  /** @param {string} id */
  async #refresh(id) {
    try {
      const seen = document.hidden ? null : await api.watch(id);
      if (this.id !== id) return;
      if (seen) this.#draw(seen);
    } catch (error) {
      if (this.id !== id || this.refused(error)) return;
      const { status, message } = /** @type {import("./api.js").ApiError} */ (error);
      this.note.hidden = false;
      this.note.textContent = status === 404 ? "The session has ended. This is its last state." : message;
      if (status === 404) return;
    }
    this.timer = window.setTimeout(() => this.#refresh(id), EVERY_MS);
  }

  /** @param {any} seen */
  #draw(seen) {
    const { episode, last, picture } = seen;
    const now = performance.now();
    const rate = this.before ? (seen.step_count - this.before.steps) / ((now - this.before.at) / 1000) : null;
    this.before = { at: now, steps: seen.step_count };
    const facts = [
      ["Opened by", seen.opened_by],
      ["Steps", `${seen.step_count}${rate === null ? "" : `, ${formatNumber(Number(rate.toPrecision(3)))} per second`}`],
      ["Reward so far", episode ? formatNumber(episode.return) : "–"],
      ["Last reward", episode ? formatReward(episode.last_reward) : "–"],
      ["Idle", formatSeconds(seen.idle_s)],
      ["Recorded", seen.is_recorded ? "yes" : "no, only while you watch"],
    ];
    fill(
      this.facts,
      facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    );
    const kind = episode && outcomeKind({ ...episode, reward: episode.last_reward });
    fill(
      this.badges,
      el("span.badge", {}, seen.state),
      kind && kind !== "open" && outcomeBadge(kind, { reward: episode.last_reward }),
      episode && seen.is_recorded && el("a", { href: pageAddress("episodes", [episode.id]) }, "Episode"),
    );
    this.note.hidden = last !== null;
    this.note.textContent = "No actions yet. The next reset or step appears here.";
    this.view.node.hidden = this.view.toggle.hidden = !last || !("observation" in last);
    if (!last) return;
    fill(
      this.last,
      el("span.replay-label", {}, last.kind === "reset" ? "Reset" : last.kind === "call" ? "Tool" : `Step ${last.n}`),
      el("code", {}, last.kind === "call" ? last.name : briefAction(last.action ?? last.arguments ?? {})),
      last.error && errorNode(last.error),
    );
    if ("observation" in last) this.view.show(last.observation, picture);
  }
}
