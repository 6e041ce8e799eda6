/**
 * JSON schemas: what kind of input a schema asks for. Knows schemas, as pydantic writes them; must not know elements.
 */

/** @typedef {"const" | "choice" | "boolean" | "number" | "string" | "any"} PlainKind */
/** @typedef {PlainKind | "object" | "map" | "array" | "tuple" | "union"} Kind */
/**
 * @typedef {object} Shape
 * @property {Kind} kind
 * @property {Record<string, any>} schema - The schema without its references.
 * @property {boolean} isNullable - Whether null is a value.
 * @property {any} [value] - Of a const.
 * @property {any[]} [options] - Of a choice.
 * @property {any[]} [variants] - Schemas of a union.
 * @property {any} [items] - Schema of the items or values.
 * @property {any[]} [prefix] - Schemas of a tuple.
 */

const MOST_BUTTONS = 8;
const LONG_NAMES =
  /(^|_)(body|code|command|content|description|instruction|message|patch|prompt|query|script|sql|text)s?($|_)/i;

/**
 * Say what a schema asks for.
 * @param {any} schema
 * @param {any} root - The schema with the definitions that references point to.
 * @returns {Shape}
 */
export function shapeOf(schema, root) {
  const plain = resolve(schema, root);
  if ("const" in plain) return { kind: "const", schema: plain, isNullable: false, value: plain.const };
  if (Array.isArray(plain.enum)) return choice(plain, plain.enum);
  const variants = variantsOf(plain, root);
  if (variants) return unionShape(plain, variants, root);
  return typedShape(plain);
}

/**
 * Follow references and merge `allOf`, so that what is left says everything itself.
 * @param {any} schema
 * @param {any} root
 * @returns {Record<string, any>}
 */
export function resolve(schema, root) {
  if (schema === true || schema === null || typeof schema !== "object") return {};
  let plain = schema;
  for (let hops = 0; typeof plain.$ref === "string" && hops < 20; hops += 1) {
    const { $ref, ...beside } = plain;
    plain = { ...lookUp($ref, root), ...beside };
  }
  if (Array.isArray(plain.allOf)) {
    const { allOf, ...beside } = plain;
    plain = merge([...allOf.map((/** @type {any} */ part) => resolve(part, root)), beside]);
  }
  return plain;
}

/**
 * Title of a field: what the schema calls it, or its name in words.
 * @param {string} name
 * @param {Record<string, any>} schema
 */
export function labelOf(name, schema) {
  const words = name
    .replace(/[_-]+/g, " ")
    .trim()
    .replace(/\b(url|api)\b/gi, (word) => word.toUpperCase());
  const made = words === "" ? name : words[0].toUpperCase() + words.slice(1);
  const title = typeof schema.title === "string" ? schema.title : "";
  return title === "" || title.toLowerCase() === words.toLowerCase() ? made : title;
}

/**
 * Say whether text of a field is likely to be long.
 * @param {string} name
 * @param {Record<string, any>} schema
 */
export function isLongText(name, schema) {
  if (typeof schema.maxLength === "number") return schema.maxLength > 300;
  return LONG_NAMES.test(name);
}

/**
 * Say in words what a schema allows: "0 to 9", "at most 80 characters".
 * @param {Record<string, any>} schema
 */
export function limitsOf(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  const said = [];
  if (low !== undefined && high !== undefined) said.push(`${low} to ${high}`);
  else if (low !== undefined) said.push(schema.minimum === undefined ? `more than ${low}` : `at least ${low}`);
  else if (high !== undefined) said.push(schema.maximum === undefined ? `less than ${high}` : `at most ${high}`);
  if (schema.multipleOf !== undefined) said.push(`in steps of ${schema.multipleOf}`);
  if (schema.minLength > 1) said.push(`at least ${schema.minLength} characters`);
  if (schema.maxLength !== undefined) said.push(`at most ${schema.maxLength} characters`);
  const [example] = Array.isArray(schema.examples) ? schema.examples : [];
  if (typeof example === "string") said.push(`for example ${example}`);
  else if (schema.pattern !== undefined) said.push(`matching ${schema.pattern}`);
  if (schema.format !== undefined) said.push(String(schema.format));
  return said.join(", ");
}

/**
 * Say whether a value could be meant by a schema; used to find the variant of a union.
 * @param {any} value
 * @param {any} schema
 * @param {any} root
 * @returns {boolean}
 */
export function fits(value, schema, root) {
  const shape = shapeOf(schema, root);
  if (value === null) return shape.isNullable || shape.value === null || shape.kind === "any";
  switch (shape.kind) {
    case "const":
      return shape.value === value;
    case "choice":
      return (shape.options ?? []).includes(value);
    case "boolean":
      return typeof value === "boolean";
    case "number":
      return typeof value === "number" && (shape.schema.type !== "integer" || Number.isInteger(value));
    case "string":
      return typeof value === "string";
    case "array":
    case "tuple":
      return Array.isArray(value);
    case "object":
      return isRecord(value) && fitsObject(value, shape.schema, root);
    case "map":
      return isRecord(value);
    default:
      return true;
  }
}

/**
 * Leave out what would be so anyway: parts that are not required and have the value they have by default.
 * @param {any} value
 * @param {any} schema
 * @returns {any}
 */
export function withoutDefaults(value, schema) {
  const { properties = {}, required = [] } = resolve(schema, schema);
  if (!isRecord(value)) return value;
  const kept = Object.entries(value).filter(([name, part]) => {
    if (required.includes(name) || !(name in properties)) return true;
    const standard = resolve(properties[name], schema).default ?? null;
    return JSON.stringify(part) !== JSON.stringify(standard);
  });
  return Object.fromEntries(kept);
}

