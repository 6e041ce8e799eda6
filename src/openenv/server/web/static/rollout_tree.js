/**
 * The tree of a rollout and its branches: a line for each, from the turn at which it leaves its parent to its last one.
 */

import { gradeOf, rewardBadge, statusBadge } from "./badges.js";
import { el, svg } from "./element.js";
import { rolloutAddress } from "./rollout_address.js";
import { formatCount } from "./texts.js";
import { formatNumber } from "./values.js";

const LANE = 26;
const LEFT = 14;
const MOST_STEP = 40;
const WIDTH = 720;
const MOST_LANES = 60;

/** @typedef {{rollout_id: string, parent: string, parent_call: number | null, turns: number, reward: number | null, status: string, reason: string | null}} TreeNode */

/**
 * @param {TreeNode[]} nodes - The root first.
 * @param {string} current - The rollout whose page this is.
 * @param {number} leftOut - How many branches are not in the list.
 */
export function rolloutTree(nodes, current, leftOut) {
  const ordered = inDepth(nodes);
  return el(
    "div.stack.is-tight",
    {},
    el("p.hint", {}, "Each branch shares its parent's turns up to the one at which it leaves."),
    el("div.scroll", { tabindex: 0, role: "group", "aria-label": "Drawing of the branches" }, drawing(ordered, current)),
    ordered.length > MOST_LANES && el("p.hint", {}, `The drawing has the first ${MOST_LANES}.`),
    list(nodes, nodes[0], current),
    leftOut > 0 && el("p.hint", {}, `${formatCount(leftOut)} more branches are not listed.`),
  );
}

/** How many branches leave a rollout after each of its turns. @param {TreeNode[]} nodes @param {string} id */
export function branchCounts(nodes, id) {
  /** @type {Record<number, number>} */
  const counts = {};
  for (const { parent, parent_call: call } of nodes) {
    if (parent === id && call !== null) counts[call] = (counts[call] ?? 0) + 1;
  }
  return counts;
}

/** @param {TreeNode[]} nodes @returns {TreeNode[]} */
function inDepth(nodes) {
  /** @type {TreeNode[]} */
  const ordered = [];
  const waiting = nodes.slice(0, 1);
  while (waiting.length) {
    const node = /** @type {TreeNode} */ (waiting.pop());
    ordered.push(node);
    waiting.push(...childrenOf(nodes, node).reverse());
  }
  return ordered;
}

/** @param {TreeNode[]} nodes @param {TreeNode} node */
function childrenOf(nodes, node) {
  const children = nodes.filter(({ parent }) => parent === node.rollout_id);
  return children.sort((one, other) => Number(one.parent_call) - Number(other.parent_call));
}

/** @param {TreeNode[]} ordered @param {string} current */
function drawing(ordered, current) {
  const shown = ordered.slice(0, MOST_LANES);
  // A branch that failed before its first own turn is drawn as one turn.
  const endOf = (/** @type {TreeNode} */ node) => Math.max(node.turns, (node.parent_call ?? 0) + 1);
  const most = Math.max(...shown.map(endOf));
  const step = Math.min(MOST_STEP, WIDTH / most);
  const x = (/** @type {number} */ call) => LEFT + call * step;
  const y = (/** @type {number} */ lane) => 14 + lane * LANE;
  const lanes = new Map(shown.map(({ rollout_id: id }, lane) => [id, lane]));
  const width = x(most) + 120;
  const height = shown.length * LANE + 8;
  const picture = svg("svg", {
    class: "rollout-tree",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    "aria-hidden": "true",
  });
  for (const [lane, node] of shown.entries()) {
    const from = node.parent_call ?? 0;
    const above = lanes.get(node.parent);
    const start = above === undefined ? x(from) : x(from + 0.6);
    const bend = `M${x(from)},${y(above ?? lane)}C${start},${y(above ?? lane)} ${x(from)},${y(lane)} ${start},${y(lane)}`;
    const path = `${above === undefined ? `M${start},${y(lane)}` : bend}L${x(endOf(node))},${y(lane)}`;
    const group = svg("g", { class: node.rollout_id === current ? "tree-line is-here" : "tree-line", "data-grade": gradeOf(node.reward) });
    group.append(
      svg("title", {}, `${node.rollout_id}: ${node.turns} turns, reward ${formatNumber(node.reward)}`),
      svg("path", { class: "branch-line", d: path }),
      svg("circle", { cx: x(endOf(node)), cy: y(lane), r: 5 }),
      svg("text", { class: "plot-text", x: x(endOf(node)) + 12, y: y(lane) + 4 }, node.rollout_id.slice(0, 8)),
    );
    group.addEventListener("click", () => (location.hash = rolloutAddress(node.rollout_id)));
    picture.append(group);
  }
  return picture;
}

/** @param {TreeNode[]} nodes @param {TreeNode} node @param {string} current @returns {HTMLElement} */
function list(nodes, node, current) {
  const children = childrenOf(nodes, node);
  const isHere = node.rollout_id === current;
  const link = el("a.mono", { href: rolloutAddress(node.rollout_id) }, node.rollout_id.slice(0, 8));
  if (isHere) link.setAttribute("aria-current", "page");
  const item = el(
    "li",
    {},
    el(
      "div.badges",
      {},
      link,
      rewardBadge(node.reward),
      statusBadge(node.status, node.reason),
      el("span.hint", {}, node.parent ? `from turn ${node.parent_call}, ${node.turns} turns` : `${node.turns} turns`),
      isHere && el("span.hint", {}, "this one"),
    ),
    children.length > 0 && el("ul.branch-list", {}, children.map((child) => list(nodes, child, current).firstElementChild)),
  );
  return el("ul.branch-list", {}, item);
}
