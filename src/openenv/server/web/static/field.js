/**
 * A field of a form: what all kinds have in common.
 *
 * It has a value that can be read and set, may have children, and shows what the server says of it.
 */

import { el, uniqueId } from "./element.js";
import { labelOf, limitsOf } from "./schema.js";

/** Text in a field that cannot be sent. */
export class FieldProblem extends Error {}

/**
 * @typedef {object} Spec
 * @property {any} schema
 * @property {any} root
 * @property {string} name
 * @property {string} [label]
 * @property {boolean} isRequired
 * @property {number} depth
 * @property {string} [hint] - The kind of input that the server proposes.
 */

/** Base of all fields. */
export class Field {
  /**
   * @param {Spec} spec
   * @param {import("./schema.js").Shape} shape
   */
  constructor(spec, shape) {
    this.spec = spec;
    this.shape = shape;
    this.id = uniqueId("field");
    this.label = spec.label ?? labelOf(spec.name, spec.schema ?? {});
    this.hasDefault = shape.schema.default !== undefined;
    this.isEmptyAllowed = shape.isNullable || (!spec.isRequired && !this.hasDefault);
    this.error = el("p.field-error", { id: `${this.id}-error`, hidden: true });
    /** @type {HTMLElement} */
    this.node = el("div.field", { data: { field: spec.name } });
  }

  /** Be shown as another element. @param {HTMLElement} node */
  become(node) {
    this.node = node;
  }

  /** Whether there is something to see. */
  get isVisible() {
    return true;
  }

  /** What is sent for an input that was left empty: null, or nothing. */
  get emptyValue() {
    return this.shape.isNullable ? null : undefined;
  }

  /** Read the value; undefined to leave it out. @returns {any} */
  read() {
    return undefined;
  }

  /** Mark what is left blank and would certainly be refused; throws `FieldProblem` then. */
  check() {
    for (const child of this.children()) child.check();
  }

  /** @param {any} value - undefined for what it is at the beginning. */
  write(value) {
    void value;
  }

  /** Find the field of a part, by name or number. @param {string | number} key @returns {Field | null} */
  child(key) {
    void key;
    return null;
  }

  /** The fields of all parts. @returns {Field[]} */
  children() {
    return [];
  }

  /** The element that is marked as invalid. @returns {HTMLElement | null} */
  get control() {
    return this.node.querySelector(`#${this.id}`);
  }

  /** @param {string} message */
  showError(message) {
    this.error.textContent = this.error.hidden ? message : `${this.error.textContent} ${message}`;
    this.error.hidden = false;
    this.node.classList.add("is-invalid");
    this.control?.setAttribute("aria-invalid", "true");
    for (let part = this.node.parentElement; part; part = part.parentElement) {
      if (part instanceof HTMLDetailsElement) part.open = true;
    }
  }

  clearError() {
    this.error.hidden = true;
    this.error.textContent = "";
    this.node.classList.remove("is-invalid");
    this.control?.removeAttribute("aria-invalid");
    for (const child of this.children()) child.clearError();
  }

  /** Clear the error when the value changes, and notify the form. */
  changed() {
    this.clearError();
    this.node.dispatchEvent(new Event("input", { bubbles: true }));
  }

  /** The label, with a mark where a value is required. @param {string} [target] */
  labelNode(target = this.id) {
    return el("label.field-label", { for: target }, this.label, this.requiredMark());
  }

  /** The mark of a required field. */
  requiredMark() {
    const isRequired = this.spec.isRequired || this.shape.schema["x-openenv-required"] === true;
    return isRequired && el("span.required", { title: "required", "aria-hidden": "true" }, "*");
  }

  /** Description and limits, for people who want to know more. */
  helpNode() {
    const { description } = this.shape.schema;
    const parts = [description, limitsOf(this.shape.schema)].filter((part) => typeof part === "string" && part !== "");
    return parts.length ? el("p.field-help", { id: `${this.id}-help` }, parts.join(" · ")) : null;
  }

  /** Which elements describe the input. */
  get describedBy() {
    return `${this.id}-help ${this.id}-error`;
  }
}
