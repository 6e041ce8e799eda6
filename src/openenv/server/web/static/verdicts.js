/**
 * Verdicts: each check with its output and why it counts as it does; the first verdict, and every later one.
 */

import { rewardBadge, statusBadge, trustBadge, trustMeaning } from "./badges.js";
import { el, icon } from "./element.js";
import { codeBlock, firstLine, folded, formatMoment, outputOf, visible } from "./texts.js";
import { formatNumber, formatSeconds } from "./values.js";

/** All verdicts of a rollout. @param {any[]} verdicts - The first one first. @param {string} chosen - Which is reported. */
export function verdictsNode(verdicts, chosen) {
  return el(
    "div.stack.is-tight",
    {},
    verdicts.map((verdict) => verdictNode(verdict, verdict.verdict === chosen)),
  );
}

/** @param {any} verdict @param {boolean} isChosen */
function verdictNode(verdict, isChosen) {
  const name = verdict.verdict === "first" ? "First verdict" : `Verdict ${verdict.verdict}`;
  const passed = verdict.results.filter((/** @type {any} */ result) => result.exit_code === 0).length;
  const title = [
    el("strong", {}, name),
    rewardBadge(verdict.reward),
    trustBadge(verdict.trust),
    statusBadge(verdict.status, verdict.reason),
    el("span.hint", {}, `${passed} of ${verdict.results.length} checks passed, ${formatMoment(verdict.stored_at)}`),
  ];
  const body = () =>
    el(
      "div.stack.is-tight",
      {},
      verdict.trust && el("p.hint", {}, trustMeaning(verdict.trust)),
      verdict.reason && el("p.problem", {}, visible(verdict.reason)),
      verdict.results.length === 0 && el("p.hint", {}, "Nothing was verified."),
      el(
        "ol.checks",
        {},
        verdict.results.map((/** @type {any} */ result) => checkNode(result)),
      ),
    );
  return folded(title, body, { isOpen: isChosen, kind: ".card.verdict" });
}

/** @param {any} result */
export function checkNode(result) {
  const isPassed = result.exit_code === 0;
  return el(
    "li.one-check",
    { data: { passed: isPassed } },
    el(
      "div.check-head",
      {},
      el(
        "span.check-mark",
        {},
        icon(isPassed ? "tick" : "cross"),
        el("span.unseen", {}, isPassed ? "passed" : "failed"),
      ),
      el("code.check-command", {}, visible(firstLine(result.cmd, 200))),
      el("span.hint", {}, `exit code ${result.exit_code}, ${formatSeconds(result.duration_s)}`),
      result.score !== null && el("span.badge", {}, `score ${formatNumber(result.score)}`),
      result.trust && trustBadge(result.trust),
    ),
    result.note && el("p.note", {}, visible(result.note)),
    result.cmd.includes("\n") && folded(["Whole command"], () => codeBlock(result.cmd, { label: "Command" })),
    result.run && runNode(result.run),
    outputNode(result, isPassed),
  );
}

/** @param {any} run */
function runNode(run) {
  return folded(
    [
      "Run: ",
      el("code", {}, visible(firstLine(run.cmd, 120))),
      ` exit code ${run.exit_code}, ${formatSeconds(run.duration_s)}`,
    ],
    () => outputNode(run, false) ?? el("p.hint", {}, "No output."),
  );
}

/** @param {any} result @param {boolean} isFolded */
function outputNode(result, isFolded) {
  const streams = ["stdout", "stderr"].filter((name) => result[name] !== "");
  if (streams.length === 0) return null;
  const blocks = streams.map((name) =>
    el(
      "div",
      {},
      el("h5.role", {}, name),
      codeBlock(outputOf(result[name]), { cut: result[`${name}_cut`], label: name }),
    ),
  );
  return folded(["Output"], () => el("div", {}, blocks), { isOpen: !isFolded });
}
