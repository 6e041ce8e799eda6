/**
 * Fields with a choice of what they are: unions, and groups that may be left out.
 */

import { el, fill } from "./element.js";
import { Field } from "./field.js";
import { makeField, makeShaped } from "./kinds.js";
import { fits, isRecord, resolve } from "./schema.js";

/** @typedef {import("./field.js").Spec} Spec */
/** @typedef {import("./schema.js").Shape} Shape */

/** One of several kinds of values: a list to choose the kind, and the field of that kind. */
export class UnionField extends Field {
  /** @param {Spec} spec @param {Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    this.variants = shape.variants ?? [];
    const options = this.variants.map((variant, index) =>
      el("option", { value: index }, variantName(variant, spec.root)),
    );
    this.list = el(
      "select",
      {
        id: this.id,
        "aria-describedby": this.describedBy,
        on: { change: () => this.#choose(this.list.selectedIndex, true) },
      },
      options,
    );
    this.body = el("div.variant");
    fill(this.node, this.labelNode(), this.list, this.body, this.helpNode(), this.error);
    this.node.classList.add("group");
    /** @type {Field | null} */
    this.inner = null;
    this.write(undefined);
  }

  read() {
    return this.inner?.read();
  }

  /** @param {any} value */
  write(value) {
    const shown = value === undefined ? this.shape.schema.default : value;
    const found = shown === undefined ? 0 : this.variants.findIndex((variant) => fits(shown, variant, this.spec.root));
    this.#choose(Math.max(found, 0), false);
    if (shown !== undefined && shown !== null) this.inner?.write(shown);
  }

  /** @param {string | number} key */
  child(key) {
    return this.inner?.child(key) ?? null;
  }

  children() {
    return this.inner ? [this.inner] : [];
  }

  /** @param {number} index @param {boolean} isByHand */
  #choose(index, isByHand) {
    this.list.selectedIndex = index;
    const { root, depth, name } = this.spec;
    const label = variantName(this.variants[index], root);
    this.inner = makeField({ schema: this.variants[index], root, name, label, isRequired: true, depth: depth + 1 });
    fill(this.body, this.inner.isVisible && this.inner.node);
    if (isByHand) this.changed();
  }
}

/** A group that may be left out: a switch, and the group while it is on. */
export class OptionalField extends Field {
  /** @param {Spec} spec @param {Shape} shape */
  constructor(spec, shape) {
    super(spec, shape);
    this.input = el("input", { id: this.id, type: "checkbox", on: { change: () => this.#toggle(true) } });
    this.body = el("div.optional");
    fill(this.node, el("div.check", {}, this.input, this.labelNode()), this.helpNode(), this.body, this.error);
    /** @type {Field | null} */
    this.inner = null;
    this.write(undefined);
  }

  read() {
    return this.inner ? this.inner.read() : this.emptyValue;
  }

  /** @param {any} value */
  write(value) {
    const shown = value === undefined ? this.shape.schema.default : value;
    this.input.checked = shown !== undefined && shown !== null;
    this.#toggle(false);
    if (this.inner) this.inner.write(shown);
  }

  /** @param {string | number} key */
  child(key) {
    return this.inner?.child(key) ?? null;
  }

  children() {
    return this.inner ? [this.inner] : [];
  }

  /** @param {boolean} isByHand */
  #toggle(isByHand) {
    const schema = { ...this.shape.schema, description: undefined, default: undefined };
    this.inner = this.input.checked
      ? makeShaped({ ...this.spec, isRequired: true }, { ...this.shape, schema, isNullable: false })
      : null;
    fill(this.body, this.inner?.node);
    if (isByHand) this.changed();
  }
}

/** @param {any} variant @param {any} root */
function variantName(variant, root) {
  const schema = resolve(variant, root);
  const fixed = Object.values(schema.properties ?? {}).find((part) => isRecord(part) && typeof part.const === "string");
  const named = schema.title ?? fixed?.const;
  if (typeof named === "string") return named;
  if (schema.type === "array") return `list of ${resolve(schema.items ?? {}, root).type ?? "anything"}`;
  return (
    { string: "text", integer: "whole number", number: "number", boolean: "yes or no", object: "object" }[
      String(schema.type)
    ] ?? "anything"
  );
}
