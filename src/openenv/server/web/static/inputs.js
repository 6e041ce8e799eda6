/**
 * Fields with one input: text, numbers, yes or no, choices, and JSON.
 */

import { el, fill } from "./element.js";
import { Field, FieldProblem } from "./field.js";
import { isLongText, isSecret } from "./schema.js";

const MOST_SEGMENTS = 8;
const LONGEST_SEGMENTS = 44;

/** A value that never changes; there is nothing to see. */
export class ConstField extends Field {
  get isVisible() {
    return false;
  }

  read() {
    return this.shape.value;
  }
}

/** Text: one line, or several where it is likely to be long. */
export class TextField extends Field {
  /** @param {import("./field.js").Spec} spec @param {import("./schema.js").Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    const isLong = spec.hint === "textarea" || isLongText(spec.name, shape.schema);
    const placeholder = this.isEmptyAllowed ? "none" : "";
    this.input = el(isLong ? "textarea" : "input", {
      id: this.id,
      placeholder,
      "aria-describedby": this.describedBy,
      autocomplete: isSecret(spec.name) ? "new-password" : "off",
      spellcheck: false,
      ...(isLong ? { rows: 3 } : { type: isSecret(spec.name) ? "password" : "text" }),
      on: { input: () => this.clearError() },
    });
    const examples = isLong || !Array.isArray(shape.schema.examples) ? [] : shape.schema.examples;
    const list = examples.length > 0 && el("datalist", { id: `${this.id}-examples` }, examples.map((value) => el("option", { value })));
    if (list) this.input.setAttribute("list", list.id);
    fill(this.node, this.labelNode(), this.input, list, this.helpNode(), this.error);
    this.write(undefined);
  }

  read() {
    return this.input.value === "" && this.isEmptyAllowed ? this.emptyValue : this.input.value;
  }

  check() {
    const { schema } = this.shape;
    const isNeeded = schema["x-openenv-required"] === true || (this.spec.isRequired && schema.minLength > 0);
    if (!isNeeded || this.input.value.trim() !== "") return;
    this.showError("Enter a value.");
    throw new FieldProblem("a text is missing");
  }

  /** @param {any} value */
  write(value) {
    const shown = value === undefined ? this.shape.schema.default : value;
    this.input.value =
      typeof shown === "string" ? shown : shown === null || shown === undefined ? "" : JSON.stringify(shown);
  }
}

/** A number. */
export class NumberField extends Field {
  /** @param {import("./field.js").Spec} spec @param {import("./schema.js").Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    const { schema } = shape;
    const isInteger = schema.type === "integer";
    this.input = el("input", {
      id: this.id,
      type: "number",
      step: schema.multipleOf ?? (isInteger ? 1 : "any"),
      min: schema.minimum ?? schema.exclusiveMinimum,
      max: schema.maximum ?? schema.exclusiveMaximum,
      placeholder: this.isEmptyAllowed ? "none" : "",
      "aria-describedby": this.describedBy,
      autocomplete: "off",
      on: { input: () => this.clearError() },
    });
    fill(this.node, this.labelNode(), this.input, this.helpNode(), this.error);
    this.write(undefined);
  }

  read() {
    if (this.input.validity.badInput) throw this.#problem("This is not a number.");
    const text = this.input.value;
    if (text === "") return this.emptyValue;
    const number = Number(text);
    if (this.shape.schema.type === "integer" && Number.isInteger(number) && !Number.isSafeInteger(number)) {
      throw this.#problem("This number is too large for a browser to send exactly.");
    }
    return number;
  }

  /** @param {any} value */
  write(value) {
    const shown = value === undefined ? this.shape.schema.default : value;
    this.input.value = typeof shown === "number" ? String(shown) : "";
  }

  /** @param {string} message */
  #problem(message) {
    this.showError(message);
    return new FieldProblem(message);
  }
}

/** Yes or no; where neither is a value too, a choice of three. */
export class BooleanField extends Field {
  /** @param {import("./field.js").Spec} spec @param {import("./schema.js").Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    this.choice = this.isEmptyAllowed ? new ChoiceField(spec, { ...shape, options: [true, false] }) : null;
    this.input = el("input", {
      id: this.id,
      type: "checkbox",
      "aria-describedby": this.describedBy,
      on: { input: () => this.clearError() },
    });
    if (this.choice) {
      this.node = this.choice.node;
    } else {
      fill(this.node, el("div.check", {}, this.input, this.labelNode()), this.helpNode(), this.error);
    }
    this.write(undefined);
  }

  read() {
    return this.choice ? this.choice.read() : this.input.checked;
  }

  /** @param {any} value */
  write(value) {
    if (this.choice) this.choice.write(value);
    else this.input.checked = Boolean(value === undefined ? this.shape.schema.default : value);
  }

