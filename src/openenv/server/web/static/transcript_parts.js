/**
 * Messages of a transcript: texts, reasoning, images, and tool calls with their results beside them.
 *
 * Everything in it was written by agents, models and tools. It becomes text and pictures from data, nothing else.
 */

import { el } from "./element.js";
import { sourceOf } from "./image.js";
import { clamped, codeBlock, firstLine, folded, isLong, visible } from "./texts.js";

const ROLES = { system: "System", user: "User", assistant: "Assistant", tool: "Tool" };

/** @typedef {{kind: string, text?: string, name?: string, call_id?: string, is_error?: boolean, cut?: number}} Part */
/** @typedef {{role: string, parts: Part[]}} Message */
/**
 * @typedef {object} Pairs
 * @property {Map<Part, Part>} results - The result of each tool call.
 * @property {Set<Part>} shown - The results that are beside their calls, so the next turn leaves them out.
 */

/**
 * Find the results of tool calls. An agent sends them with its next model call.
 * @param {any[]} turns
 * @returns {Pairs}
 */
export function pairResults(turns) {
  /** @type {Pairs} */
  const pairs = { results: new Map(), shown: new Set() };
  /** @type {Map<number, any[]>} */
  const children = new Map();
  for (const turn of turns) {
    if (turn.parent !== null) children.set(turn.parent, [...(children.get(turn.parent) ?? []), turn]);
  }
  for (const turn of turns) {
    const calls = turn.reply.parts.filter((/** @type {Part} */ part) => part.kind === "call");
    const next = children.get(turn.number) ?? [];
    // A discarded answer and the one after it have the same results; other branches may have others.
    for (const child of [...next].sort((one, other) => Number(isRetry(one)) - Number(isRetry(other)))) {
      const parts = child.messages.flatMap((/** @type {Message} */ message) => message.parts);
      const results = parts.filter((/** @type {Part} */ part) => part.kind === "result");
      for (const call of calls) {
        const at = results.findIndex((/** @type {Part} */ part) => part.call_id === call.call_id);
        if (at < 0) continue;
        const [result] = results.splice(at, 1);
        const before = pairs.results.get(call);
        if (!before) pairs.results.set(call, result);
        if (!before || before.text === result.text) pairs.shown.add(result);
      }
    }
  }
  return pairs;
}

/** @param {any} turn */
function isRetry(turn) {
  return turn.branch === "retry";
}

/** The parts of a message in the order in which they are shown: results behind their calls. @param {Message} message @param {Pairs} pairs */
export function shownParts({ parts }, { results, shown }) {
  return parts.filter((part) => !shown.has(part)).flatMap((part) => [part, ...(results.has(part) ? [results.get(part)] : [])]);
}

/** The text of a part as the page shows it, for search and copies. @param {Part} part */
export function textOf(part) {
  if (part.kind === "image") return "";
  return part.kind === "call" ? `${part.name || "tool"}\n${argumentsText(part.text ?? "")}` : (part.text ?? "");
}

/** A turn as plain text. @param {any} turn @param {Pairs} pairs */
export function turnText(turn, pairs) {
  const lines = [`## Turn ${turn.number}`];
  for (const message of [...turn.messages, turn.reply]) {
    const parts = shownParts(message, pairs);
    if (parts.length) lines.push(`### ${roleName(message.role)}`);
    for (const part of parts) lines.push(part?.kind === "text" ? textOf(part) : `[${part?.kind}] ${textOf(part ?? { kind: "" })}`);
  }
  return lines.join("\n\n");
}

/** The name of a role. @param {string} role */
export function roleName(role) {
  return Object.hasOwn(ROLES, role) ? ROLES[/** @type {keyof typeof ROLES} */ (role)] : firstLine(role, 40);
}

/**
 * @param {Message} message
 * @param {Pairs} pairs
 * @param {(part: Part, node: HTMLElement) => void} place - Notes where a part is.
 * @param {boolean} [isReply]
 * @returns {HTMLElement | null}
 */
