/**
 * Two rollouts side by side: figures, checks, and their transcripts call by call.
 */

import { rolloutApi } from "./api.js";
import { rewardBadge, statusBadge, trustBadge } from "./badges.js";
import { el, fill } from "./element.js";
import { rolloutAddress } from "./rollout_address.js";
import { firstLine, formatMoment, visible } from "./texts.js";
import { TranscriptView } from "./transcript.js";
import { formatNumber, formatSeconds } from "./values.js";

/** A page about two rollouts. */
export class RolloutPair {
  /**
   * @param {[string, string]} ids
   * @param {object} options
   * @param {(error: any) => boolean} options.refused
   */
  constructor(ids, { refused }) {
    this.node = el("div.stack.is-tight", {}, el("p.hint", {}, "Loading…"));
    this.#load(ids, refused);
  }

  /** There is nothing to stop. */
  close() {}

  /** @param {[string, string]} ids @param {(error: any) => boolean} refused */
  async #load(ids, refused) {
    try {
      const both = await Promise.all(ids.map((id) => rolloutApi.one(id)));
      const running = both.find((rollout) => rollout.begun !== null);
      if (running) throw new Error(`${running.rollout_id} has not ended yet.`);
      this.#draw(both);
    } catch (error) {
      if (refused(error)) return;
      fill(this.node, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message));
    }
  }

  /** @param {any[]} both */
  #draw(both) {
    const transcripts = both.map((rollout) => new TranscriptView(rollout.rollout_id, { isCompact: true }));
    for (const transcript of transcripts) transcript.load();
    fill(
      this.node,
      el("p", {}, el("a", { href: "#rollouts" }, "← All rollouts")),
      el(
        "section.card",
        {},
        el("h2", {}, "Two rollouts"),
        el("div.scroll", { tabindex: 0, role: "group", "aria-label": "Figures" }, figures(both)),
      ),
      el(
        "section.card",
        {},
        el("h2", {}, "Checks"),
        el("div.scroll", { tabindex: 0, role: "group", "aria-label": "Checks" }, checks(both)),
      ),
      el(
        "div.side-by-side",
        {},
        both.map((rollout, index) =>
          el(
            "section",
            { "aria-label": `Transcript of ${rollout.rollout_id}` },
            el("h2", {}, heading(rollout)),
            transcripts[index].node,
          ),
        ),
      ),
    );
  }
}

/** @param {any} rollout */
function heading(rollout) {
  return el("a", { href: rolloutAddress(rollout.rollout_id) }, rollout.rollout_id);
}

/** @param {any[]} both */
function figures(both) {
  const row = (/** @type {string} */ title, /** @type {(rollout: any) => any} */ value) => {
    const cells = both.map(value);
    const texts = cells.map((cell) => (cell instanceof Node ? cell.textContent : String(cell)));
    return el(
      "tr",
      { class: texts[0] === texts[1] ? "" : "differs" },
      el("th", { scope: "row" }, title),
      cells.map((cell) => el("td", {}, cell)),
    );
  };
  return el(
    "table.log",
    {},
    el("caption.unseen", {}, "The figures of both"),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("td"),
        both.map((rollout) => el("th", { scope: "col" }, heading(rollout))),
      ),
    ),
    el(
      "tbody",
      {},
      row("Task", ({ outcome }) => visible(outcome.task_id || "–")[0]),
      row("Group", ({ group }) => visible(group || "–")[0]),
      row("Reward", ({ outcome }) => rewardBadge(outcome.reward)),
      row("Trust", ({ outcome }) => trustBadge(outcome.trust)),
      row("Status", ({ outcome }) => statusBadge(outcome.status, outcome.reason)),
      row("Reason", ({ outcome }) => firstLine(outcome.reason ?? "–", 200)),
      row("Agent", ({ outcome }) => outcome.agent || "–"),
      row("Model", ({ outcome }) => outcome.model || "–"),
      row("Calls", ({ turns }) => formatNumber(turns)),
      row("Took", ({ outcome }) => formatSeconds(outcome.wall_s)),
      row("Begun", ({ outcome }) => formatMoment(outcome.started_at)),
      row("Verdicts", ({ verdicts }) => formatNumber(verdicts.length)),
    ),
  );
}

/** @param {any[]} both */
function checks(both) {
  const results = both.map((rollout) => rollout.verdicts[0].results);
  const count = Math.max(...results.map((each) => each.length));
  const rows = Array.from({ length: count }, (_, index) => {
    const pair = results.map((each) => each[index]);
    const shown = pair.find(Boolean);
    const command = shown?.name || shown?.cmd || "";
    const marks = pair.map((result) =>
      !result ? "–" : result.exit_code === 0 ? "passed" : `failed, exit code ${result.exit_code}`,
    );
    return el(
      "tr",
      { class: marks[0] === marks[1] ? "" : "differs" },
      el("td", {}, el("code", {}, visible(firstLine(command, 160)))),
      marks.map((mark, side) =>
        el(
          "td",
          { title: pair[side]?.note ?? null },
          el(mark === "passed" ? "span.badge.is-positive" : "span.badge.is-negative", {}, mark),
        ),
      ),
    );
  });
  return el(
    "table.log",
    {},
    el("caption.unseen", {}, "The checks of both"),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th", { scope: "col" }, "Check"),
        both.map((rollout) => el("th", { scope: "col" }, rollout.rollout_id.slice(0, 8))),
      ),
    ),
    el("tbody", {}, rows),
  );
}
