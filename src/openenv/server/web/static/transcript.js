/**
 * A rollout as a transcript: what the model was asked, what it answered, which tools it called, turn by turn.
 *
 * Everything in it was written by agents, models and tools. It becomes text and pictures from data, nothing else.
 */

import { rolloutApi } from "./api.js";
import { branchGraph } from "./branches.js";
import { el, fill } from "./element.js";
import { sourceOf } from "./image.js";
import { codeBlock, firstLine, folded, formatCount, isLong, visible } from "./texts.js";
import { Tokens } from "./tokens.js";
import { turnChart } from "./turn_chart.js";
import { formatSeconds } from "./values.js";

const ROLES = { system: "System", user: "User", assistant: "Assistant", tool: "Tool" };
const BATCH = 40;

/** The turns of one rollout; those of a running one may be added and replaced. */
export class TranscriptView {
  /** @param {string} id - Of the rollout. @param {object} [options] @param {boolean} [options.isCompact] */
  constructor(id, { isCompact = false } = {}) {
    this.id = id;
    this.isCompact = isCompact;
    /** @type {any[]} */
    this.turns = [];
    /** @type {Map<number, HTMLElement>} */
    this.nodes = new Map();
    this.shown = 0;
    this.head = el("div.calls-head");
    this.list = el("ol.turns");
    this.more = el("button", { type: "button", hidden: true, on: { click: () => this.#grow() } }, "Show more turns");
    this.findings = el("div");
    this.node = el("div.calls", {}, this.head, this.findings, this.list, this.more);
  }

  /** Ask for the turns. */
  async load() {
    try {
      this.show(await rolloutApi.one(this.id, "transcript"));
    } catch (error) {
      fill(this.node, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message));
    }
  }

  /** @param {{turns: any[], findings: any[], level: string | null, stops: number}} transcript */
  show({ turns, findings, level, stops }) {
    this.turns = turns;
    this.shown = 0;
    this.nodes.clear();
    fill(this.list);
    fill(this.findings, findingsNode(findings, level, stops));
    this.#grow();
    this.#drawHead();
  }

  /** Take turns of a running rollout, new ones and those that went on. @param {any[]} turns */
  merge(turns) {
    for (const turn of turns) {
      const at = this.turns.findIndex((each) => each.number === turn.number);
      const node = this.#turn(turn);
      if (at >= 0) this.turns[at] = turn;
      else this.turns.push(turn);
      const before = this.nodes.get(turn.number);
      if (before) before.replaceWith(node);
      else this.list.append(node);
      this.nodes.set(turn.number, node);
      this.shown = this.turns.length;
    }
    if (turns.length) this.#drawHead();
  }

  /** Bring a turn into view. @param {number} number */
  goTo(number) {
    while (!this.nodes.has(number) && this.shown < this.turns.length) this.#grow();
    const node = this.nodes.get(number);
    if (!node) return;
    node.scrollIntoView({ block: "start", behavior: "smooth" });
    node.focus({ preventScroll: true });
  }

  #grow() {
    const part = this.turns.slice(this.shown, this.shown + BATCH);
    for (const turn of part) {
      const node = this.#turn(turn);
      this.nodes.set(turn.number, node);
      this.list.append(node);
    }
    this.shown += part.length;
    const left = this.turns.length - this.shown;
    this.more.hidden = left <= 0;
    this.more.textContent = `Show more turns (${left})`;
  }

  #drawHead() {
    if (this.turns.length === 0) {
      fill(this.head, el("p.hint", {}, "No model was called."));
      return;
    }
    if (this.isCompact) return;
    const goTo = (/** @type {number} */ number) => this.goTo(number);
    const isLine = this.turns.every((turn, index) => turn.parent === (this.turns[index - 1]?.number ?? null));
    const all = el("button.small", { type: "button", on: { click: () => this.#openTokens() } }, "Show all tokens");
    fill(this.head, turnChart(this.turns, goTo), !isLine && branchGraph(this.turns, goTo), all);
  }

  #openTokens() {
    for (const node of this.list.querySelectorAll("details.of-tokens")) /** @type {any} */ (node).open = true;
  }

  /** @param {any} turn */
  #turn(turn) {
    const facts = [
      turn.finish_reason && `ended by ${turn.finish_reason}`,
      turn.prompt_tokens !== null && `${formatCount(turn.prompt_tokens)} in`,
      `${formatCount(turn.sampled_tokens)} out`,
      turn.mean_logprob !== null && `mean log-probability ${turn.mean_logprob.toFixed(3)}`,
      turn.mean_entropy !== null && `entropy ${turn.mean_entropy.toFixed(3)}`,
      `${formatSeconds(turn.latency_s)}`,
      turn.ended === null && "not ended",
    ].filter(Boolean);
    const tokens = folded(["Tokens, coloured by log-probability"], () => new Tokens(this.id, turn.number).node, {
      kind: ".of-tokens",
    });
    return el(
      "li.turn",
      { tabindex: -1, id: `turn-${this.id}-${turn.number}`, data: { branch: turn.branch } },
      el(
        "header.turn-head",
        {},
        el("h3", {}, `Call ${turn.number}`),
        turn.branch !== "main" && el("span.badge", {}, turn.branch),
        turn.not_trainable.length > 0 &&
          el("span.badge.is-negative", { title: turn.not_trainable.join(", ") }, "not trained on"),
        el("span.hint", {}, facts.join(", ")),
      ),
      turn.messages.map((/** @type {any} */ message) => messageNode(message)),
      turn.tools.length > 0 && turn.parent === null && toolList(turn.tools),
      messageNode(turn.reply, true),
      turn.error && el("p.problem", {}, visible(turn.error)),
      turn.sampled_tokens > 0 && turn.ended !== null && tokens,
    );
  }
}

/** @param {string[]} tools */
function toolList(tools) {
  return folded([`${tools.length} ${tools.length === 1 ? "tool" : "tools"}`], () => el("p.hint", {}, tools.join(", ")));
}

/** @param {{role: string, parts: any[]}} message @param {boolean} [isReply] */
function messageNode(message, isReply = false) {
  const role = Object.hasOwn(ROLES, message.role) ? ROLES[/** @type {keyof typeof ROLES} */ (message.role)] : "";
  const isFolded = message.role === "system";
  const parts = message.parts.map((part) => partNode(part, isFolded));
  return el(
    isReply ? "section.message.is-reply" : "section.message",
    { data: { role: role ? message.role : "other" } },
    el("h4.role", {}, role || visible(firstLine(message.role, 40))),
    parts.length ? parts : el("p.hint", {}, "Nothing."),
  );
}

/** @param {any} part @param {boolean} isFolded */
function partNode(part, isFolded) {
  const text = part.text ?? "";
  const cut = part.cut ?? 0;
  const block = (/** @type {string} */ kind, label = "") => codeBlock(text, { kind, cut, label });
  if (part.kind === "image") return imageNode(text);
  if (part.kind === "reasoning") {
    return text
      ? folded([`Reasoning, ${text.length} characters`], () => block(".said"))
      : el("p.hint", {}, "Reasoning, encrypted");
  }
  if (part.kind === "call") {
    const title = [el("strong", {}, visible(part.name || "tool")), " ", el("code", {}, visible(firstLine(text, 90)))];
    return folded(title, () => codeBlock(pretty(text), { cut, label: "Arguments" }), { kind: ".called" });
  }
  if (part.kind === "result") {
    const title = [part.is_error ? "Error: " : "Result: ", el("code", {}, visible(firstLine(text, 90)))];
    if (!isLong(text)) return el(`div.returned${part.is_error ? ".is-error" : ""}`, {}, block(""));
    return folded(title, () => block("", "Result"), { kind: part.is_error ? ".returned.is-error" : ".returned" });
  }
  if (part.kind === "other") return folded([visible(part.name ?? "something else")].flat(), () => block(""));
  if (isFolded && isLong(text)) return folded([el("span", {}, visible(firstLine(text, 100)))], () => block(".said"));
  return block(".said");
}

/** @param {string} source */
function imageNode(source) {
  const safe = sourceOf(source);
  return safe
    ? el("figure.picture", {}, el("img", { src: safe, alt: "An image of the conversation", loading: "lazy" }))
    : el("p.hint", {}, "This image cannot be displayed.");
}

/** @param {string} text */
function pretty(text) {
  try {
    const value = JSON.parse(text);
    if (value === null || typeof value !== "object") return text;
    // Programs and patches are read line by line: texts stand below their names as they are.
    return Object.entries(value)
      .map(([name, item]) =>
        typeof item === "string"
          ? `${name}: ${item.includes("\n") ? `\n${item}` : item}`
          : `${name}: ${JSON.stringify(item, null, 2)}`,
      )
      .join("\n");
  } catch {
    return text;
  }
}

/** @param {any[]} findings @param {string | null} level @param {number} stops */
function findingsNode(findings, level, stops) {
  const serious = findings.filter((finding) => finding.severity !== "INFO");
  const captured = {
    tokens: "Captured with token ids and log-probabilities.",
    logprobs: "Captured with log-probabilities, without token ids: not for training.",
    text: "Captured as text only: not for training.",
  }[level ?? ""];
  const lines = findings.map((finding) =>
    el(
      "li",
      {},
      el(finding.severity === "INFO" ? "span.badge" : "span.badge.is-negative", {}, finding.severity),
      ` ${finding.call ? `call ${finding.call}: ` : ""}`,
      visible(finding.message),
    ),
  );
  const stopped = stops ? ` The budget answered ${stops} calls.` : "";
  if (lines.length === 0) return el("p.hint", {}, `${captured ?? ""}${stopped}`);
  const title = `${captured ?? ""}${stopped} ${findings.length} notes${serious.length ? `, ${serious.length} of them serious` : ""}`;
  return folded([title], () => el("ul.notes", {}, lines));
}
