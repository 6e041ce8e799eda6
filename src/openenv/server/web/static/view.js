/**
 * Which view a value gets: picture, board, text, numbers, list, or tree. Knows values, not where they are from.
 */

import { boardOf } from "./board.js";
import { el } from "./element.js";
import { imageOf, sourceOf } from "./image.js";
import { isRecord } from "./schema.js";
import { rolloutResultNode, rolloutResultOf } from "./rollout_result.js";
import { Tree } from "./tree.js";
import { formatNumber, textBlock } from "./values.js";

const LONG_TEXT = 90;
const MOST_NUMBERS = 256;
const MOST_LINES = 40;

/** In the order in which parts of an observation are shown. */
export const RANK = { picture: 0, board: 1, text: 2, list: 3, tree: 4 };

/** @typedef {{rank: number, node: HTMLElement}} View */

/**
 * Return the view of a value.
 * @param {any} value
 * @param {string} label
 * @param {(value: any) => HTMLElement} [tree] - Makes a tree, for those that remember what is open.
 * @returns {View}
 */
export function viewOf(value, label, tree = treeOf) {
  const picture = imageOf(value, label);
  if (picture) return { rank: RANK.picture, node: picture };
  const board = boardOf(value, label);
  if (board) return { rank: RANK.board, node: board };
  const rollout = rolloutResultOf(value);
  if (rollout) return { rank: RANK.text, node: rolloutResultNode(rollout) };
  if (typeof value === "string") return { rank: RANK.text, node: textBlock(value) };
  if (isToolResult(value)) return { rank: RANK.text, node: toolResult(value, tree) };
  if (isMessages(value)) return { rank: RANK.text, node: messages(value) };
  if (isNumbers(value)) return { rank: RANK.list, node: numbers(value) };
  if (Array.isArray(value) && value.length > 0 && value.length <= MOST_LINES && value.every(isShortText)) {
    return {
      rank: RANK.list,
      node: el(
        "ul.list",
        {},
        value.map((part) => el("li", {}, part)),
      ),
    };
  }
  if (value === null || typeof value !== "object") return { rank: RANK.list, node: el("p", {}, scalarText(value)) };
  return { rank: RANK.tree, node: tree(value) };
}

/**
 * Return the view of what a tool returned.
 * @param {any} result
 */
export function resultNode(result) {
  return viewOf(result, "Result").node;
}

/** Whether a value fits in a word or two. @param {any} value */
export function isScalar(value) {
  if (typeof value === "string") return isShortText(value) && sourceOf(value) === null;
  return value === null || typeof value !== "object";
}

/** @param {any} value */
export function scalarText(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? formatNumber(value) : String(value);
}

/** @param {any} value */
export function treeOf(value) {
  const tree = new Tree();
  tree.show(value);
  return tree.node;
}

/** A tool's result in MCP's shape: content for people, perhaps the same as data. @param {any} value */
function isToolResult(value) {
  const content = Array.isArray(value) ? value : isRecord(value) ? value.content : null;
  return (
    Array.isArray(content) &&
    content.length > 0 &&
    content.every((part) => isRecord(part) && typeof part.type === "string" && ("text" in part || "data" in part))
  );
}

/** @param {any} value @param {(value: any) => HTMLElement} tree */
function toolResult(value, tree) {
  const content = Array.isArray(value) ? value : value.content;
  const structured = isRecord(value) ? (value.structuredContent ?? value.structured_content) : null;
  const isFailed = isRecord(value) && (value.isError ?? value.is_error);
  const texts = content.filter((/** @type {any} */ part) => part.type === "text");
  const others = content.filter((/** @type {any} */ part) => part.type !== "text");
  const data = isRecord(structured) && Object.keys(structured).join() === "result" ? structured.result : structured;
  const said = isRecord(structured)
    ? [viewOf(data, "Result", tree).node]
    : texts.map((/** @type {any} */ part) => viewOf(String(part.text), "Result", tree).node);
  const shown = others.map((/** @type {any} */ part) => imageOf(part, "Image") ?? tree(part));
  return el(isFailed ? "div.stack.is-tight.notice.is-error" : "div.stack.is-tight", {}, shown, said);
}

/** @param {number[]} values */
function numbers(values) {
  return el(
    "ol.numbers",
    {},
    values.map((value) => el("li", {}, value === null ? "–" : formatNumber(value))),
  );
}

/** @param {{role: string, content: any}[]} list */
function messages(list) {
  const lines = list.map(({ role, content }) =>
    el("li", {}, el("span.role", {}, role), textBlock(typeof content === "string" ? content : JSON.stringify(content))),
  );
  return el("ol.messages", {}, lines);
}

/** @param {any} value */
function isShortText(value) {
  return typeof value === "string" && value.length <= LONG_TEXT && !value.includes("\n");
}

/** @param {any} value */
function isNumbers(value) {
  return (
    Array.isArray(value) &&
    value.length > 0 &&
    value.length <= MOST_NUMBERS &&
    value.every((part) => typeof part === "number" || part === null)
  );
}

/** @param {any} value */
function isMessages(value) {
  return (
    Array.isArray(value) &&
    value.length > 0 &&
    value.every((part) => isRecord(part) && typeof part.role === "string" && "content" in part)
  );
}
