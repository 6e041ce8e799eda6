/**
 * Verdicts: each check with its output and why it counts as it does; the first verdict, and every later one.
 */

import { rewardBadge, statusBadge, trustBadge, trustMeaning } from "./badges.js";
import { el, icon } from "./element.js";
import { clamped, codeBlock, firstLine, folded, formatMoment, outputOf, visible } from "./texts.js";
import { formatNumber, formatSeconds } from "./values.js";

const MOST_CASES = 50;

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
      el("code.check-command", {}, visible(firstLine(result.name || result.cmd, 200))),
      el("span.hint", {}, `exit code ${result.exit_code}${isPassed || result.score !== null ? "" : " (expected 0)"}, ${formatSeconds(result.duration_s)}`),
      result.score !== null && el("span.badge", {}, `score ${formatNumber(result.score)}`),
      result.trust && trustBadge(result.trust),
    ),
    result.note && el("p.note", {}, visible(result.note)),
    casesNode(result.cases ?? []),
    (result.cmd.includes("\n") || Boolean(result.name)) && folded(["Whole command"], () => codeBlock(result.cmd, { label: "Command" })),
    result.run && runNode(result.run),
    outputNode(result, isPassed),
  );
}

/** The failed cases of a check with their expected and actual outputs. @param {any[]} cases */
function casesNode(cases) {
  const failed = cases.filter((each) => each.problem);
  if (failed.length === 0) return null;
  const cell = (/** @type {string | null} */ text) =>
    el("td", {}, text === null ? el("span.hint", {}, "any") : text === "" ? el("span.hint", {}, "empty") : clamped(text));
  const rows = failed
    .slice(0, MOST_CASES)
    .map((each) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, `Case ${each.number}`, el("span.hint", {}, ` ${each.problem}`)),
        cell(each.stdin),
        cell(each.expected),
        cell(each.problem.startsWith("unexpected") ? each.actual : null),
      ),
    );
  const titles = [`${failed.length} of ${cases.length} cases failed`, "Input", "Expected output", "Actual output"];
  const head = el("thead", {}, el("tr", {}, titles.map((title) => el("th", { scope: "col" }, title))));
  const table = el("table.log.cases", {}, head, el("tbody", {}, rows));
  return el("div.scroll", { tabindex: 0, role: "group", "aria-label": "Failed cases" }, table);
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
      el("p.role", {}, name),
      codeBlock(outputOf(result[name]), { cut: result[`${name}_cut`], label: name }),
    ),
  );
  return folded(["Output"], () => el("div", {}, blocks), { isOpen: !isFolded });
}
