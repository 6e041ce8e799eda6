/**
 * A JSON value as a tree that opens on demand. Parts are made when they are opened, so that a large value costs little.
 */

import { el, fill } from "./element.js";
import { isRecord } from "./schema.js";

const MOST_CHILDREN = 100;
const MOST_TEXT = 2000;
const OPEN_LEVELS = 2;
const OPEN_PARTS = 60;
const OPEN_CHILDREN = 20;

/** Trees that remember, from one value to the next, which parts are open. */
export class Tree {
  constructor() {
    /** @type {Map<string, boolean>} */
    this.open = new Map();
    this.levels = OPEN_LEVELS;
    this.node = el("div.tree");
  }

  /** @param {any} value */
  show(value) {
    this.levels = sizeOf(value, OPEN_PARTS) < OPEN_PARTS ? Infinity : OPEN_LEVELS;
    fill(this.node, this.#part(null, value, "$", 0));
  }

  /** @param {string | null} name @param {any} value @param {string} path @param {number} level */
  #part(name, value, path, level) {
    const isList = Array.isArray(value);
    const label = name === null ? null : el("span.tree-key", {}, name);
    if (!isList && !isRecord(value)) return el("div.tree-leaf", {}, label, leaf(value));
    const entries = isList ? value.map((part, index) => [String(index), part]) : Object.entries(value);
    const count = isList ? `list of ${entries.length}` : `${entries.length} ${entries.length === 1 ? "key" : "keys"}`;
    if (entries.length === 0) return el("div.tree-leaf", {}, label, el("span.tree-null", {}, isList ? "[ ]" : "{ }"));
    const body = el("div.tree-children");
    const isOpen = this.open.get(path) ?? (level < this.levels && entries.length <= OPEN_CHILDREN);
    const node = el("details.tree-branch", {}, el("summary", {}, label, el("span.tree-count", {}, count)), body);
    const make = () => {
      if (!body.hasChildNodes()) this.#children(body, entries, path, level, 0);
    };
    node.open = isOpen;
    if (isOpen) make();
    node.addEventListener("toggle", () => {
      this.open.set(path, node.open);
      if (node.open) make();
    });
    return node;
  }

  /**
   * @param {HTMLElement} body
   * @param {any[][]} entries
   * @param {string} path
   * @param {number} level
   * @param {number} from
   */
  #children(body, entries, path, level, from) {
    const part = entries.slice(from, from + MOST_CHILDREN);
    body.append(...part.map(([key, value]) => this.#part(key, value, `${path}/${key}`, level + 1)));
    const left = entries.length - from - part.length;
    if (left <= 0) return;
    const more = el("button.link", { type: "button" }, `${left} more`);
    more.addEventListener("click", () => {
      more.remove();
      this.#children(body, entries, path, level, from + part.length);
    });
    body.append(more);
  }
}

/** @param {any} value */
function leaf(value) {
  if (value === null || value === undefined) return el("span.tree-null", {}, "null");
  if (typeof value !== "string") return el(`span.tree-${typeof value}`, {}, String(value));
  const text = value.length > MOST_TEXT ? `${value.slice(0, MOST_TEXT)}… (${value.length} characters)` : value;
  return el("span.tree-string", {}, text);
}

/** Count the parts of a value, as far as a limit. @param {any} value @param {number} limit @returns {number} */
function sizeOf(value, limit) {
  if (value === null || typeof value !== "object") return 1;
  let size = 1;
  for (const part of Object.values(value)) {
    size += sizeOf(part, limit - size);
    if (size >= limit) return limit;
  }
  return size;
}
