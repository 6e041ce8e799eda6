/**
 * An observation: the environment's own picture, and each field in the view that suits it.
 *
 * Knows in which order fields are shown; which view each gets is `view`'s.
 */

import { copyButton } from "./copy.js";
import { el, fill } from "./element.js";
import { Frame } from "./frame.js";
import { imageOf } from "./image.js";
import { isRecord, labelOf } from "./schema.js";
import { Tree } from "./tree.js";
import { isScalar, scalarText, viewOf } from "./view.js";

const MOST_JSON = 200_000;
const SPEAKING = ["message", "text", "prompt", "question", "response", "reply", "answer", "content", "result", "output"];

/** @typedef {{name: string, rank: number, node: HTMLElement}} Part */

/** The views of one observation; what was folded open stays open for the next. */
export class ObservationView {
  constructor() {
    this.frame = new Frame();
    this.views = el("div.views");
    /** @type {Map<string, Tree>} */
    this.trees = new Map();
    /** @type {Map<string, boolean>} */
    this.open = new Map();
    this.isJson = false;
    /** @type {any} */
    this.shown = undefined;
    /** @type {string | null} */
    this.html = null;
    this.toggle = el(
      "button.link",
      { type: "button", "aria-pressed": "false", on: { click: () => this.#switch() } },
      "JSON",
    );
    this.node = el("div.observation", {}, this.frame.node, this.views);
  }

  /**
   * @param {any} observation
   * @param {string | null} html - The environment's own picture of it.
   */
  show(observation, html) {
    const isSame = observation === this.shown && (html === null) === (this.html === null);
    this.frame.show(this.isJson ? null : html);
    this.html = html;
    if (isSame) return;
    this.shown = observation;
    this.#draw();
  }

  #switch() {
    this.isJson = !this.isJson;
    this.toggle.setAttribute("aria-pressed", String(this.isJson));
    this.frame.show(this.isJson ? null : this.html);
    this.#draw();
  }

  #draw() {
    if (this.isJson) return fill(this.views, jsonNode(this.shown));
    const parts = this.#parts(this.shown);
    if (typeof this.html !== "string") {
      return fill(this.views, parts.length ? parts : el("p.hint", {}, "This observation has no fields besides reward and done."));
    }
    fill(this.views, parts.length > 0 && this.#fold("Fields", parts));
  }

  /** @param {any} observation @returns {HTMLElement[]} */
  #parts(observation) {
    if (!isRecord(observation)) return [this.#part("observation", observation).node];
    const { metadata, ...fields } = observation;
    const names = Object.keys(fields).filter((name) => !isUnsaid(name, fields[name]));
    const pictures = isRecord(metadata) ? picturesOf(metadata) : [];
    const shown = [...pictures.map((picture) => picture.node), ...this.#inOrder(names, fields)];
    const scores = isRecord(metadata) ? metadata.rubric_scores : undefined;
    if (isRecord(scores)) shown.push(section("Scores", table(Object.entries(scores))));
    const drawn = [...pictures.map((picture) => picture.name), ...(isRecord(scores) ? ["rubric_scores"] : [])];
    const rest = isRecord(metadata) ? without(metadata, drawn) : metadata;
    if (!isSomething(rest)) return shown;
    if (shown.length === 0) return [this.#part("metadata", rest).node]; // it is all that there is to see
    return [...shown, this.#fold("Metadata", [this.#tree("metadata", rest)])];
  }

  /**
   * Show fields in the order in which the environment declares them; short ones that follow each other share a table.
   * @param {string[]} names
   * @param {Record<string, any>} fields
   */
  #inOrder(names, fields) {
    const main = mainText(names, fields);
    const shown = [];
    /** @type {[string, any][]} */
    let short = [];
    for (const name of names) {
      if (isScalar(fields[name]) && name !== main) {
        short.push([name, fields[name]]);
        continue;
      }
      if (short.length) shown.push(table(short));
      short = [];
      const { node } = this.#part(name, fields[name]);
      node.classList.toggle("is-main", name === main);
      shown.push(node);
    }
    return short.length ? [...shown, table(short)] : shown;
  }

  /** @param {string} name @param {any} value @returns {Part} */
  #part(name, value) {
    const label = labelOf(name, {});
    const { rank, node } = viewOf(value, label, (part) => this.#tree(name, part));
    return { name, rank, node: section(label, node) };
  }

  /** @param {string} name @param {any} value */
  #tree(name, value) {
    const tree = this.trees.get(name) ?? new Tree();
    this.trees.set(name, tree);
    tree.show(value);
    return tree.node;
  }

  /** @param {string} title @param {HTMLElement[]} content */
  #fold(title, content) {
    const fold = el("details.fold", {}, el("summary", {}, title), content);
    fold.open = this.open.get(title) ?? false;
    fold.addEventListener("toggle", () => this.open.set(title, fold.open));
    return fold;
  }
}

/** A value as JSON text, with a button that copies all of it. @param {any} value */
function jsonNode(value) {
  const text = JSON.stringify(value, null, 2) ?? "null";
  const shown = text.length > MOST_JSON ? `${text.slice(0, MOST_JSON)}\n… ${text.length - MOST_JSON} more characters` : text;
  return el(
    "div.json-view",
    {},
    copyButton(() => text),
    el("pre.source", { tabindex: 0, role: "region", "aria-label": "Observation as JSON" }, el("code", {}, shown)),
  );
}

/** @param {string} label @param {HTMLElement} body */
function section(label, body) {
  return el("section.part", {}, el("h3.part-title", {}, label), body);
}

/** @param {[string, any][]} rows */
function table(rows) {
  return el(
    "dl.facts",
    {},
    rows.map(([name, value]) => el("div", {}, el("dt", {}, labelOf(name, {})), el("dd", {}, scalarText(value)))),
  );
}

/**
 * Find the text that an observation is about, if there is one: the field that is called so, or the only text.
 * @param {string[]} names
 * @param {Record<string, any>} fields
 */
function mainText(names, fields) {
  const isText = (/** @type {string} */ name) => typeof fields[name] === "string" && fields[name].trim() !== "";
  const texts = names.filter((name) => isText(name) && imageOf(fields[name], name) === null);
  return SPEAKING.find((name) => texts.includes(name)) ?? (texts.length === 1 ? texts[0] : null);
}

/** @param {Record<string, any>} metadata */
function picturesOf(metadata) {
  return Object.entries(metadata).flatMap(([name, value]) => {
    const node = typeof value === "string" || Array.isArray(value) ? imageOf(value, labelOf(name, {})) : null;
    return node ? [{ name, node }] : [];
  });
}

/** @param {Record<string, any>} record @param {string[]} names */
function without(record, names) {
  return Object.fromEntries(Object.entries(record).filter(([name]) => !names.includes(name)));
}

/** Reward and end are shown at the top of the page. @param {string} name @param {any} value */
function isUnsaid(name, value) {
  return name === "reward" || name === "done" || (["terminated", "truncated"].includes(name) && value !== true);
}

/** @param {any} value */
function isSomething(value) {
  return value !== undefined && value !== null && (typeof value !== "object" || Object.keys(value).length > 0);
}
