/**
 * Fields made of fields: objects, lists and maps.
 */

import { el, fill, focusOn, icon } from "./element.js";
import { Field, FieldProblem } from "./field.js";
import { makeField } from "./kinds.js";
import { isRecord, labelOf } from "./schema.js";

/** @typedef {import("./field.js").Spec} Spec */
/** @typedef {import("./schema.js").Shape} Shape */

/** Named fields. At the top of a form they stand alone, deeper they have a frame; free-form metadata is folded away. */
export class ObjectField extends Field {
  /** @param {Spec} spec @param {Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    const required = new Set(shape.schema.required ?? []);
    const hints = /** @type {any} */ (spec).hints ?? {};
    /** @type {Map<string, Field>} */
    this.fields = new Map();
    for (const [name, schema] of Object.entries(shape.schema.properties ?? {})) {
      const { root, depth } = spec;
      const part = { schema, root, name, isRequired: required.has(name), depth: depth + 1, hint: hints[name] };
      this.fields.set(name, makeField(part));
    }
    const seen = [...this.fields.values()].filter((field) => field.isVisible);
    const first = seen.filter((field) => field.spec.schema?.["x-openenv-first"] === true);
    const isLater = (/** @type {Field} */ field) => isAside(field) || (first.length > 0 && !first.includes(field));
    const aside = spec.depth === 0 ? seen.filter(isLater) : [];
    const main = seen.filter((field) => !aside.includes(field)).map((field) => field.node);
    const more =
      aside.length > 0 &&
      el(
        "details.more",
        {},
        el("summary", {}, aside.some((field) => field.spec.name !== "metadata") ? "More options" : "Metadata"),
        aside.map((field) => field.node),
      );
    if (spec.depth === 0) fill(this.node, this.error, main, more);
    else this.node = frame(this, main);
    if (this.hasDefault) this.write(undefined);
  }

  read() {
    /** @type {Record<string, any>} */
    const whole = {};
    for (const [name, field] of this.fields) {
      const value = field.read();
      if (value !== undefined) whole[name] = value;
    }
    return whole;
  }

  /** @param {any} value */
  write(value) {
    const shown = value === undefined ? this.shape.schema.default : value;
    for (const [name, field] of this.fields) field.write(isRecord(shown) ? shown[name] : undefined);
  }

  /** @param {string | number} key */
  child(key) {
    return this.fields.get(String(key)) ?? null;
  }

  children() {
    return [...this.fields.values()];
  }
}

/** A list: any number of items, or a fixed one. */
export class ListField extends Field {
  /** @param {Spec} spec @param {Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    /** @type {{field: Field, node: HTMLElement}[]} */
    this.rows = [];
    const { minItems, maxItems } = shape.schema;
    this.isFixed = shape.kind === "tuple" || (minItems !== undefined && minItems === maxItems);
    this.body = el("div.rows");
    const add = el("button.small", { type: "button", on: { click: () => this.#grow() } }, icon("plus"), "Add");
    this.node = frame(this, [this.body, !this.isFixed && add]);
    this.write(undefined);
  }

  read() {
    const values = this.rows.map((row) => row.field.read() ?? null);
    // A line that was added and left blank means nothing; JSON can still say "".
    const kept = this.isFixed ? values : values.filter((value) => typeof value !== "string" || value.trim() !== "");
    const isUntouched = kept.length === 0 && !this.spec.isRequired && !this.hasDefault && !this.isFixed;
    return isUntouched ? undefined : kept;
  }

  /** @param {any} value */
  write(value) {
    const shown = value === undefined ? this.shape.schema.default : value;
    const least = this.shape.prefix?.length ?? this.shape.schema.minItems ?? 0;
    const values = Array.isArray(shown) ? shown : [];
    this.rows = [];
    fill(this.body);
    for (let index = 0; index < Math.max(values.length, least); index += 1) this.#append(values[index]);
  }

  /** @param {string | number} key */
  child(key) {
    return this.rows[Number(key)]?.field ?? null;
  }

  children() {
    return this.rows.map((row) => row.field);
  }

  #grow() {
    this.#append(undefined);
    this.changed();
    focusOn(this.rows[this.rows.length - 1].node, "input, textarea, select");
  }

  /** @param {any} value */
  #append(value) {
    const index = this.rows.length;
    const schema = this.shape.prefix?.[index] ?? this.shape.items ?? {};
    const label = labelOf(`${this.label} ${index + 1}`, {});
    const { root, depth } = this.spec;
    const field = makeField({ schema, root, name: String(index), label, isRequired: true, depth: depth + 1 });
    if (value !== undefined) field.write(value);
    const remove = () => {
      this.rows.splice(this.rows.indexOf(row), 1);
      row.node.remove();
      this.changed();
    };
    const row = { field, node: el("div.row", {}, field.node, !this.isFixed && removeButton(label, remove)) };
    this.rows.push(row);
    this.body.append(row.node);
  }
}

