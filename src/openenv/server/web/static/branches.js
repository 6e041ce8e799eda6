/**
 * How the calls of a rollout hang together: a line for each conversation, retries and sub-agents beside it.
 */

import { el, svg } from "./element.js";

const STEP = 34;
const LANE = 26;
const RADIUS = 9;
const LEFT = 16;

/**
 * @param {any[]} turns
 * @param {(number: number) => void} goTo
 */
export function branchGraph(turns, goTo) {
  const lanes = laneOf(turns);
  const width = turns.length * STEP + LEFT;
  const height = (Math.max(0, ...lanes.values()) + 1) * LANE + 8;
  const at = new Map(
    turns.map((turn, index) => [turn.number, { x: LEFT + index * STEP, y: 14 + (lanes.get(turn.number) ?? 0) * LANE }]),
  );
  const drawing = svg("svg", {
    class: "branches",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    "aria-hidden": "true",
  });
  for (const turn of turns) {
    const from = at.get(turn.parent);
    const to = at.get(turn.number);
    if (from && to) {
      const bend = `M${from.x},${from.y} C${from.x + STEP / 2},${from.y} ${from.x + STEP / 2},${to.y} ${Math.min(to.x, from.x + STEP)},${to.y} L${to.x},${to.y}`;
      drawing.append(svg("path", { class: "branch-line", d: bend }));
    }
  }
  for (const turn of turns) {
    const place = /** @type {{x: number, y: number}} */ (at.get(turn.number));
    const node = svg("g", { class: "branch-node", "data-branch": turn.branch });
    node.append(
      svg("title", {}, `Turn ${turn.number}: ${turn.branch}`),
      svg("circle", { cx: place.x, cy: place.y, r: RADIUS }),
      svg("text", { x: place.x, y: place.y + 3.5, "text-anchor": "middle" }, turn.number),
    );
    node.addEventListener("click", () => goTo(turn.number));
    drawing.append(node);
  }
  const kinds = [...new Set(turns.map((turn) => turn.branch))];
  const words = turns
    .filter((turn) => turn.branch !== "main")
    .map((turn) => `turn ${turn.number} is ${turn.branch}${turn.parent === null ? "" : ` after ${turn.parent}`}`);
  return el(
    "figure.chart",
    {},
    el(
      "figcaption.toolbar",
      {},
      el("span.hint", {}, "Conversations"),
      kinds.map((kind) => el("span.key", { data: { branch: kind } }, kind)),
    ),
    el(
      "div.scroll",
      {
        tabindex: 0,
        role: "group",
        "aria-label": `Tree of turns: ${words.slice(0, 30).join("; ") || "one conversation"}`,
      },
      drawing,
    ),
  );
}

/** Give each conversation a line of its own. @param {any[]} turns @returns {Map<number, number>} */
function laneOf(turns) {
  /** @type {Map<number, number>} */
  const lanes = new Map();
  /** @type {Set<number>} - Turns whose line goes on with another one. */
  const continued = new Set();
  let free = 0;
  for (const turn of turns) {
    const lane = turn.parent === null ? undefined : lanes.get(turn.parent);
    // An answer that was thrown away leaves the line to the one that was asked for again.
    if (lane !== undefined && !continued.has(turn.parent) && turn.branch !== "retry") {
      lanes.set(turn.number, lane);
      continued.add(turn.parent);
    } else if (turn.branch === "compaction" && turn.parent === null) {
      lanes.set(turn.number, 0);
    } else {
      lanes.set(turn.number, turns[0] === turn ? 0 : (free += 1));
    }
  }
  return lanes;
}
