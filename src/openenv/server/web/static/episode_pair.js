/**
 * Two recorded episodes side by side: what they share, where they first differ, and both replays in step.
 */

import { el } from "./element.js";
import { pageAddress } from "./places.js";
import { Replay, framesOf, rewardPlot, summaryBadges, summaryFacts } from "./replay.js";
import { shortJson } from "./values.js";

/** @typedef {import("./replay.js").ReplayFrame} ReplayFrame */

/**
 * @param {{summary: any, rows: any[]}[]} both
 * @param {string} tab - Of episodes, for links.
 * @returns {{nodes: HTMLElement[], replays: Replay[]}}
 */
export function episodePair(both, tab) {
  const { lines, at: first } = compareEpisodes(framesOf(both[0].rows), framesOf(both[1].rows));
  /** @type {Replay[]} */
  const replays = both.map(
    ({ rows }, index) =>
      new Replay(rows, {
        isCompact: true,
        step: first ?? 0,
        onMove: (at) => replays[1 - index]?.go(at, { isFirst: true }),
      }),
  );
  const goTo = () => replays.forEach((replay) => replay.go(first ?? 0, { isFirst: true }));
  const compared = el(
    "section.card.compared",
    {},
    el("h2", {}, "Two episodes"),
    el(
      "ul.plain",
      {},
      lines.map((line) => el("li", {}, line)),
    ),
    first !== null && el("button", { type: "button", on: { click: goTo } }, "Go to the first difference"),
  );
  const sides = both.map(({ summary }, index) => sideNode(summary, replays[index], tab));
  return { nodes: [compared, el("div.side-by-side", {}, sides)], replays };
}

/** @param {any} summary @param {Replay} replay @param {string} tab */
function sideNode(summary, replay, tab) {
  const title = el("h2", {}, el("a", { href: pageAddress(tab, [summary.id]) }, summary.id));
  return el(
    "section.stack.is-tight",
    { "aria-label": `Episode ${summary.id}` },
    el(
      "section.card",
      {},
      el("div.card-head", {}, title, el("div.marks", {}, summaryBadges(summary))),
      summaryFacts(summary),
    ),
    replay.node,
    el("section.card", {}, el("h3", {}, "Rewards"), rewardPlot(replay.frames)),
  );
}

/**
 * Compare two episodes: their seeds and reset arguments, their actions, their results, and the first frame that differs.
 * @param {ReplayFrame[]} one
 * @param {ReplayFrame[]} other
 * @returns {{lines: string[], at: number | null}} - `at` is the index of the first frame that differs.
 */
export function compareEpisodes(one, other) {
  const [starts, others] = [one, other].map((frames) => argumentsOf(frames[0]));
  const action = differenceOf(one, other, inputOf);
  const result = differenceOf(one, other, outcomeOf);
  const first = [action, result].filter((at) => at !== null).sort((a, b) => Number(a) - Number(b))[0] ?? null;
  const lengths = one.length === other.length ? "" : ` (${stepCount(one)} and ${stepCount(other)} steps)`;
  return {
    lines: [
      seedLine(starts, others),
      ...argumentLines(starts, others),
      action === null ? `Actions: the same${lengths}.` : `Actions: they differ from ${nameOf(one, other, action)} on${lengths}.`,
      result === null ? "Results: the same." : `Results: they differ from ${nameOf(one, other, result)} on.`,
    ],
    at: first,
  };
}

/** @param {any} one @param {any} other - Arguments of the two resets. */
function seedLine({ seed: one = null }, { seed: other = null }) {
  if (one === null && other === null) return "Seeds: none was recorded, so the episodes may begin differently.";
  const text = (/** @type {any} */ seed) => (seed === null ? "none" : JSON.stringify(seed));
  if (JSON.stringify(one) === JSON.stringify(other)) return `Seeds: both ${text(one)}.`;
  return `Seeds: ${text(one)} and ${text(other)}.`;
}

/** @param {Record<string, any>} one @param {Record<string, any>} other */
function argumentLines(one, other) {
  const names = [...new Set([...Object.keys(one), ...Object.keys(other)])].filter((name) => name !== "seed");
  return names
    .filter((name) => JSON.stringify(one[name]) !== JSON.stringify(other[name]))
    .map((name) => `Reset: ${name} ${shortJson(one[name] ?? "not given", 40)} and ${shortJson(other[name] ?? "not given", 40)}.`);
}

/** @param {ReplayFrame | undefined} frame @returns {Record<string, any>} */
function argumentsOf(frame) {
  return frame?.kind === "reset" ? (frame.row.arguments ?? {}) : {};
}

/** What was done in a frame. Arguments of resets have lines of their own. @param {ReplayFrame} frame */
function inputOf({ kind, row }) {
  if (kind === "reset") return kind;
  return JSON.stringify(kind === "call" ? [kind, row.name, row.arguments] : [kind, withoutEmptyMetadata(row.action)]);
}

/** What came of a frame. @param {ReplayFrame} frame */
function outcomeOf({ row }) {
  return JSON.stringify([row.observation, row.reward, row.done, row.result, row.error?.type]);
}

/** The two ways to send an action without metadata are the same. @param {any} action */
function withoutEmptyMetadata(action) {
  if (action === null || typeof action !== "object" || Object.keys(action.metadata ?? {}).length > 0) return action;
  const { metadata, ...rest } = action;
  return Object.fromEntries(Object.entries(rest).sort(([one], [other]) => (one < other ? -1 : 1)));
}

/** @param {ReplayFrame[]} one @param {ReplayFrame[]} other @param {(frame: ReplayFrame) => string} read */
function differenceOf(one, other, read) {
  const shared = Math.min(one.length, other.length);
  const at = one.slice(0, shared).findIndex((frame, index) => read(frame) !== read(other[index]));
  return at < 0 ? null : at;
}

/** @param {ReplayFrame[]} one @param {ReplayFrame[]} other @param {number} at */
function nameOf(one, other, at) {
  const frame = one[at] ?? other[at];
  if (frame.kind === "reset") return "the reset";
  return frame.kind === "call" ? `the call of ${frame.row.name}` : `step ${frame.n}`;
}

/** @param {ReplayFrame[]} frames */
function stepCount(frames) {
  return frames.filter(({ kind }) => kind === "step").length;
}