export function messageNode(message, pairs, place, isReply = false) {
  const parts = message.parts.filter((part) => !pairs.shown.has(part));
  if (parts.length === 0 && message.parts.length > 0) return null;
  const isFolded = message.role === "system";
  const nodes = parts.map((part) => {
    const node = partNode(part, isFolded);
    place(part, node);
    const result = pairs.results.get(part);
    if (!result) return part.kind === "call" ? el("div.tool-use", {}, node) : node;
    const said = resultNode(result);
    place(result, said);
    return el("div.tool-use.has-result", {}, node, said);
  });
  return el(
    isReply ? "section.message.is-reply" : "section.message",
    { data: { role: Object.hasOwn(ROLES, message.role) ? message.role : "other" } },
    el("h4.role", {}, visible(roleName(message.role))),
    nodes.length ? nodes : el("p.hint", {}, "Nothing."),
  );
}

/** @param {Part} part @param {boolean} isFolded @returns {HTMLElement} */
function partNode(part, isFolded) {
  const text = part.text ?? "";
  const cut = part.cut ?? 0;
  if (part.kind === "image") return imageNode(text);
  if (part.kind === "reasoning") {
    return text
      ? folded([`Reasoning, ${text.length} characters`], () => codeBlock(text, { kind: ".said", cut }))
      : el("p.hint", {}, "Reasoning, encrypted");
  }
  if (part.kind === "call") return callNode(part);
  if (part.kind === "result") return resultNode(part);
  if (part.kind === "other") return folded(visible(part.name ?? "something else"), () => codeBlock(text, { cut }));
  if (isFolded && isLong(text)) {
    return folded([el("span", {}, visible(firstLine(text, 100)))], () => codeBlock(text, { kind: ".said", cut }));
  }
  return clamped(text, { kind: ".said", cut });
}

/** @param {Part} part */
function callNode(part) {
  const text = part.text ?? "";
  const values = argumentsOf(text);
  const body = values
    ? Object.entries(values).map(([name, value]) => {
        const shown = typeof value === "string" ? value : JSON.stringify(value, null, 2);
        const label = el("span.argument-name", {}, visible(name));
        return shown.includes("\n")
          ? el("div.argument", {}, label, clamped(shown, { label: firstLine(name, 40) }))
          : el("div.argument.is-short", {}, label, el("code", {}, visible(shown.slice(0, 2000))));
      })
    : clamped(text, { cut: part.cut, label: "Arguments" });
  const missing = values && (part.cut ?? 0) > 0 && el("p.hint", {}, `${part.cut} more characters are in exports only.`);
  return el("div.called", {}, el("h5.called-name", {}, visible(part.name || "tool")), body, missing);
}

/** @param {Part} part */
function resultNode({ text = "", cut = 0, is_error: isError = false }) {
  return el(
    isError ? "div.returned.is-error" : "div.returned",
    {},
    el("h5.role", {}, isError ? "Error" : "Result"),
    text === "" ? el("p.hint", {}, "Empty.") : clamped(text, { cut, label: "Result" }),
  );
}

/** @param {string} source */
function imageNode(source) {
  const safe = sourceOf(source);
  const broken = () => el("p.hint", {}, "This image cannot be displayed.");
  if (!safe) return broken();
  const image = el("img", { src: safe, alt: "An image of the conversation" });
  image.addEventListener("error", () => image.replaceWith(broken()));
  return el("figure.picture", {}, image);
}

/** @param {string} text @returns {Record<string, any> | null} */
function argumentsOf(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

/** Programs and patches are read line by line: texts stand below their names as they are. @param {string} text */
function argumentsText(text) {
  const values = argumentsOf(text);
  if (!values) return text;
  return Object.entries(values)
    .map(([name, value]) => `${name}\n${typeof value === "string" ? value : JSON.stringify(value, null, 2)}`)
    .join("\n");
}
