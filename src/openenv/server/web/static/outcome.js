/**
 * How an episode ended, at a glance: won, lost, truncated, failed, or cut off look different.
 *
 * Environments do not say whether an end is good; the sign of the last reward is what there is to go by.
 */

import { el, icon } from "./element.js";
import { formatReward } from "./values.js";

/** @typedef {"won" | "lost" | "truncated" | "done" | "failed" | "running" | "open"} OutcomeKind */

/**
 * @param {object} end
 * @param {boolean} end.done
 * @param {any} [end.truncated]
 * @param {any} [end.terminated]
 * @param {any} [end.reward] - Of the last step.
 * @returns {OutcomeKind}
 */
export function outcomeKind({ done, truncated, terminated, reward }) {
  if (!done) return "open";
  if (truncated === true && terminated !== true) return "truncated";
  if (typeof reward !== "number" || !Number.isFinite(reward)) return "done";
  return reward > 0 ? "won" : "lost";
}

/**
 * @param {OutcomeKind} kind
 * @param {object} [options]
 * @param {any} [options.reward]
 * @param {string} [options.text] - Instead of the usual words.
 */
export function outcomeBadge(kind, { reward = null, text } = {}) {
  const { mark, words, meaning } = KINDS[kind];
  const label = text ?? (kind === "won" || kind === "lost" ? `${words}, ${formatReward(reward)}` : words);
  return el("span.badge.outcome", { title: meaning, data: { outcome: kind } }, mark && icon(mark), label);
}

/** @type {Record<OutcomeKind, {mark: any, words: string, meaning: string}>} */
const KINDS = {
  won: { mark: "tick", words: "done", meaning: "The episode ended, and its last reward is above zero" },
  lost: { mark: "cross", words: "done", meaning: "The episode ended, and its last reward is not above zero" },
  truncated: { mark: "cut", words: "truncated", meaning: "A limit ended the episode, not the task itself" },
  done: { mark: "stop", words: "done", meaning: "The episode ended; its last step has no reward" },
  failed: { mark: "alert", words: "failed", meaning: "A step raised an error" },
  running: { mark: "play", words: "running", meaning: "The episode is still running" },
  open: { mark: null, words: "not ended", meaning: "The episode was not finished" },
};
