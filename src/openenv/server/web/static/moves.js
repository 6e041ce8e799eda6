/**
 * Buttons that step at once: the ones that the environment offers, or, where an action is one choice, its values.
 */

import { el, fill } from "./element.js";
import { shapeOf } from "./schema.js";

const MOST_MOVES = 24;
const ARROWS = { "↑": "ArrowUp", "↓": "ArrowDown", "←": "ArrowLeft", "→": "ArrowRight" };

/** @typedef {import("./episode.js").Offered} Offered */

/**
 * Return the actions of a schema whose only field is a choice.
 * @param {any} schema
 * @returns {Offered[]}
 */
export function derivedMoves(schema) {
  const whole = shapeOf(schema, schema);
  if (whole.kind !== "object") return [];
  const fields = Object.entries(whole.schema.properties ?? {}).filter(([name]) => name !== "metadata");
  const shapes = fields.map(([name, part]) => ({ name, shape: shapeOf(part, schema) }));
  const open = shapes.filter(({ shape }) => shape.kind !== "const");
  if (open.length !== 1 || open[0].shape.kind !== "choice") return [];
  const { name, shape } = open[0];
  const fixed = Object.fromEntries(
    shapes.filter((part) => part !== open[0]).map((part) => [part.name, part.shape.value]),
  );
  const options = shape.options ?? [];
  if (options.length > MOST_MOVES) return [];
  return options.map((value) => ({ label: String(value), action: { ...fixed, [name]: value } }));
}

/** A row of buttons, with keys: digits, and arrows where the labels have them. */
export class Moves {
  /** @param {(action: any) => void} act */
  constructor(act) {
    this.act = act;
    /** @type {Offered[]} */
    this.offered = [];
    this.shown = "";
    this.isFree = false;
    this.node = el("div.moves", { role: "group", "aria-label": "Actions", hidden: true });
  }

  /** @param {Offered[]} offered @param {boolean} isFree */
  show(offered, isFree) {
    const text = JSON.stringify(offered);
    if (text !== this.shown) {
      this.shown = text;
      this.offered = offered.slice(0, MOST_MOVES);
      this.#draw();
    }
    this.isFree = isFree;
    for (const button of this.node.children) button.setAttribute("aria-disabled", String(!isFree));
  }

  /** Press the button that has a digit as its key. @param {string} digit */
  press(digit) {
    const move = this.offered.find((move, index) => this.#digitOf(move, index) === digit);
    if (move) this.#act(move.action);
    return Boolean(move);
  }

  /** The digit that presses a button: its label, if all labels are digits, else its place. */
  #digitOf(/** @type {Offered} */ { label }, /** @type {number} */ index) {
    if (this.offered.every(({ label }) => /^[0-9]$/.test(label))) return label;
    return index < 9 ? String(index + 1) : null;
  }

  /** Give the focus to the button of an action. @param {any} action */
  focusOn(action) {
    const index = this.offered.findIndex((move) =>
      Object.entries(move.action).every(([name, value]) => JSON.stringify(value) === JSON.stringify(action?.[name])),
    );
    const button = this.node.children[index];
    if (button instanceof HTMLElement) button.focus();
  }

  /** @param {any} action */
  #act(action) {
    if (this.isFree) this.act(action);
  }

  #draw() {
    const focused = [...this.node.children].findIndex((button) => button === document.activeElement);
    this.node.hidden = this.offered.length === 0;
    fill(
      this.node,
      this.offered.map(({ label, action }, index) => {
        const hint = arrowOf(label) ? [...label][0] : this.#digitOf({ label, action }, index);
        const key = hint !== null && el("kbd", { "aria-hidden": "true" }, hint);
        return el(
          "button.move",
          { type: "button", on: { click: () => this.#act(action) } },
          el("span", {}, label),
          key,
        );
      }),
    );
    const button = this.node.children[focused];
    if (button instanceof HTMLElement) button.focus();
  }

  /** Press the button whose label begins with an arrow. @param {string} key - Such as `ArrowUp`. */
  arrow(key) {
    const found = this.offered.find(({ label }) => arrowOf(label) === key);
    if (found) this.#act(found.action);
    return Boolean(found);
  }
}

/** The key of the arrow that a label begins with. @param {string} label */
function arrowOf(label) {
  return ARROWS[/** @type {keyof typeof ARROWS} */ ([...label][0])];
}
