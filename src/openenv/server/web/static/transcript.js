/**
 * A rollout as a transcript: what the model was asked, what it answered, which tools it called, turn by turn; with an
 * outline, search, the calls as JSON, copies, and a version for paper.
 */

import { rolloutApi } from "./api.js";
import { branchGraph } from "./branches.js";
import { copyButton } from "./copy.js";
import { el, fill } from "./element.js";
import { Outline } from "./outline.js";
import { rolloutAddress } from "./rollout_address.js";
import { codeBlock, folded, formatCount, visible } from "./texts.js";
import { Tokens } from "./tokens.js";
import { messageNode, pairResults, shownParts, turnText } from "./transcript_parts.js";
import { TranscriptSearch } from "./transcript_search.js";
import { turnChart } from "./turn_chart.js";
import { formatReward, formatSeconds } from "./values.js";

const BATCH = 40;

/** The turns of one rollout; those of a running one may be added and replaced. */
export class TranscriptView {
  /**
   * @param {string} id - Of the rollout.
   * @param {object} [options]
   * @param {boolean} [options.isCompact] - Beside another one.
   * @param {Record<string, number>} [options.rewards] - By turn.
   * @param {Record<string, number>} [options.branches] - How many other rollouts branch off, by turn.
   */
  constructor(id, { isCompact = false, rewards = {}, branches = {} } = {}) {
    this.id = id;
    this.isCompact = isCompact;
    this.rewards = rewards;
    this.branches = branches;
    /** @type {any[]} */
    this.turns = [];
    this.pairs = pairResults([]);
    /** @type {Map<number, HTMLElement>} */
    this.nodes = new Map();
    /** @type {WeakMap<any, HTMLElement>} - The elements of parts. */
    this.places = new WeakMap();
    this.shown = 0;
    this.outline = new Outline({ goTo: (number) => this.goTo(number), rewards });
    this.search = new TranscriptSearch({ turns: () => this.#shownTurns(), reveal: (hit) => this.#reveal(hit) });
    this.outline.node.hidden = true;
    this.head = el("div.calls-head", {}, el("p.hint", {}, "Loading…"));
    this.list = el("ol.turns");
    this.more = el("button", { type: "button", hidden: true, on: { click: () => this.#grow() } }, "Show more turns");
    this.findings = el("div");
    const body = el("div.calls", {}, this.findings, this.list, this.more);
    this.node = isCompact
      ? body
      : el("div.turns-view", {}, this.head, el("div.turns-body", {}, this.outline.node, body));
    new IntersectionObserver(([entry]) => entry.isIntersecting && this.#grow(), { rootMargin: "600px" }).observe(
      this.more,
    );
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
    this.pairs = pairResults(turns);
    this.shown = 0;
    this.nodes.clear();
    fill(this.list);
    fill(this.findings, findingsNode(findings, level, stops));
    this.#drawHead();
    this.#grow();
  }

  /** Take turns of a running rollout, new ones and those that went on. @param {any[]} turns */
  merge(turns) {
    if (turns.length === 0) {
      if (this.turns.length === 0) fill(this.head, el("p.hint", {}, "No model was called yet."));
      return;
    }
    const changed = new Set(turns.map((turn) => turn.number));
    for (const turn of turns) {
      const at = this.turns.findIndex((each) => each.number === turn.number);
      if (at >= 0) this.turns[at] = turn;
      else this.turns.push(turn);
      if (turn.parent !== null) changed.add(turn.parent); // the results of its calls have come
    }
    this.pairs = pairResults(this.turns);
    for (const turn of this.turns.filter((each) => changed.has(each.number))) {
      const before = this.nodes.get(turn.number);
      const node = this.#add(turn);
      if (before) {
        this.outline.drop(before);
        before.replaceWith(node);
      } else {
        this.list.append(node);
      }
    }
    this.shown = this.turns.length;
    this.#drawHead();
  }

  /** Bring a turn into view. @param {number} number */
  goTo(number) {
    while (!this.nodes.has(number) && this.shown < this.turns.length) this.#grow();
    const node = this.nodes.get(number);
    if (!node) return;
    node.scrollIntoView({ block: "start" });
    node.focus({ preventScroll: true });
  }

  /** Go to the turn after the one in view, or before it. @param {number} by */
  step(by) {
    const chosen = document.activeElement?.closest(".turn");
    const number = chosen instanceof HTMLElement ? Number(chosen.dataset.turn) : this.outline.current;
    const at = this.turns.findIndex((turn) => turn.number === number);
    const turn = this.turns[Math.min(Math.max(at + by, 0), this.turns.length - 1)];
    if (turn) this.goTo(turn.number);
  }

  /** Draw and unfold everything but tokens, as paper cannot be clicked. */
  unfold() {
    while (this.shown < this.turns.length) this.#grow();
    for (const fold of this.node.querySelectorAll("details:not(.of-tokens, .of-json, .outline)")) {
      /** @type {any} */ (fold).open = true;
    }
    for (const button of this.node.querySelectorAll("button.unclamp")) /** @type {any} */ (button).click();
  }

  /** @param {import("./transcript_search.js").Hit} hit */
  #reveal({ turn, part }) {
    while (!this.nodes.has(turn) && this.shown < this.turns.length) this.#grow();
    const node = this.places.get(part);
    if (!node) return this.nodes.get(turn) ?? null;
    if (node instanceof HTMLDetailsElement && !node.open) {
      node.open = true;
      node.dispatchEvent(new Event("toggle")); // its own comes too late
    }
    while (node.querySelector("button.unclamp")) /** @type {any} */ (node.querySelector("button.unclamp")).click();
    return node;
  }

  #grow() {
    const part = this.turns.slice(this.shown, this.shown + BATCH);
    this.list.append(...part.map((turn) => this.#add(turn)));
    this.shown += part.length;
    const left = this.turns.length - this.shown;
    this.more.hidden = left <= 0;
    this.more.textContent = `Show more turns (${left})`;
  }

  /** @param {any} turn */
  #add(turn) {
    const node = this.#turn(turn);
    this.nodes.set(turn.number, node);
    this.outline.watch(node);
    return node;
  }

  #drawHead() {
    this.outline.node.hidden = this.turns.length < 2;
    if (this.turns.length === 0) {
      fill(this.head, el("p.hint", {}, "No model was called."));
      return;
    }
    if (this.isCompact) return;
    this.outline.show(this.turns);
    const goTo = (/** @type {number} */ number) => this.goTo(number);
    const isLine = this.turns.every((turn, index) => turn.parent === (this.turns[index - 1]?.number ?? null));
    const all = el("button.small", { type: "button", on: { click: () => this.#openTokens() } }, "Show all tokens");
    const print = el("button.small", { type: "button", on: { click: () => window.print() } }, "Print");
    if (!this.tools) {
      this.tools = el("div.turns-tools", {}, this.search.node, all, copyButton(() => this.#text()), print);
      this.charts = el("div.charts");
      fill(this.head, this.charts, this.tools);
    }
    fill(/** @type {HTMLElement} */ (this.charts), turnChart(this.turns, goTo), !isLine && branchGraph(this.turns, goTo));
  }

  #shownTurns() {
    return this.turns.map((turn) => ({
      turn: turn.number,
      parts: [...turn.messages, turn.reply].flatMap((message) => shownParts(message, this.pairs)),
    }));
  }

  #openTokens() {
    for (const node of this.list.querySelectorAll("details.of-tokens")) /** @type {any} */ (node).open = true;
  }

  #text() {
    return this.turns.map((turn) => turnText(turn, this.pairs)).join("\n\n");
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
    const { number } = turn;
    const tokens = folded(["Tokens, coloured by log-probability"], () => new Tokens(this.id, number).node, {
      kind: ".of-tokens",
    });
    const json = folded(["JSON of the model call"], () => jsonNode(this.id, number), { kind: ".of-json" });
    const reward = this.rewards[number];
    const copy = copyButton(() => turnText(turn, this.pairs));
    copy.setAttribute("aria-label", `Copy turn ${number}`);
    copy.classList.add("quiet");
    const place = (/** @type {any} */ part, /** @type {HTMLElement} */ node) => this.places.set(part, node);
    return el(
      "li.turn",
      { tabindex: -1, id: `turn-${this.id}-${number}`, data: { branch: turn.branch, turn: number } },
      el(
        "header.turn-head",
        {},
        el("h3", {}, `Turn ${number}`),
        turn.branch !== "main" && el("span.badge", {}, turn.branch),
        typeof reward === "number" && el("span.badge", {}, `reward ${formatReward(reward)}`),
        this.branches[number] > 0 &&
          el("a.badge", { href: rolloutAddress(this.id, "branches") }, branchText(this.branches[number])),
        turn.not_trainable.length > 0 &&
          el("span.badge.is-negative", { title: turn.not_trainable.join(", ") }, "not trained on"),
        el("span.hint", {}, facts.join(", ")),
        copy,
      ),
      turn.messages.map((/** @type {any} */ message) => messageNode(message, this.pairs, place)),
      turn.tools.length > 0 && turn.parent === null && toolList(turn.tools),
      messageNode(turn.reply, this.pairs, place, true),
      turn.error && el("p.problem", {}, visible(turn.error)),
      el("div.turn-more", {}, turn.sampled_tokens > 0 && turn.ended !== null && tokens, json),
    );
  }
}

/** @param {number} count */
function branchText(count) {
  return count === 1 ? "1 branch" : `${count} branches`;
}

/** A model call as it was recorded. @param {string} id @param {number} number */
function jsonNode(id, number) {
  const node = el("div", {}, el("p.hint", {}, "Loading…"));
  const load = async () => {
    try {
      const text = JSON.stringify(await rolloutApi.one(id, `calls/${number}`), null, 2);
      fill(node, copyButton(() => text), codeBlock(text, { label: `JSON of turn ${number}` }));
    } catch (error) {
      fill(node, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message));
    }
  };
  load();
  return node;
}

/** @param {string[]} tools */
function toolList(tools) {
  return folded([`${tools.length} ${tools.length === 1 ? "tool" : "tools"}`], () => el("p.hint", {}, tools.join(", ")));
}

/** Labels of findings, as `openenv rollouts show` writes them. @type {Record<string, string>} */
const SEVERITIES = { FATAL: "excluded from training:", WARN: "note", INFO: "info" };

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
      el(finding.severity === "INFO" ? "span.badge" : "span.badge.is-negative", {}, SEVERITIES[finding.severity]),
      ` ${finding.call ? `turn ${finding.call}: ` : ""}`,
      visible(finding.message),
    ),
  );
  const stopped = stops ? ` The budget answered ${stops} calls.` : "";
  if (lines.length === 0) return el("p.hint", {}, `${captured ?? ""}${stopped}`);
  const title = `${captured ?? ""}${stopped} ${findings.length} notes${serious.length ? `, ${serious.length} of them serious` : ""}`;
  return folded([title], () => el("ul.notes", {}, lines));
}
