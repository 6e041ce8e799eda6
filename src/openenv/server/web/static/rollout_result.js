/**
 * The result of a rollout, as the tool that ran it returns it: reward, checks with their outputs, files, the agent's log.
 *
 * Needs no store. A rollout that the server keeps has a page with its transcript, too.
 */

import { addRolloutStyles, rewardBadge, statusBadge, trustBadge } from "./badges.js";
import { el } from "./element.js";
import { isRecord } from "./schema.js";
import { codeBlock, folded, outputOf, visible } from "./texts.js";
import { formatSeconds } from "./values.js";
import { checkNode } from "./verdicts.js";

/** Return the result of a rollout that a value is, or that its text holds as JSON; else null. @param {any} value */
export function rolloutResultOf(value) {
  const result = typeof value === "string" ? parsed(value) : value;
  const isOne = isRecord(result) && typeof result.status === "string" && "reward" in result;
  return isOne && Array.isArray(result.verify_results) ? result : null;
}

/** @param {any} result */
export function rolloutResultNode(result) {
  addRolloutStyles();
  const checks = result.verify_results;
  const passed = checks.filter((/** @type {any} */ check) => check.exit_code === 0).length;
  const facts = [
    `${passed} of ${checks.length} checks passed`,
    Array.isArray(result.proxy_turns) && `${result.proxy_turns.length} model calls`,
    typeof result.wall_s === "number" && formatSeconds(result.wall_s),
    result.model,
    result.sandbox && `sandbox ${result.sandbox}`,
  ];
  const files = Object.entries(isRecord(result.files) ? result.files : {});
  const log = String(result.agent_log_tail ?? "");
  return el(
    "div.rollouts.stack.is-tight.rollout-result",
    {},
    el(
      "p.badges",
      {},
      el("span.reward-label", {}, "Reward"),
      rewardBadge(result.reward ?? null),
      trustBadge(result.trust ?? null),
      statusBadge(result.status, result.error ?? null),
    ),
    result.error && el("p.problem", {}, visible(String(result.error))),
    el("p.hint", {}, facts.filter(Boolean).join(" · ")),
    checks.length > 0 && el("ol.checks", {}, checks.map(withDefaults).map(checkNode)),
    files.map(([path, text]) =>
      folded(["File ", el("code", {}, visible(path))], () => codeBlock(String(text), { label: path })),
    ),
    log !== "" && folded(["Log of the agent"], () => codeBlock(outputOf(log), { label: "Log of the agent" })),
    folded(["JSON"], () => codeBlock(JSON.stringify(result, null, 2), { label: "Result as JSON" })),
  );
}

/** @param {any} check */
function withDefaults(check) {
  return { stdout: "", stderr: "", score: null, note: null, trust: null, run: null, name: "", cases: [], duration_s: 0, ...check };
}

/** @param {string} text */
function parsed(text) {
  if (!text.startsWith("{")) return null;
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
