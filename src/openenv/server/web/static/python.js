/**
 * The same call in Python: the source of what the page is about to do.
 *
 * Knows how values are written in Python and which client makes a call.
 */

import { serverAddress } from "./api.js";
import { copyButton } from "./copy.js";
import { el } from "./element.js";
import { isRecord, isSecret } from "./schema.js";

const WIDTH = 44;

/**
 * Write a JSON value as Python.
 * @param {any} value
 * @param {number} [indent]
 * @returns {string}
 */
export function pythonLiteral(value, indent = 0) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "number") return Number.isInteger(value) ? BigInt(value).toString() : String(value);
  if (typeof value === "string") return pythonText(value);
  const isList = Array.isArray(value);
  const parts = isList
    ? value.map((part) => pythonLiteral(part, indent + 4))
    : Object.entries(value).map(([key, part]) => `${pythonText(key)}: ${pythonLiteral(part, indent + 4)}`);
  const [open, close] = isList ? "[]" : "{}";
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length + indent <= WIDTH && !line.includes("\n")) return line;
  const pad = " ".repeat(indent + 4);
  return `${open}\n${parts.map((part) => `${pad}${part},\n`).join("")}${" ".repeat(indent)}${close}`;
}

/** @param {string} text */
function pythonText(text) {
  // JSON's escapes are Python's, but for surrogates that stand alone and characters that JSON leaves as they are.
  return JSON.stringify(text).replace(
    /[\u007f-\u009f\u2028\u2029]/g,
    (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/**
 * Write the arguments of a call: positional ones first, then keywords; in several lines where one is not enough.
 * @param {string[]} positional
 * @param {Record<string, any>} named
 */
function callArguments(positional, named) {
  const names = Object.keys(named);
  const areNames = names.every((name) => /^[A-Za-z_]\w*$/.test(name));
  const keywords = areNames
    ? names.map((name) => `${name}=${pythonLiteral(named[name], 8)}`)
    : [`**${pythonLiteral(named, 8)}`];
  const parts = [...positional, ...keywords];
  const line = parts.join(", ");
  return line.length <= WIDTH && !line.includes("\n")
    ? line
    : `\n${parts.map((part) => `        ${part},\n`).join("")}    `;
}

/**
 * @param {object} options
 * @param {boolean} options.needsToken
 * @param {Record<string, any>} options.reset
 * @param {any} options.action
 */
export function stepSource({ needsToken, reset, action }) {
  return source("GenericEnvClient", needsToken, [
    `env.reset(${callArguments([], reset)})`,
    `result = env.step(${pythonLiteral(withoutSecrets(withoutEmptyMetadata(action)), 4)})`,
    "print(result.reward, result.done)",
  ]);
}

/**
 * @param {object} options
 * @param {boolean} options.needsToken
 * @param {boolean} options.canReset
 * @param {string} options.name
 * @param {Record<string, any>} options.args
 */
export function callSource({ needsToken, canReset, name, args }) {
  const call = `result = env.call_tool(${callArguments([pythonText(name)], withoutSecrets(args))})`;
  return source("MCPToolClient", needsToken, [...(canReset ? ["env.reset()"] : []), call, "print(result)"]);
}

/** @param {string} client @param {boolean} needsToken @param {string[]} lines */
function source(client, needsToken, lines) {
  return [
    ...(needsToken ? ["# The server asks for a token: set OPENENV_TOKEN to it first."] : []),
    `from openenv import ${client}`,
    "",
    `url = "${serverAddress()}"`,
    `with ${client}(url).sync() as env:`,
    ...lines.map((line) => `    ${line}`),
  ].join("\n");
}

/** Source is copied and shown to others: keys and passwords are not part of it. @param {any} value @returns {any} */
function withoutSecrets(value) {
  if (!isRecord(value)) return value;
  const shown = Object.entries(value).map(([name, part]) => {
    const isHidden = isSecret(name) && typeof part === "string" && part !== "";
    return [name, isHidden ? "..." : withoutSecrets(part)];
  });
  return Object.fromEntries(shown);
}

/** @param {any} action */
function withoutEmptyMetadata(action) {
  if (action?.metadata && Object.keys(action.metadata).length === 0) {
    const { metadata, ...rest } = action;
    return rest;
  }
  return action ?? {};
}

/** A box with source and a button that copies it. */
export class PythonBox {
  /** @param {string} title */
  constructor(title) {
    this.code = el("code");
    const copy = copyButton(() => this.code.textContent ?? "");
    const head = el("div.card-head", {}, el("h2", {}, title), copy);
    const source = el("pre.source", { tabindex: 0, role: "region", "aria-label": title }, this.code);
    this.node = el("section.card.python", {}, head, source);
  }

  /** @param {string} text */
  show(text) {
    if (this.code.textContent !== text) this.code.textContent = text;
  }
}
