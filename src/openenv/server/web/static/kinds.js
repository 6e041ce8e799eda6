/**
 * Kinds of fields: which one a schema gets. Knows all of them.
 */

import { ListField, MapField, ObjectField } from "./groups.js";
import { AnyField, BooleanField, ChoiceField, ConstField, NumberField, TextField } from "./inputs.js";
import { shapeOf } from "./schema.js";
import { OptionalField, UnionField } from "./variants.js";

/** @typedef {import("./field.js").Spec} Spec */
/** @typedef {import("./field.js").Field} Field */
/** @typedef {import("./schema.js").Shape} Shape */

const DEEPEST = 7;
const GROUPS = ["object", "map", "array", "tuple", "union"];
const SWITCHED_OFF = ["object", "tuple", "union"];

/**
 * Make the field of a schema.
 * @param {Spec} spec
 * @returns {Field}
 */
export function makeField(spec) {
  const shape = shapeOf(spec.schema, spec.root);
  const isGroup = GROUPS.includes(shape.kind);
  if (isGroup && spec.depth > DEEPEST) return new AnyField(spec, { ...shape, kind: "any" });
  const isLeftOut = !spec.isRequired && shape.schema.default === undefined && SWITCHED_OFF.includes(shape.kind);
  if (isGroup && spec.depth > 0 && (shape.isNullable || isLeftOut)) return new OptionalField(spec, shape);
  return makeShaped(spec, shape);
}

/**
 * Make the field of a shape, without a switch around it.
 * @param {Spec} spec
 * @param {Shape} shape
 * @returns {Field}
 */
export function makeShaped(spec, shape) {
  switch (shape.kind) {
    case "const":
      return new ConstField(spec, shape);
    case "choice":
      return new ChoiceField(spec, shape);
    case "boolean":
      return new BooleanField(spec, shape);
    case "number":
      return new NumberField(spec, shape);
    case "string":
      return new TextField(spec, shape);
    case "object":
      return new ObjectField(spec, shape);
    case "map":
      return new MapField(spec, shape);
    case "array":
    case "tuple":
      return new ListField(spec, shape);
    case "union":
      return new UnionField(spec, shape);
    default:
      return new AnyField(spec, shape);
  }
}