/** Whether a field is likely to hold what others must not see. @param {string} name */
export function isSecret(name) {
  return /(^|_)(api_?key|token|secret|password)$/i.test(name);
}

/** @param {any} value @returns {value is Record<string, any>} */
export function isRecord(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

/** @param {Record<string, any>} value @param {Record<string, any>} schema @param {any} root @returns {boolean} */
function fitsObject(value, schema, root) {
  const properties = schema.properties ?? {};
  if ((schema.required ?? []).some((/** @type {string} */ name) => !(name in value))) return false;
  return Object.entries(value).every(([name, part]) =>
    name in properties ? fits(part, properties[name], root) : schema.additionalProperties !== false,
  );
}

/** @param {string} reference @param {any} root */
function lookUp(reference, root) {
  let found = root;
  for (const part of reference.replace(/^#\/?/, "").split("/").filter(Boolean)) {
    found = found?.[decodeURIComponent(part).replace(/~1/g, "/").replace(/~0/g, "~")];
  }
  return isRecord(found) ? found : {};
}

/** @param {Record<string, any>[]} parts */
function merge(parts) {
  /** @type {Record<string, any>} */
  const whole = {};
  for (const part of parts) {
    const properties = { ...whole.properties, ...part.properties };
    const required = [...(whole.required ?? []), ...(part.required ?? [])];
    Object.assign(whole, part);
    if (Object.keys(properties).length) whole.properties = properties;
    if (required.length) whole.required = required;
  }
  return whole;
}

/** @param {Record<string, any>} plain @param {any} root @returns {any[] | null} */
function variantsOf(plain, root) {
  const list = plain.anyOf ?? plain.oneOf;
  if (Array.isArray(list)) return list.map((variant) => resolve(variant, root));
  if (Array.isArray(plain.type)) return plain.type.map((/** @type {string} */ type) => ({ ...plain, type }));
  return null;
}

/** @param {Record<string, any>} plain @param {any[]} variants @param {any} root @returns {Shape} */
function unionShape(plain, variants, root) {
  const others = variants.filter((variant) => variant.type !== "null" && variant.const !== null);
  const isNullable = others.length < variants.length;
  const { anyOf, oneOf, ...beside } = plain;
  if (Array.isArray(beside.type)) delete beside.type;
  const fixed = others.map((variant) => ("const" in variant ? [variant.const] : variant.enum));
  if (fixed.length && fixed.every(Array.isArray)) {
    return { ...choice(beside, fixed.flat()), isNullable };
  }
  if (others.length && others.every((variant) => variant.type === "integer" || variant.type === "number")) {
    const type = others.every((variant) => variant.type === "integer") ? "integer" : "number";
    return { ...typedShape({ ...(others.length === 1 ? others[0] : {}), ...beside, type }), isNullable };
  }
  if (others.length === 1) {
    const only = shapeOf({ ...others[0], ...beside }, root);
    return { ...only, isNullable: only.isNullable || isNullable };
  }
  return { kind: "union", schema: plain, isNullable, variants: others };
}

/** @param {Record<string, any>} schema @param {any[]} values @returns {Shape} */
function choice(schema, values) {
  const options = values.filter((value) => value !== null);
  return { kind: "choice", schema, isNullable: options.length < values.length, options };
}

/** @param {Record<string, any>} schema @returns {Shape} */
function typedShape(schema) {
  const base = { schema, isNullable: false };
  switch (schema.type) {
    case "boolean":
    case "string":
      return { ...base, kind: schema.type };
    case "null":
      return { ...base, kind: "const", value: null };
    case "integer":
    case "number":
      return isSmallRange(schema) ? { ...base, kind: "choice", options: range(schema) } : { ...base, kind: "number" };
    case "array":
      return arrayShape(schema);
    case "object":
      return objectShape(schema);
    default:
      return schema.properties ? objectShape(schema) : { ...base, kind: "any" };
  }
}

/** @param {Record<string, any>} schema @returns {Shape} */
function arrayShape(schema) {
  const base = { schema, isNullable: false };
  if (Array.isArray(schema.prefixItems)) return { ...base, kind: "tuple", prefix: schema.prefixItems };
  if (!isRecord(schema.items) || schema.minItems > 16) return { ...base, kind: "any" };
  return { ...base, kind: "array", items: schema.items };
}

/** @param {Record<string, any>} schema @returns {Shape} */
function objectShape(schema) {
  const base = { schema, isNullable: false };
  if (schema.properties && Object.keys(schema.properties).length) return { ...base, kind: "object" };
  if (schema.additionalProperties === false && schema.properties) return { ...base, kind: "object" };
  return { ...base, kind: "map", items: isRecord(schema.additionalProperties) ? schema.additionalProperties : {} };
}

/** @param {Record<string, any>} schema */
function isSmallRange(schema) {
  const { minimum, maximum, multipleOf } = schema;
  return (
    schema.type === "integer" &&
    multipleOf === undefined &&
    Number.isInteger(minimum) &&
    Number.isInteger(maximum) &&
    maximum >= minimum &&
    maximum - minimum < MOST_BUTTONS
  );
}

/** @param {Record<string, any>} schema */
function range(schema) {
  return Array.from({ length: schema.maximum - schema.minimum + 1 }, (_, index) => schema.minimum + index);
}