  /** @param {string} message */
  showError(message) {
    (this.choice ? () => this.choice?.showError(message) : () => super.showError(message))();
  }

  clearError() {
    if (this.choice) this.choice.clearError();
    else super.clearError();
  }
}

/** One of several values: a row of buttons where they are few and short, else a list. */
export class ChoiceField extends Field {
  /** @param {import("./field.js").Spec} spec @param {import("./schema.js").Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    this.options = [...(this.isEmptyAllowed ? [this.emptyValue] : []), ...(shape.options ?? [])];
    this.names = this.options.map((value) => (value === null || value === undefined ? "none" : display(value)));
    const isRow = this.options.length <= MOST_SEGMENTS && this.names.join("").length <= LONGEST_SEGMENTS;
    this.radios = isRow ? this.names.map((name, index) => this.#radio(name, index)) : null;
    this.list = this.#list();
    this.#assemble();
    this.write(undefined);
  }

  read() {
    const index = this.radios
      ? this.radios.findIndex((radio) => radio.input.checked)
      : this.list.selectedIndex - this.offset;
    return index < 0 ? this.emptyValue : this.options[index];
  }

  /** @param {any} value */
  write(value) {
    const shown = value === undefined ? this.shape.schema.default : value;
    let index = this.options.findIndex((option) => option === shown);
    if (index < 0 && this.isEmptyAllowed) index = 0;
    if (this.radios) this.radios.forEach((radio, place) => (radio.input.checked = place === index));
    else this.list.selectedIndex = index + this.offset;
  }

  get offset() {
    return this.isEmptyAllowed || this.hasDefault ? 0 : 1;
  }

  /** @param {string} name @param {number} index */
  #radio(name, index) {
    const id = `${this.id}-${index}`;
    const input = el("input", { id, type: "radio", name: this.id, on: { input: () => this.clearError() } });
    return { input, node: el("span.segment", {}, input, el("label", { for: id }, name)) };
  }

  #list() {
    const first = this.offset ? [el("option", { value: "", disabled: true, hidden: true }, "Choose…")] : [];
    const options = this.names.map((name, index) => el("option", { value: index }, name));
    const attributes = { id: this.id, "aria-describedby": this.describedBy, on: { input: () => this.clearError() } };
    return el("select", attributes, first, options);
  }

  #assemble() {
    if (!this.radios) {
      fill(this.node, this.labelNode(), this.list, this.helpNode(), this.error);
      return;
    }
    const row = el(
      "div.segments",
      {},
      this.radios.map((radio) => radio.node),
    );
    const legend = el("legend.field-label", {}, this.label, this.requiredMark());
    const whole = el(
      "fieldset.field.plain",
      { data: { field: this.spec.name }, "aria-describedby": this.describedBy, id: this.id },
      legend,
      row,
      this.helpNode(),
      this.error,
    );
    this.become(whole);
  }
}

/** Anything: JSON, and what is not JSON is text. */
export class AnyField extends Field {
  /** @param {import("./field.js").Spec} spec @param {import("./schema.js").Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    this.input = el("textarea.code", {
      id: this.id,
      rows: 1,
      placeholder: "JSON or text",
      spellcheck: false,
      autocomplete: "off",
      "aria-describedby": this.describedBy,
      on: { input: () => this.clearError() },
    });
    fill(this.node, this.labelNode(), this.input, this.helpNode(), this.error);
    this.write(undefined);
  }

  read() {
    const text = this.input.value.trim();
    if (text === "") return this.spec.isRequired && !this.hasDefault ? null : this.emptyValue;
    try {
      return JSON.parse(text);
    } catch {
      return this.input.value;
    }
  }

  /** @param {any} value */
  write(value) {
    const shown = value === undefined ? this.shape.schema.default : value;
    this.input.value = shown === undefined || shown === null ? "" : isPlainText(shown) ? shown : JSON.stringify(shown);
  }
}

/** @param {any} value */
function display(value) {
  return typeof value === "string" ? (value === "" ? "(empty)" : value) : JSON.stringify(value);
}

/** Whether text can be shown as it is without being read as JSON. @param {any} value */
function isPlainText(value) {
  if (typeof value !== "string") return false;
  try {
    JSON.parse(value);
    return false;
  } catch {
    return true;
  }
}
