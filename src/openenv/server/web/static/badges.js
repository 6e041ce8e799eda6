/**
 * Words about a rollout that are seen at a glance: its reward, its status, how far the reward can be trusted; and the
 * styles of everything about rollouts.
 */

import { address } from "./api.js";
import { el } from "./element.js";
import { formatNumber } from "./values.js";

const TRUSTS = new Map([
  [
    "judged",
    "The agent's code ran in one sandbox and was judged in another, so it cannot influence the result.",
  ],
  ["isolated", "The checks run no code of the agent."],
  ["shared", "The agent's code may run next to the checks, so cheating code could change the result."],
]);

/** How good a reward is, for its colour. @param {number | null | undefined} reward */
export function gradeOf(reward) {
  if (reward === null || reward === undefined) return "none";
  if (reward >= 1) return "pass";
  return reward > 0 ? "part" : "fail";
}

/** @param {number | null} reward */
export function rewardBadge(reward) {
  const grade = gradeOf(reward);
  return el(
    "span.reward",
    { data: { grade } },
    grade === "none" ? "none" : formatNumber(Number(Number(reward).toPrecision(3))),
  );
}

/** @param {string} status @param {string | null} [reason] */
export function statusBadge(status, reason) {
  const kind = status === "ok" ? ".is-positive" : ["truncated", "cancelled"].includes(status) ? "" : ".is-negative";
  return el(`span.badge${kind}`, { title: reason ?? null }, status);
}

/** @param {string | null} trust */
export function trustBadge(trust) {
  if (!trust) return el("span.badge", {}, "not verified");
  return el("span.badge", { title: trustMeaning(trust), data: { trust } }, trust);
}

/** What a level of trust means. @param {string} trust */
export function trustMeaning(trust) {
  return TRUSTS.get(trust) ?? "";
}

/** Load the styles of rollouts, unless the page has done so. */
export function addRolloutStyles() {
  const { href } = address("./static/rollouts.css");
  const links = /** @type {HTMLLinkElement[]} */ ([...document.querySelectorAll('link[rel="stylesheet"]')]);
  if (!links.some((link) => link.href === href)) document.head.append(el("link", { rel: "stylesheet", href }));
}
