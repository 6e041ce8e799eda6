/**
 * A form made from a JSON schema, with a switch to plain JSON for experts.
 *
 * Knows fields and where errors belong; must not know what is done with the value.
 */

import { el, fill, uniqueId } from "./element.js";
import { FieldProblem } from "./field.js";
import { makeField } from "./kinds.js";

const PREFIXES = new Set(["body", "action", "arguments"]);

/** Fields for a schema, or its JSON. */
export class Form {
  /**
   * @param {any} schema
   * @param {object} [options]
   * @param {string} [options.label] - What the form is for, for those who do not see it.
   * @param {Record<string, string>} [options.hints] - Kinds of inputs that the server proposes, by field.
   * @param {() => void} [options.onChange]
   * @param {() => void} [options.onSubmit] - Called when Enter is pressed in an input of one line.
   */
  constructor(schema, { label = "Form", hints = {}, onChange = () => {}, onSubmit = () => {} } = {}) {
    this.schema = schema;
    this.isJson = false;
    this.onChange = onChange;
    const spec = { schema, root: schema, name: "", label, isRequired: true, depth: 0, hints };
    this.field = makeField(spec);
    this.textId = uniqueId("json");
    this.text = el("textarea.code", { id: this.textId, rows: 8, spellcheck: false, autocomplete: "off" });
    this.problem = el("p.field-error", { role: "alert", hidden: true });
    this.isEmpty = this.field.children().every((field) => !field.isVisible);
    this.body = el("div.form-body");
    this.node = el(
      "div.form",
      { on: { input: () => this.#changed(), keydown: (/** @type {KeyboardEvent} */ event) => enter(event, onSubmit) } },
      this.problem,
      this.body,
    );
    this.toggle = el(
      "button.link",
      { type: "button", "aria-pressed": "false", on: { click: () => this.#switch() } },
      "JSON",
    );
    this.#draw();
  }

  /**
   * Read the value.
   * @returns {{value: any} | null} Null if there is something that cannot be sent; the form shows it.
   */
  read() {
    this.clearErrors();
    try {
      if (!this.isJson) this.field.check();
      return { value: this.isJson ? JSON.parse(this.text.value || "{}") : this.field.read() };
    } catch (error) {
      if (error instanceof SyntaxError) this.#say(`This is not JSON: ${error.message}`);
      else if (!(error instanceof FieldProblem)) throw error;
      this.#focusFirst();
      return null;
    }
  }

  /** Read the value without marking errors. @returns {any} */
  peek() {
    try {
      return this.isJson ? JSON.parse(this.text.value || "{}") : this.field.read();
    } catch {
      return undefined;
    }
  }

  /** @param {any} value */
  write(value) {
    this.clearErrors();
    this.field.write(value);
    this.text.value = JSON.stringify(value, null, 2);
    this.onChange();
  }

  /**
   * Show what the server found wrong, each at its field.
   * @param {{loc: (string | number)[], msg: string}[]} problems
   */
  showErrors(problems) {
    this.clearErrors();
    for (const { loc, msg } of problems) {
      const found = this.isJson ? null : locate(this.field, loc);
      if (found && found !== this.field) found.showError(msg);
      else this.#say(loc.length ? `${path(loc)}: ${msg}` : msg);
    }
    this.#focusFirst();
  }

  clearErrors() {
    this.problem.hidden = true;
    this.problem.textContent = "";
    this.field.clearError();
  }

  /** @param {string} message */
  #say(message) {
    this.problem.textContent = this.problem.hidden ? message : `${this.problem.textContent}\n${message}`;
    this.problem.hidden = false;
  }

  #focusFirst() {
    const invalid = this.body.querySelector(".is-invalid");
    const target = invalid?.querySelector("input, textarea, select");
    if (target instanceof HTMLElement) target.focus();
  }

  #changed() {
    if (!this.problem.hidden) this.problem.hidden = true;
    this.onChange();
  }

  #switch() {
    if (this.isJson) {
      const read = this.read();
      if (!read) return;
      this.field.write(read.value);
    } else {
      const value = this.peek();
      this.text.value = JSON.stringify(value === undefined ? {} : value, null, 2);
    }
    this.isJson = !this.isJson;
    this.toggle.setAttribute("aria-pressed", String(this.isJson));
    this.clearErrors();
    this.#draw();
    this.onChange();
  }

  #draw() {
    if (this.isJson) fill(this.body, el("label.field-label", { for: this.textId }, "Value as JSON"), this.text);
    else if (this.isEmpty) fill(this.body, el("p.hint", {}, "Nothing to fill in."), this.field.node);
    else fill(this.body, this.field.node);
  }
}

/** @param {KeyboardEvent} event @param {() => void} submit */
function enter(event, submit) {
  const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey && !event.shiftKey && !event.isComposing;
  const { target } = event;
  if (event.key !== "Enter" || !isPlain || !(target instanceof HTMLElement)) return;
  // In a text of several lines Enter begins a new one, unless that text is all there is to fill in.
  const isOnly = target.closest(".form")?.querySelectorAll("input, textarea, select").length === 1;
  const isSent = target instanceof HTMLInputElement || (target.matches("textarea:not(.code)") && isOnly);
  if (!isSent) return;
  event.preventDefault();
  submit();
}

/**
 * Find the field that an error is about. A path may begin with the place in the request; parts of it that name a
 * variant or a check are no fields and are passed over.
 * @param {import("./field.js").Field} field
 * @param {(string | number)[]} loc
 */
function locate(field, loc) {
  const paths = [loc];
  while (PREFIXES.has(String(paths[0][0]))) paths.unshift(paths[0].slice(1));
  const ways = paths.map((parts) => follow(field, parts));
  return ways.reduce((best, way) => (way.missed < best.missed ? way : best)).found;
}

/** @param {import("./field.js").Field} field @param {(string | number)[]} parts */
function follow(field, parts) {
  let found = field;
  let missed = 0;
  for (const part of parts) {
    const next = found.child(part);
    if (next) found = next;
    else missed += 1;
  }
  return { found, missed: found === field ? Infinity : missed };
}

/** @param {(string | number)[]} loc */
function path(loc) {
  return loc.filter((part, index) => index > 1 || !PREFIXES.has(String(part))).join(".");
}