/** Keys and values that are not known beforehand. */
export class MapField extends Field {
  /** @param {Spec} spec @param {Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    /** @type {{key: HTMLInputElement, field: Field, node: HTMLElement}[]} */
    this.rows = [];
    this.body = el("div.rows");
    const add = el("button.small", { type: "button", on: { click: () => this.#grow() } }, icon("plus"), "Add");
    this.node = frame(this, [this.body, add]);
    this.write(undefined);
  }

  read() {
    if (this.rows.length === 0 && !this.spec.isRequired && !this.hasDefault) return undefined;
    /** @type {Record<string, any>} */
    const whole = {};
    for (const { key, field } of this.rows) {
      if (key.value in whole) {
        this.showError(`The name "${key.value}" is used twice.`);
        throw new FieldProblem("a name is used twice");
      }
      whole[key.value] = field.read() ?? null;
    }
    return whole;
  }

  /** @param {any} value */
  write(value) {
    const shown = value === undefined ? this.shape.schema.default : value;
    this.rows = [];
    fill(this.body);
    if (isRecord(shown)) for (const [key, part] of Object.entries(shown)) this.#append(key, part);
  }

  /** @param {string | number} key */
  child(key) {
    return this.rows.find((row) => row.key.value === String(key))?.field ?? null;
  }

  children() {
    return this.rows.map((row) => row.field);
  }

  #grow() {
    this.#append("", undefined);
    this.changed();
    this.rows.at(-1)?.key.focus();
  }

  /** @param {string} name @param {any} value */
  #append(name, value) {
    const { root, depth } = this.spec;
    const field = makeField({
      schema: this.shape.items ?? {},
      root,
      name: "value",
      label: "Value",
      isRequired: true,
      depth: depth + 1,
    });
    if (value !== undefined) field.write(value);
    const key = /** @type {any} */ (
      el("input", { type: "text", "aria-label": `${this.label}: name`, placeholder: "name", spellcheck: false })
    );
    key.value = name;
    const remove = () => {
      this.rows.splice(this.rows.indexOf(row), 1);
      row.node.remove();
      this.changed();
    };
    const row = {
      key,
      field,
      node: el("div.row.pair", {}, key, field.node, removeButton(`${this.label} entry`, remove)),
    };
    this.rows.push(row);
    this.body.append(row.node);
  }
}

/** Whether a field belongs out of the way: metadata that travels with each action. @param {Field} field */
function isAside(field) {
  return field.spec.name === "metadata" && !field.spec.isRequired;
}

/** @param {Field} field @param {(HTMLElement | false)[]} content */
function frame(field, content) {
  const legend = el("legend.field-label", {}, field.label, field.requiredMark());
  const attributes = { id: field.id, data: { field: field.spec.name }, "aria-describedby": field.describedBy };
  return el("fieldset.field.group", attributes, legend, field.helpNode(), content, field.error);
}

/** @param {string} label @param {() => void} remove */
function removeButton(label, remove) {
  return el(
    "button.small.quiet",
    { type: "button", title: "Remove", "aria-label": `Remove ${label}`, on: { click: remove } },
    icon("cross"),
  );
}
